"""Predict all-reduce and step times past one machine, from the schedules that the code executes.

python benchmarks/simulate.py --out out/simulate                  measures between virtual hosts, then predicts
python benchmarks/simulate.py --out out/simulate --link out/simulate/measured.json --gigabits 100

The model is LogGP (Alexandrov et al., SPAA 1995): a message costs its sender and its receiver `message_s` each, and the
wire `latency_s` and `byte_s` per byte; a host has one link, which its ranks share. All ranks of a schedule do alike, so
one of them is followed through its rounds or chunks. What a message costs a processor is measured. Latency and bytes
are fitted, for each algorithm, to sums of some sizes on some numbers of hosts; the error is that of the others. What a
byte costs inside a host is assumed. What the tables say beyond measured hosts is predicted, not measured.
"""

import argparse
import functools
import json
import math
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from hpcdist.collectives.hierarchical import chunk_bytes
from hpcdist.collectives.rounds import SEGMENT_BYTES
from hpcdist.collectives.route import goes_by_halving
from hpcdist.plan.placement import Placement, plan_lanes
from hpcdist.plan.schedules import plan_halving, plan_ring

ROOT = Path(__file__).resolve().parent.parent
ALGORITHMS = ("RING", "HALVING", "HIERARCHICAL")
#: (hosts, bytes) that the costs are fitted to, and those that only tell the error.
FITTED = [(hosts, nbytes) for hosts in (2, 4) for nbytes in (256 << 10, 1 << 20, 4 << 20)]
HELD_OUT = [(hosts, nbytes) for hosts in (2, 3, 4) for nbytes in (512 << 10, 2 << 20, 8 << 20)]
#: Predicted numbers of ranks: powers of two, and others whose halving is uneven.
RANK_COUNTS = sorted([*(2**power for power in range(1, 17)), 200, 1000, 8200, 60000])


@dataclass(frozen=True)
class Link:
    """What messages cost; see the top.

    Attributes:
        latency_s, message_s, byte_s: see there.
        local_byte_s: seconds that a byte takes to be copied or summed inside a host; assumed.
        pod: hosts below one switch.
        oversubscription: how many times less the links above that switch carry than those below it.
    """

    latency_s: float
    message_s: float
    byte_s: float
    local_byte_s: float = 2e-10
    pod: int = 1 << 30
    oversubscription: float = 1.0


def spread(link, n_hosts, distance=None):
    """Return how many times longer bytes take on links above the switches: at one distance, or to all other hosts."""
    if n_hosts <= link.pod:
        return 1.0
    leaving = (
        (n_hosts - link.pod) / (n_hosts - 1) if distance is None else float(distance >= link.pod)
    )
    return max(1.0, link.oversubscription * leaving)


def rounds_s(rounds, link, n_hosts, n_ranks, n_flows):
    """Return the seconds of one rank's rounds, of (distance of the peer in ranks, bytes, messages).

    Of each host `n_flows` ranks send to other hosts at a time.
    """
    total_s = 0.0
    for peer_distance, nbytes, n_messages in rounds:
        if peer_distance < n_ranks:
            total_s += nbytes * link.local_byte_s
            continue
        n_segments = max(n_messages, -(-nbytes // SEGMENT_BYTES))
        wire_s = n_flows * nbytes * link.byte_s * spread(link, n_hosts, peer_distance // n_ranks)
        total_s += link.latency_s + 2 * n_segments * link.message_s + wire_s
    return total_s


def ring_s(n_hosts, n_ranks, nbytes, links):
    """Follow the rank at the end of a host, which sends to the next one: a ring leaves each host by one link."""
    size = n_hosts * n_ranks
    rank = n_ranks - 1
    sent = (
        (n_ranks, 4 * sum(message.stop - message.start for message in turn.sends), 1)
        for turn in plan_ring(size, rank, nbytes // 4)
    )
    return rounds_s(sent, links["RING"], n_hosts, n_ranks, n_flows=1)


def halving_s(n_hosts, n_ranks, nbytes, links):
    """Follow the slower one of the first and the last rank; beyond a host all its ranks send at a time."""
    size = n_hosts * n_ranks
    schedules = [halving_of(size, rank, nbytes) for rank in (0, size - 1)]
    return max(
        rounds_s(rounds, links["HALVING"], n_hosts, n_ranks, n_flows=n_ranks)
        for rounds in schedules
    )


def halving_of(size, rank, nbytes, distance=1):
    """Return the rounds of a rank among ranks that are `distance` apart."""
    return [
        (
            distance * max(abs(message.peer - rank) for message in turn.sends or turn.receives),
            4
            * max(
                sum(message.stop - message.start for message in messages)
                for messages in (turn.sends, turn.receives)
            ),
            max(len(turn.sends), len(turn.receives)),
        )
        for turn in plan_halving(size, rank, nbytes // 4)
    ]


@functools.cache
def placed(n_hosts, n_ranks):
    return Placement(
        tuple(tuple(range(host * n_ranks, (host + 1) * n_ranks)) for host in range(n_hosts))
    )


@functools.cache
def rows_sent(n_hosts, n_ranks, is_ordered):
    """Return the partial sums that a host sends: more than one where an ordered sum meets unaligned hosts."""
    placement = placed(n_hosts, n_ranks)
    if not is_ordered or placement.is_aligned:
        return 1
    return max(
        len(plan_lanes(placement, host, True).retained_rows)
        for host in {0, n_hosts // 2, n_hosts - 1}
    )


def hierarchical_s(n_hosts, n_ranks, nbytes, links, is_ordered=False):
    """Follow what HIERARCHICAL does: lanes, whose ranks exchange directly, or on many hosts by halving."""
    placement = placed(n_hosts, n_ranks)
    if goes_by_halving(placement) and (placement.is_aligned or not is_ordered):
        schedules = [
            halving_of(n_hosts, host, nbytes // n_ranks, distance=n_ranks)
            for host in (0, n_hosts - 1)
        ]
        local_s = 3 * nbytes * links["HALVING"].local_byte_s
        times = [
            rounds_s(rounds, links["HALVING"], n_hosts, n_ranks, n_flows=n_ranks)
            for rounds in schedules
        ]
        return local_s + max(times)
    return lanes_s(n_hosts, n_ranks, nbytes, links["HIERARCHICAL"], is_ordered)


def lanes_s(n_hosts, n_ranks, nbytes, link, is_ordered=False, chunk=None):
    """Follow a host through the pipeline of `collectives/hierarchical.py`: begin, combine and finish each chunk."""
    if chunk is None:
        small, large = (
            lanes_s(n_hosts, n_ranks, probe_bytes, link, chunk=1 << 20)
            for probe_bytes in (16 << 10, 256 << 10)
        )
        chunk = chunk_bytes(nbytes, max(1e-12, (large - small) / (240 << 10)))
    n_rows = rows_sent(n_hosts, n_ranks, is_ordered)
    n_other_hosts = n_hosts - 1
    sizes = [min(chunk, nbytes - start) for start in range(0, nbytes, chunk)]
    cpu_s = 0.0
    wire_s = 0.0
    arrives = {}
    for step in range(len(sizes) + 2):
        for phase, number in enumerate((step, step - 1, step - 2)):
            if not 0 <= number < len(sizes):
                continue
            part = sizes[number] * n_other_hosts / n_hosts
            if phase > 0:
                cpu_s = max(cpu_s, arrives[number, phase - 1])
            cpu_s += sizes[number] * link.local_byte_s
            if phase < 2:
                n_sent = n_rows if phase == 0 else 1
                cpu_s += 2 * n_other_hosts * n_sent * link.message_s
                wire_s = max(wire_s, cpu_s) + n_sent * part * link.byte_s * spread(link, n_hosts)
                arrives[number, phase] = wire_s + link.latency_s
    return cpu_s


SIMULATED = {"RING": ring_s, "HALVING": halving_s, "HIERARCHICAL": hierarchical_s}


def fit(rows, message_s):
    """Return the link whose predictions have the smallest mean square of the logarithm of their error."""

    def badness(values):
        link = Link(values[0], message_s, values[1])
        errors = [math.log(predict(row, link) / row["seconds"]) for row in rows]
        return sum(error * error for error in errors)

    best = [2e-4, 1e-8]
    factor = 2.0
    while factor > 1.002:
        tried = [
            [value * (scale if place == index else 1) for place, value in enumerate(best)]
            for index in range(2)
            for scale in (factor, 1 / factor)
        ]
        candidate = min(tried, key=badness)
        if badness(candidate) < badness(best):
            best = candidate
        else:
            factor = math.sqrt(factor)
    return Link(best[0], message_s, best[1])


def predict(row, link):
    return SIMULATED[row["algorithm"]](row["hosts"], 1, row["nbytes"], {row["algorithm"]: link})


def measure(args):
    """Return the seconds of sums between virtual hosts, of one rank each."""
    sys.path.insert(0, str(ROOT / "tests" / "hosts"))
    from virtual_hosts import VirtualHosts

    rows = []
    for n_hosts in sorted({hosts for hosts, _ in FITTED + HELD_OUT}):
        sizes = sorted({nbytes for hosts, nbytes in FITTED + HELD_OUT if hosts == n_hosts})
        command = [sys.executable, Path(__file__), "--job", *sizes]
        with VirtualHosts(n_hosts, args.rate) as hosts:
            result = hosts.run(command, 1, environ={"OMP_NUM_THREADS": "1"}, timeout_s=600).result
        rows += [{"hosts": n_hosts, **row} for row in result["rows"]]
    return {"message_s": result["message_s"], "rows": rows}


def run_job(sizes, repeats=7):
    """Time sums; the job of `measure`."""
    import hpcdist
    from hpcdist.runtime.mpi import MPI
    from hpcdist.runtime.process import make_world

    comm = make_world().role_comm
    rows = []
    for nbytes in sizes:
        for algorithm in ALGORITHMS:
            times = []
            for _ in range(repeats + 1):
                array = np.ones(nbytes // 4, np.float32)
                comm.Barrier()
                started = time.perf_counter()
                hpcdist.all_reduce(array, implementation=algorithm)
                times.append(comm.allreduce(time.perf_counter() - started, MPI.MAX))
                assert array[-1] == comm.size, "a wrong sum"
            rows.append(
                {
                    "algorithm": algorithm,
                    "nbytes": nbytes,
                    "seconds": sorted(times[1:])[repeats // 2],
                }
            )
    message_s = time_messages(comm)
    if comm.rank == 0:
        print(json.dumps({"rows": rows, "message_s": message_s}), flush=True)


def time_messages(comm, n_messages=2000):
    """Return the CPU-seconds that sending and receiving a small message takes rank 0. Collective: `comm`."""
    sent, received = np.zeros((2, n_messages, 16), np.uint8)
    after = (comm.rank + 1) % comm.size
    before = (comm.rank - 1) % comm.size
    comm.Barrier()
    started = time.process_time()
    requests = [comm.Irecv(row, before) for row in received] + [
        comm.Isend(row, after) for row in sent
    ]
    while not all(request.Test() for request in requests):
        time.sleep(0.001)
    return (time.process_time() - started) / (2 * n_messages)


def show_errors(rows, links):
    """Print predictions beside what was measured, and the largest error of held-out rows."""
    worst = {}
    for row in rows:
        is_fitted = (row["hosts"], row["nbytes"]) in FITTED
        row["predicted_s"] = predict(row, links[row["algorithm"]])
        error = row["predicted_s"] / row["seconds"] - 1
        times = (
            f"{1000 * row['seconds']:8.1f} ms measured {1000 * row['predicted_s']:8.1f} predicted"
        )
        held_out = "" if is_fitted else "  held out"
        print(
            f"{row['hosts']} hosts {row['nbytes'] >> 10:6} KiB {row['algorithm']:13} {times} {error:+7.1%}{held_out}"
        )
        if not is_fitted:
            worst.setdefault(row["algorithm"], []).append(abs(error))
    for algorithm, errors in worst.items():
        print(
            f"{algorithm}: held out, largest error {max(errors):.1%}, median {sorted(errors)[len(errors) // 2]:.1%}"
        )


def predictions(links, n_ranks, nbytes, compute_s):
    """Return rows of predicted seconds for every number of ranks: all-reduce by each algorithm, and steps.

    Weak scaling: each rank computes `compute_s`. Strong: two ranks do, and more share that work.
    """
    rows = []
    for size in RANK_COUNTS:
        n_hosts = -(-size // n_ranks)
        local = min(size, n_ranks)
        times = {}
        if n_hosts > 1:
            times = {name: call(n_hosts, local, nbytes, links) for name, call in SIMULATED.items()}
            times["HIERARCHICAL, never by halving"] = lanes_s(
                n_hosts, local, nbytes, links["HIERARCHICAL"]
            )
            for name, is_ordered in (("ordered", True), ("unordered", False)):
                seconds = hierarchical_s(n_hosts, 6, nbytes, links, is_ordered)
                times[f"HIERARCHICAL, as many hosts of 6 ranks, {name}"] = seconds
        taken_s = times.get("HIERARCHICAL", 2 * nbytes * links["RING"].local_byte_s)
        weak = step_s(compute_s, taken_s)
        strong = step_s(2 * compute_s / size, taken_s)
        rows.append(
            {"ranks": size, **times, "step, weak scaling": weak, "step, strong scaling": strong}
        )
    return rows


def step_s(compute_s, taken_s):
    """Return the seconds of a step whose sums begin with backward, two thirds; a sixteenth waits for its end."""
    return compute_s + max(taken_s - compute_s * 2 / 3, taken_s / 16)


def draw(tables, out):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(tables), figsize=(5.5 * len(tables), 4.5), sharey=True)
    for axis, (title, rows) in zip(axes, tables.items(), strict=True):
        for name in [name for name in rows[-1] if name != "ranks"]:
            points = [(row["ranks"], row[name]) for row in rows if name in row]
            axis.loglog(*zip(*points, strict=True), marker="o", markersize=3, label=name)
        axis.set(title=f"predicted: {title}", xlabel="ranks", ylabel="seconds")
        axis.grid(True, which="major", alpha=0.3)
    axes[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(out, dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for measured.json, predicted.json and .png"
    )
    parser.add_argument(
        "--link", type=Path, help="measured.json of an earlier run; measures nothing"
    )
    parser.add_argument(
        "--rate", type=float, default=1e9, help="bits per second of the links that are measured"
    )
    parser.add_argument(
        "--gigabits", type=float, default=100, help="bits per second, in 1e9, of predicted links"
    )
    parser.add_argument("--ranks", type=int, default=8, help="of each predicted host")
    parser.add_argument("--megabytes", type=float, default=100, help="gradients of a step")
    parser.add_argument(
        "--compute",
        type=float,
        default=0.1,
        help="seconds of forward and backward; of 2 ranks, if strong",
    )
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    measured = json.loads(args.link.read_text()) if args.link else measure(args)
    (args.out / "measured.json").write_text(json.dumps(measured, indent=1))
    rows = measured["rows"]
    message_s = measured["message_s"]
    links = {}
    for name in ALGORITHMS:
        fitted = [
            row
            for row in rows
            if (row["hosts"], row["nbytes"]) in FITTED and row["algorithm"] == name
        ]
        links[name] = link = fit(fitted, message_s)
        costs = f"latency {1e6 * link.latency_s:.0f} us, message {1e6 * message_s:.1f} us"
        print(f"{name}: {costs}, byte {1e9 * link.byte_s:.2f} ns")
    show_errors(rows, links)
    fast = {name: replace(link, byte_s=8e-9 / args.gigabits) for name, link in links.items()}
    pods = {name: replace(link, pod=32, oversubscription=4.0) for name, link in fast.items()}
    tables = {"full bisection": fast, "pods of 32 hosts, 4:1": pods}
    predicted = {
        title: predictions(table_links, args.ranks, int(1e6 * args.megabytes), args.compute)
        for title, table_links in tables.items()
    }
    (args.out / "predicted.json").write_text(json.dumps(predicted, indent=1))
    for title, table in predicted.items():
        print(
            f"predicted, {args.gigabits:g} Gbit/s, {args.ranks} ranks a host, {args.megabytes:g} MB, {title}:"
        )
        for row in table:
            print(
                "  ".join(
                    f"{name} {value if name == 'ranks' else round(1000 * value, 1)}"
                    for name, value in row.items()
                )
            )
    draw(predicted, args.out / "predicted.png")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--job"]:
        run_job([int(text) for text in sys.argv[2:]])
    else:
        main()

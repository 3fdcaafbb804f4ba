"""Predict all-reduce and step times past one machine, from the schedules that the code executes.

python benchmarks/simulate.py --out out/simulate                  measures between virtual hosts, then predicts
python benchmarks/simulate.py --out out/simulate --link out/simulate/measured.json --gigabits 100

The model is LogGP (Alexandrov et al., SPAA 1995): a message costs its sender and its receiver `message_s` each, and the
wire `latency_s` and `byte_s` per byte; a host has one link, which its ranks share. All ranks of a schedule do the same,
so one rank is followed through its rounds or chunks. The time that a message takes a processor is measured. Latency and
the time of a byte are fitted, for each algorithm, to sums of some sizes on some numbers of hosts; other sums tell the
error. The time of a byte inside a host is assumed. Figures for more hosts than measured are predictions.
"""

import functools
import itertools
import json
import math
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
from command_line import parser_of, virtual_hosts, write_json

from hpcdist.collectives.hierarchical import chunk_bytes
from hpcdist.collectives.rounds import SEGMENT_BYTES
from hpcdist.collectives.route import goes_by_halving
from hpcdist.plan.placement import Placement, plan_lanes
from hpcdist.plan.schedules import plan_halving, plan_ring

ALGORITHMS = ("RING", "HALVING", "HIERARCHICAL")
#: (hosts, bytes) of the sums that costs are fitted to, and of the sums that only tell the error.
KIB = 1 << 10
MIB = 1 << 20
FITTED_SIZES = (256 * KIB, MIB, 4 * MIB)
HELD_OUT_SIZES = (512 * KIB, 2 * MIB, 8 * MIB)
FITTED = list(itertools.product((2, 4), FITTED_SIZES))
HELD_OUT = list(itertools.product((2, 3, 4), HELD_OUT_SIZES))
#: A row of the errors: hosts, size and algorithm of a sum; its measured and its predicted time, and the error.
ERROR_ROW = "{} hosts {:6} KiB {:13} {:8.1f} ms measured {:8.1f} predicted {:+7.1%}"
#: Predicted numbers of ranks: powers of two, and numbers whose halving is uneven.
POWERS_OF_TWO = [2**power for power in range(1, 17)]
RANK_COUNTS = sorted([*POWERS_OF_TWO, 200, 1000, 8200, 60000])


@dataclass(frozen=True)
class Link:
    """The costs of messages.

    Attributes:
        latency_s: seconds that a message is on the wire, beside the time of its bytes.
        message_s: seconds that a message takes its sender, and its receiver.
        byte_s: seconds that a byte is on the wire.
        local_byte_s: seconds that a byte takes to be copied or summed inside a host; assumed.
        pod: number of hosts below one switch.
        oversubscription: how many times less the links above that switch carry than the links below it.
    """

    latency_s: float
    message_s: float
    byte_s: float
    local_byte_s: float = 2e-10
    pod: int = 1 << 30
    oversubscription: float = 1.0


class Round(NamedTuple):
    """The messages that a rank sends, or receives, in one round of a schedule.

    Attributes:
        peer_distance: distance of the farthest peer, in ranks.
        nbytes: bytes of all messages.
        n_messages: number of messages.
    """

    peer_distance: int
    nbytes: int
    n_messages: int


def spread(link, n_hosts, distance=None):
    """Return how many times longer bytes take on links above the switches.

    Args:
        link: the costs of messages.
        n_hosts: number of hosts.
        distance: distance of the host that the bytes go to, in hosts; None if they go to all other hosts.
    """
    if n_hosts <= link.pod:
        return 1.0
    leaving = (n_hosts - link.pod) / (n_hosts - 1)
    if distance is not None:
        leaving = float(distance >= link.pod)
    return max(1.0, link.oversubscription * leaving)


def rounds_s(rounds, link, n_hosts, n_ranks, n_flows):
    """Return the seconds of one rank's rounds.

    Args:
        rounds: rounds of the rank.
        link: the costs of messages.
        n_hosts: number of hosts.
        n_ranks: number of ranks on each host.
        n_flows: number of ranks on each host that send to other hosts at the same time.
    """
    total_s = 0.0
    for peer_distance, nbytes, n_messages in rounds:
        if peer_distance < n_ranks:
            total_s += nbytes * link.local_byte_s
            continue
        n_segments = max(n_messages, -(-nbytes // SEGMENT_BYTES))
        host_distance = peer_distance // n_ranks
        factor = spread(link, n_hosts, host_distance)
        wire_s = n_flows * nbytes * link.byte_s * factor
        cpu_s = 2 * n_segments * link.message_s
        total_s += link.latency_s + cpu_s + wire_s
    return total_s


def n_elements_of(messages):
    """Return the number of elements in messages."""
    n_elements = 0
    for message in messages:
        n_elements += message.stop - message.start
    return n_elements


def ring_s(n_hosts, n_ranks, nbytes, links):
    """Follow the rank at the end of a host, which sends to the next host: a ring leaves each host by one link."""
    size = n_hosts * n_ranks
    rank = n_ranks - 1
    rounds = []
    for turn in plan_ring(size, rank, nbytes // 4):
        sent_bytes = 4 * n_elements_of(turn.sends)
        rounds.append(Round(n_ranks, sent_bytes, n_messages=1))
    return rounds_s(rounds, links["RING"], n_hosts, n_ranks, n_flows=1)


def halving_s(n_hosts, n_ranks, nbytes, links):
    """Follow the slower one of the first and the last rank; all ranks of a host send beyond it at the same time."""
    size = n_hosts * n_ranks
    link = links["HALVING"]
    times = []
    for rank in (0, size - 1):
        rounds = halving_of(size, rank, nbytes)
        time_s = rounds_s(rounds, link, n_hosts, n_ranks, n_flows=n_ranks)
        times.append(time_s)
    return max(times)


def halving_of(size, rank, nbytes, distance=1):
    """Return the rounds of a rank among ranks that are `distance` apart."""
    rounds = []
    for turn in plan_halving(size, rank, nbytes // 4):
        messages = turn.sends or turn.receives
        distances = [abs(message.peer - rank) for message in messages]
        peer_distance = distance * max(distances)
        n_elements = max(n_elements_of(turn.sends), n_elements_of(turn.receives))
        n_messages = max(len(turn.sends), len(turn.receives))
        rounds.append(Round(peer_distance, 4 * n_elements, n_messages))
    return rounds


@functools.cache
def placed(n_hosts, n_ranks):
    hosts = []
    for host in range(n_hosts):
        first_rank = host * n_ranks
        ranks = range(first_rank, first_rank + n_ranks)
        hosts.append(tuple(ranks))
    return Placement(tuple(hosts))


@functools.cache
def rows_sent(n_hosts, n_ranks, is_ordered):
    """Return the partial sums that a host sends: more than one where an ordered sum meets unaligned hosts."""
    placement = placed(n_hosts, n_ranks)
    if not is_ordered or placement.is_aligned:
        return 1
    n_rows = 0
    for host in (0, n_hosts // 2, n_hosts - 1):
        lanes = plan_lanes(placement, host, True)
        n_rows = max(n_rows, len(lanes.retained_rows))
    return n_rows


def hierarchical_s(n_hosts, n_ranks, nbytes, links, is_ordered=False):
    """Follow HIERARCHICAL: lanes, whose ranks exchange directly, or on many hosts by halving."""
    placement = placed(n_hosts, n_ranks)
    may_halve = placement.is_aligned or not is_ordered
    if not may_halve or not goes_by_halving(placement):
        return lanes_s(n_hosts, n_ranks, nbytes, links["HIERARCHICAL"], is_ordered)
    link = links["HALVING"]
    local_s = 3 * nbytes * link.local_byte_s
    times = []
    for host in (0, n_hosts - 1):
        rounds = halving_of(n_hosts, host, nbytes // n_ranks, distance=n_ranks)
        times.append(rounds_s(rounds, link, n_hosts, n_ranks, n_flows=n_ranks))
    return local_s + max(times)


def lanes_s(n_hosts, n_ranks, nbytes, link, is_ordered=False, chunk=None):
    """Follow a host through the pipeline of `collectives/hierarchical.py`: begin, combine and finish each chunk."""
    if chunk is None:
        small = 16 * KIB
        large = 256 * KIB
        small_s = lanes_s(n_hosts, n_ranks, small, link, chunk=MIB)
        large_s = lanes_s(n_hosts, n_ranks, large, link, chunk=MIB)
        byte_s = (large_s - small_s) / (large - small)
        byte_s = max(1e-12, byte_s)
        chunk = chunk_bytes(nbytes, byte_s)
    n_rows = rows_sent(n_hosts, n_ranks, is_ordered)
    n_other_hosts = n_hosts - 1
    wire_byte_s = link.byte_s * spread(link, n_hosts)
    n_full, last_size = divmod(nbytes, chunk)
    sizes = [chunk] * n_full
    if last_size:
        sizes.append(last_size)
    cpu_s = 0.0
    wire_s = 0.0
    arrives = {}
    for step in range(len(sizes) + 2):
        for phase in range(3):
            number = step - phase
            if not 0 <= number < len(sizes):
                continue
            size = sizes[number]
            if phase > 0:
                arrived = arrives[number, phase - 1]
                cpu_s = max(cpu_s, arrived)
            cpu_s += size * link.local_byte_s
            if phase < 2:
                n_sent = n_rows if phase == 0 else 1
                cpu_s += 2 * n_other_hosts * n_sent * link.message_s
                sent_bytes = n_sent * size * n_other_hosts / n_hosts
                wire_s = max(wire_s, cpu_s)
                wire_s += sent_bytes * wire_byte_s
                arrives[number, phase] = wire_s + link.latency_s
    return cpu_s


SIMULATED = {"RING": ring_s, "HALVING": halving_s, "HIERARCHICAL": hierarchical_s}


def fit(rows, message_s):
    """Return the link whose predictions have the smallest mean square of the logarithm of their error."""

    def badness(values):
        latency_s, byte_s = values
        link = Link(latency_s, message_s, byte_s)
        total = 0.0
        for row in rows:
            factor = predict(row, link) / row["seconds"]
            error = math.log(factor)
            total += error * error
        return total

    best = [2e-4, 1e-8]
    factor = 2.0
    while factor > 1.002:
        candidates = []
        for index in range(2):
            for scale in (factor, 1 / factor):
                candidate = list(best)
                candidate[index] *= scale
                candidates.append(candidate)
        best_candidate = min(candidates, key=badness)
        if badness(best_candidate) < badness(best):
            best = best_candidate
        else:
            factor = math.sqrt(factor)
    return Link(best[0], message_s, best[1])


def predict(row, link):
    """Return the seconds of a sum between hosts of one rank each."""
    algorithm = row["algorithm"]
    simulated_s = SIMULATED[algorithm]
    n_hosts = row["hosts"]
    nbytes = row["nbytes"]
    return simulated_s(n_hosts, 1, nbytes, {algorithm: link})


def measure(args):
    """Return the measured seconds of sums between virtual hosts of one rank each."""
    sizes_of = {}
    for n_hosts, nbytes in sorted(FITTED + HELD_OUT):
        sizes = sizes_of.setdefault(n_hosts, [])
        sizes.append(nbytes)
    environ = {"OMP_NUM_THREADS": "1"}
    rows = []
    for n_hosts, sizes in sizes_of.items():
        command = [sys.executable, Path(__file__), "--job", *sizes]
        with virtual_hosts(n_hosts, args.rate) as hosts:
            outcome = hosts.run(command, 1, environ=environ, timeout_s=600)
        result = outcome.result
        for row in result["rows"]:
            rows.append({"hosts": n_hosts, **row})
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
                taken_s = time.perf_counter() - started
                slowest_s = comm.allreduce(taken_s, MPI.MAX)
                times.append(slowest_s)
                assert array[-1] == comm.size, "a wrong sum"
            median_s = median(times[1:])
            rows.append({"algorithm": algorithm, "nbytes": nbytes, "seconds": median_s})
    message_s = time_messages(comm)
    if comm.rank == 0:
        result = {"rows": rows, "message_s": message_s}
        print(json.dumps(result), flush=True)


def time_messages(comm, n_messages=2000):
    """Return the CPU-seconds that sending and receiving a small message takes rank 0. Collective over `comm`."""
    sent, received = np.zeros((2, n_messages, 16), np.uint8)
    after = (comm.rank + 1) % comm.size
    before = (comm.rank - 1) % comm.size
    comm.Barrier()
    started = time.process_time()
    receives = [comm.Irecv(row, before) for row in received]
    sends = [comm.Isend(row, after) for row in sent]
    requests = receives + sends
    while not all(request.Test() for request in requests):
        time.sleep(0.001)
    taken_s = time.process_time() - started
    return taken_s / (2 * n_messages)


def show_errors(rows, links):
    """Print predictions beside measured times, and the largest error of held-out rows."""
    errors_of = {}
    for row in rows:
        algorithm = row["algorithm"]
        predicted_s = predict(row, links[algorithm])
        row["predicted_s"] = predicted_s
        measured_s = row["seconds"]
        predicted_ms = 1000 * predicted_s
        measured_ms = 1000 * measured_s
        error = predicted_s / measured_s - 1
        n_hosts = row["hosts"]
        n_kib = row["nbytes"] // KIB
        line = ERROR_ROW.format(n_hosts, n_kib, algorithm, measured_ms, predicted_ms, error)
        if not is_fitted(row):
            line += "  held out"
            errors = errors_of.setdefault(algorithm, [])
            errors.append(abs(error))
        print(line)
    for algorithm, errors in errors_of.items():
        largest = max(errors)
        median_error = median(errors)
        print(f"{algorithm}: held out, largest error {largest:.1%}, median {median_error:.1%}")


def is_fitted(row):
    """Return whether costs are fitted to a row."""
    return (row["hosts"], row["nbytes"]) in FITTED


def predictions(links, n_ranks, nbytes, compute_s):
    """Return rows of predicted seconds for every number of ranks: all-reduce by each algorithm, and steps.

    Weak scaling: each rank computes `compute_s`. Strong scaling: two ranks do, and more ranks share that work.
    """
    rows = []
    for size in RANK_COUNTS:
        n_hosts = -(-size // n_ranks)
        times = {}
        if n_hosts > 1:
            times = predicted_sums(n_hosts, min(size, n_ranks), nbytes, links)
        local_s = 2 * nbytes * links["RING"].local_byte_s
        taken_s = times.get("HIERARCHICAL", local_s)
        strong_compute_s = 2 * compute_s / size
        row = {"ranks": size, **times}
        row["step, weak scaling"] = step_s(compute_s, taken_s)
        row["step, strong scaling"] = step_s(strong_compute_s, taken_s)
        rows.append(row)
    return rows


def predicted_sums(n_hosts, n_ranks, nbytes, links):
    """Return name -> seconds of an all-reduce by each algorithm."""
    times = {}
    for name, simulated_s in SIMULATED.items():
        times[name] = simulated_s(n_hosts, n_ranks, nbytes, links)
    never_halving_s = lanes_s(n_hosts, n_ranks, nbytes, links["HIERARCHICAL"])
    times["HIERARCHICAL, never by halving"] = never_halving_s
    for name, is_ordered in (("ordered", True), ("unordered", False)):
        seconds = hierarchical_s(n_hosts, 6, nbytes, links, is_ordered)
        times[f"HIERARCHICAL, as many hosts of 6 ranks, {name}"] = seconds
    return times


def step_s(compute_s, taken_s):
    """Return the seconds of a step whose sums run during backward.

    Backward is two thirds of the computing; a sixteenth of the sums waits for its end.
    """
    backward_s = compute_s * 2 / 3
    shown_s = max(taken_s - backward_s, taken_s / 16)
    return compute_s + shown_s


def draw(tables, out):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    n_tables = len(tables)
    size = (5.5 * n_tables, 4.5)
    figure, axes = plt.subplots(1, n_tables, figsize=size, sharey=True)
    for axis, (title, rows) in zip(axes, tables.items(), strict=True):
        for name in rows[-1]:
            if name == "ranks":
                continue
            sizes = []
            times = []
            for row in rows:
                if name in row:
                    sizes.append(row["ranks"])
                    times.append(row[name])
            axis.loglog(sizes, times, marker="o", markersize=3, label=name)
        axis.set(title=f"predicted: {title}", xlabel="ranks", ylabel="seconds")
        axis.grid(True, which="major", alpha=0.3)
    axes[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(out, dpi=110)


def parse_args():
    parser = parser_of(__doc__)
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        help="folder for measured.json, predicted.json and .png",
    )
    parser.add_argument(
        "--link",
        type=Path,
        help="measured.json of an earlier run; measures nothing",
    )
    parser.add_argument(
        "--rate",
        type=float,
        default=1e9,
        help="bits per second of the links that are measured",
    )
    parser.add_argument(
        "--gigabits",
        type=float,
        default=100,
        help="bits per second, in 1e9, of predicted links",
    )
    parser.add_argument("--ranks", type=int, default=8, help="of each predicted host")
    parser.add_argument("--megabytes", type=float, default=100, help="gradients of a step")
    parser.add_argument(
        "--compute",
        type=float,
        default=0.1,
        help="seconds of forward and backward; of 2 ranks, if strong",
    )
    return parser.parse_args()


def fit_all(rows, message_s):
    """Return name -> link of each algorithm, and print the costs."""
    message_us = round(1e6 * message_s, 1)
    links = {}
    for name in ALGORITHMS:
        fitted_rows = [row for row in rows if is_fitted(row) and row["algorithm"] == name]
        link = fit(fitted_rows, message_s)
        links[name] = link
        latency_us = round(1e6 * link.latency_s)
        byte_ns = round(1e9 * link.byte_s, 2)
        print(f"{name}: latency {latency_us} us, message {message_us} us, byte {byte_ns} ns")
    return links


def main():
    args = parse_args()
    measured = json.loads(args.link.read_text()) if args.link else measure(args)
    write_json(args.out, "measured", measured)
    rows = measured["rows"]
    links = fit_all(rows, measured["message_s"])
    show_errors(rows, links)
    fast_links = {}
    pod_links = {}
    for name, link in links.items():
        fast_links[name] = replace(link, byte_s=8e-9 / args.gigabits)
        pod_links[name] = replace(fast_links[name], pod=32, oversubscription=4.0)
    nbytes = int(1e6 * args.megabytes)
    case = (args.ranks, nbytes, args.compute)
    predicted = {
        "full bisection": predictions(fast_links, *case),
        "pods of 32 hosts, 4:1": predictions(pod_links, *case),
    }
    write_json(args.out, "predicted", predicted)
    rate = f"{args.gigabits:g} Gbit/s"
    job = f"{rate}, {args.ranks} ranks a host, {args.megabytes:g} MB"
    for title, table in predicted.items():
        print(f"predicted, {job}, {title}:")
        for row in table:
            print_row(row)
    draw(predicted, args.out / "predicted.png")


def print_row(row):
    """Print one row of predictions, with times in milliseconds."""
    entries = []
    for name, value in row.items():
        if name != "ranks":
            value = round(1000 * value, 1)
        entries.append(f"{name} {value}")
    print("  ".join(entries))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--job"]:
        job_sizes = map(int, sys.argv[2:])
        run_job(job_sizes)
    else:
        main()

"""Time parameter servers beside the all-reduce and TensorFlow's, with workers that stall, and over slow links.

python benchmarks/servers.py speed --peers-python .venv-tensorflow/bin/python     two workers, a server, an MLP
python benchmarks/servers.py stalls                           (four workers, some of whose steps take longer)
python benchmarks/servers.py links --workers 4 --servers 2    (over links of 1 Gbit/s; needs root, namespaces and tc)

Each round runs every contender once. Figures are medians over rounds; a ratio compares two runs of the same round.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from harness import say
from report import case, picture

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests" / "hosts"))

JOB = HERE / "servers_job.py"


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=["speed", "stalls", "links"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peers-python", type=Path, help="of an environment with TensorFlow")
    parser.add_argument("--mpirun", default=Path(sys.executable).parent / "mpirun")
    parser.add_argument(
        "--out", type=Path, help="folder for servers-PART.json and servers-PART.png"
    )
    parser.add_argument("--workers", type=int, default=4, help="of links: hosts with a worker each")
    parser.add_argument("--servers", type=int, default=1, help="of links: hosts with a server each")
    parser.add_argument(
        "--elements", type=int, default=4 << 20, help="of links: float32 of one parameter"
    )
    return parser.parse_args()


def run(command, environ=None):
    """Return the JSON line that a command prints."""
    done = subprocess.run(
        list(map(str, command)),
        env={**os.environ, "OMP_NUM_THREADS": "1", **(environ or {})},
        capture_output=True,
        text=True,
        timeout=300,
    )
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    json_lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return json.loads(json_lines[-1])


def job(args, n_ranks, *options, servers=1, chief=""):
    """Return the result that a job of our ranks prints.

    Args:
        args: the command line.
        n_ranks: number of ranks.
        options: options of the job.
        servers: number of ranks that are parameter servers.
        chief: "chief:1," for a job with a coordinator.
    """
    environ = {}
    if servers:
        environ["HPCDIST_ROLES"] = f"ps:{servers},{chief}worker:*"
    return run([args.mpirun, "-n", n_ranks, sys.executable, JOB, *options], environ)


def compare(contenders, args, baseline):
    """Run contenders in turn; print the steps per second of each, and how many times the baseline's they are."""
    rates_of = {name: [] for name in contenders}
    for number in range(args.rounds):
        for name, contender in contenders.items():
            say(f"round {number + 1} of {args.rounds}, {name}")
            rates_of[name].append(contender()["steps_per_s"])
    for name, rates in rates_of.items():
        pairs = zip(rates, rates_of[baseline], strict=True)
        ratios = [rate / baseline_rate for rate, baseline_rate in pairs]
        rate = statistics.median(rates)
        ratio = statistics.median(ratios)
        spread = f"({min(ratios):.2f} .. {max(ratios):.2f})"
        print(f"{name:24} {rate:8.1f} steps/s  {ratio:.2f} {spread}")
    if args.out is not None:
        publish(rates_of, args)


def publish(rates_of, args):
    """Write steps per second of all rounds, and a picture of seconds per step."""
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"servers-{args.part}"
    record = {"part": args.part, "steps_per_s": rates_of}
    path.with_suffix(".json").write_text(json.dumps(record, indent=1))
    samples = {}
    for name, rates in rates_of.items():
        samples[name] = [(1 / rate, 1 / rate) for rate in rates]
    report = {"cases": [case(f"servers {args.part}", samples, {}, [])]}
    print(picture(report, path.with_suffix(".png")))


def speed(args):
    contenders = {
        "all-reduce": lambda: job(args, 2, "--kind", "all-reduce", servers=0),
        "asynchronous": lambda: job(args, 3, "--kind", "async"),
        "synchronous": lambda: job(args, 3, "--kind", "sync"),
        "coordinator": lambda: job(args, 4, "--kind", "coordinator", chief="chief:1,"),
    }
    baseline = "all-reduce"
    if args.peers_python is not None:
        baseline = "TensorFlow"
        peer = [args.peers_python, HERE / "peers" / "tensorflow_ps.py"]
        contenders[baseline] = lambda: run(peer)
    compare(contenders, args, baseline)


def stalls(args):
    options = ["--compute-s", 0.03, "--stalls", 0.1, "--steps", 150, "--warm-up", 5, "--batch", 8]
    contenders = {
        "synchronous": lambda: job(args, 5, "--kind", "sync", *options),
        "staleness 4": lambda: job(args, 5, "--kind", "async", "--max-staleness", 4, *options),
        "asynchronous": lambda: job(args, 5, "--kind", "async", *options),
    }
    compare(contenders, args, "synchronous")


def links(args):
    """Compare a synchronous step with w * M / (s * B): w workers push M bytes each through the links of s servers."""
    from virtual_hosts import VirtualHosts

    with VirtualHosts(args.workers + args.servers, 1e9) as hosts:
        usable = hosts.calibrate()
        options = ["--kind", "sync", "--elements", args.elements, "--shards", args.servers]
        command = [sys.executable, JOB, *options, "--steps", 10, "--warm-up", 3]
        environ = {"HPCDIST_ROLES": f"ps:{args.servers},worker:*", "OMP_NUM_THREADS": "1"}
        outcome = hosts.run(command, 1, environ=environ, timeout_s=280)
    bound_s = args.workers * 4 * args.elements / args.servers / usable
    step_s = outcome.result["step_s"]
    n_mib = 4 * args.elements >> 20
    step = f"{1000 * step_s:.0f} ms a step"
    print(f"{args.workers} workers, {args.servers} servers, {n_mib} MiB: {step}")
    bound = f"w * M / (s * B) = {1000 * bound_s:.0f} ms"
    print(f"{step_s / bound_s:.3f} of {bound}, at {usable / 1e6:.1f} MB/s")


if __name__ == "__main__":
    arguments = parse_args()
    {"speed": speed, "stalls": stalls, "links": links}[arguments.part](arguments)

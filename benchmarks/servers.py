"""Time parameter servers beside the all-reduce and TensorFlow's, with workers that stall, and over slow links.

python benchmarks/servers.py speed --peers-python .venv-tensorflow/bin/python     two workers, a server, an MLP
python benchmarks/servers.py stalls                           (four workers, some of whose steps take longer)
python benchmarks/servers.py links --workers 4 --servers 2    (over links of 1 Gbit/s; needs root, namespaces and tc)

Each round runs every contender once. Figures are medians over rounds; a ratio compares two runs of the same round.
"""

import sys
from collections import defaultdict
from functools import partial
from pathlib import Path
from statistics import median

from command_line import parser_of, result_of, virtual_hosts, write_json
from harness import say
from report import case, picture

HERE = Path(__file__).resolve().parent
JOB = HERE / "servers_job.py"
#: A row of the table: a contender, its rate, and how many times the baseline's that is.
ROW = "{:24} {:8.1f} steps/s  {:.2f} ({:.2f} .. {:.2f})"


def parse_args():
    parser = parser_of(__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peers-python", type=Path, help="of an environment with TensorFlow")
    parser.add_argument("--mpirun", default=Path(sys.executable).parent / "mpirun")
    parser.add_argument(
        "--out", type=Path, help="folder for servers-PART.json and servers-PART.png"
    )
    parser.add_argument("--workers", type=int, default=4, help="of links: hosts with a worker each")
    parser.add_argument("--servers", type=int, default=1, help="of links: hosts with a server each")
    parser.add_argument(
        "--elements",
        type=int,
        default=4 << 20,
        help="of links: float32 of one parameter",
    )
    return parser.parse_args()


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
    command = [args.mpirun, "-n", n_ranks, sys.executable, JOB, *options]
    return result_of(command, environ)


def compare(contenders, args, baseline):
    """Run contenders in turn; print the steps per second of each, and how many times the baseline's they are."""
    rates_of = defaultdict(list)
    for number in range(args.rounds):
        for name, contender in contenders.items():
            say(f"round {number + 1} of {args.rounds}, {name}")
            result = contender()
            rates_of[name].append(result["steps_per_s"])
    for name, rates in rates_of.items():
        pairs = zip(rates, rates_of[baseline], strict=True)
        ratios = [rate / baseline_rate for rate, baseline_rate in pairs]
        rate = median(rates)
        ratio = median(ratios)
        lowest = min(ratios)
        highest = max(ratios)
        print(ROW.format(name, rate, ratio, lowest, highest))
    if args.out is not None:
        publish(rates_of, args)


def publish(rates_of, args):
    """Write steps per second of all rounds, and a picture of seconds per step."""
    record = {"part": args.part, "steps_per_s": rates_of}
    path = write_json(args.out, f"servers-{args.part}", record)
    samples = defaultdict(list)
    for name, rates in rates_of.items():
        for rate in rates:
            step_s = 1 / rate
            samples[name].append((step_s, step_s))
    measured_case = case(f"servers {args.part}", samples, {}, [])
    outcome = picture({"cases": [measured_case]}, path.with_suffix(".png"))
    print(outcome)


def speed(args):
    contenders = {
        "all-reduce": partial(job, args, 2, "--kind", "all-reduce", servers=0),
        "asynchronous": partial(job, args, 3, "--kind", "async"),
        "synchronous": partial(job, args, 3, "--kind", "sync"),
        "coordinator": partial(job, args, 4, "--kind", "coordinator", chief="chief:1,"),
    }
    baseline = "all-reduce"
    if args.peers_python is not None:
        baseline = "TensorFlow"
        script = HERE / "peers" / "tensorflow_ps.py"
        contenders[baseline] = partial(result_of, [args.peers_python, script])
    compare(contenders, args, baseline)


def stalls(args):
    stalling = ["--compute-s", 0.03, "--stalls", 0.1]
    options = [*stalling, "--steps", 150, "--warm-up", 5, "--batch", 8]
    asynchronous = partial(job, args, 5, *options, "--kind", "async")
    contenders = {
        "synchronous": partial(job, args, 5, *options, "--kind", "sync"),
        "staleness 4": partial(asynchronous, "--max-staleness", 4),
        "asynchronous": asynchronous,
    }
    compare(contenders, args, "synchronous")


def links(args):
    """Compare a synchronous step with w * M / (s * B): w workers push M bytes each through the links of s servers."""
    with virtual_hosts(args.workers + args.servers, 1e9) as hosts:
        usable = hosts.calibrate()
        options = [
            "--kind",
            "sync",
            "--elements",
            args.elements,
            "--shards",
            args.servers,
        ]
        command = [sys.executable, JOB, *options, "--steps", 10, "--warm-up", 3]
        environ = {
            "HPCDIST_ROLES": f"ps:{args.servers},worker:*",
            "OMP_NUM_THREADS": "1",
        }
        outcome = hosts.run(command, 1, environ=environ, timeout_s=280)
    pushed_bytes = 4 * args.elements
    server_bytes = args.workers * pushed_bytes / args.servers
    bound_s = server_bytes / usable
    step_s = outcome.result["step_s"]
    n_mib = pushed_bytes >> 20
    step_ms = round(1000 * step_s)
    bound_ms = round(1000 * bound_s)
    factor = round(step_s / bound_s, 3)
    usable_mb = round(usable / 1e6, 1)
    setting = f"{args.workers} workers, {args.servers} servers, {n_mib} MiB"
    print(f"{setting}: {step_ms} ms a step")
    print(f"{factor} of w * M / (s * B) = {bound_ms} ms, at {usable_mb} MB/s")


PARTS = {"speed": speed, "stalls": stalls, "links": links}


def main():
    args = parse_args()
    run_part = PARTS[args.part]
    run_part(args)


if __name__ == "__main__":
    main()

"""Time all-reduce between virtual hosts with rate-limited links, as a multiple of what the links allow.

python benchmarks/hosts.py --out out/hosts                        four hosts of 2 ranks, 1 Gbit/s
python benchmarks/hosts.py --out out/hosts-3x3 --hosts 3 --ranks 3 --sizes 16M

It needs root, namespaces and tc. The bound is 2(m-1)/m * n bytes per host over the rate that a plain TCP stream reached
in the same run; the kernel counts the bytes on the links.
"""

import sys
from pathlib import Path

from command_line import parse_bytes, parser_of, virtual_hosts, write_json

JOB = Path(__file__).with_name("hosts_job.py")
#: A row of the table: a sum, its time, the time as a multiple of the bound, and its bytes as a multiple of the bound.
ROW = "{:5} MiB  {:24} {:8.1f} ms  {:.3f} of the bound ({:.3f} .. {:.3f})  bytes {:.3f}"


def parse_args():
    parser = parser_of(__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for hosts.json")
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--ranks", type=int, default=2, help="of each host")
    parser.add_argument("--rate", type=float, default=1e9, help="bits per second of each link")
    parser.add_argument("--sizes", default="4M,16M,64M", help="bytes per rank")
    parser.add_argument(
        "--burst", type=int, default=256 << 10, help="bytes a link may send at once"
    )
    parser.add_argument("--repeats", type=int, default=5)
    return parser.parse_args()


def show(row, usable, n_hosts):
    """Print a row, with its time and bytes as multiples of the bounds, and add the multiples to it.

    Args:
        row: times and bytes of one way to sum.
        usable: bytes per second that the links carry.
        n_hosts: number of hosts.
    """
    nbytes = row["nbytes"]
    bound_bytes = 2 * (n_hosts - 1) / n_hosts * nbytes
    bound_s = bound_bytes / usable
    times_s = sorted(row["seconds"])
    median_s = times_s[len(times_s) // 2]
    row["times_bound"] = median_s / bound_s
    row["times_bytes"] = max(row["sent"]) / bound_bytes
    lowest = times_s[0] / bound_s
    highest = times_s[-1] / bound_s
    line = ROW.format(
        nbytes >> 20,
        row["name"],
        1000 * median_s,
        row["times_bound"],
        lowest,
        highest,
        row["times_bytes"],
    )
    print(line)


def main():
    args = parse_args()
    sizes = map(parse_bytes, args.sizes.split(","))
    command = [sys.executable, JOB, args.repeats, *sizes]
    environ = {"OMP_NUM_THREADS": "1"}
    with virtual_hosts(args.hosts, args.rate, burst_bytes=args.burst) as hosts:
        before = hosts.calibrate()
        outcome = hosts.run(command, args.ranks, environ=environ, timeout_s=1800)
        after = hosts.calibrate()
    usable = max(before, after)
    before_mb = round(before / 1e6, 1)
    after_mb = round(after / 1e6, 1)
    rates = f"{before_mb} and {after_mb} MB/s before and after"
    print(f"{args.hosts} hosts x {args.ranks} ranks, usable rate {rates}")
    for row in outcome.result["rows"]:
        show(row, usable, args.hosts)
    report = {"usable_bytes_per_s": [before, after], **outcome.result}
    write_json(args.out, "hosts", report)


if __name__ == "__main__":
    main()

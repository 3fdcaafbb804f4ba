"""Time all-reduce between virtual hosts with rate-limited links, as a multiple of what the links allow.

python benchmarks/hosts.py --out out/hosts                        four hosts of 2 ranks, 1 Gbit/s
python benchmarks/hosts.py --out out/hosts-3x3 --hosts 3 --ranks 3 --sizes 16M

It needs root, namespaces and tc. The bound is 2(m-1)/m * n bytes per host over the rate that a plain TCP stream reached
in the same run; the kernel counts the bytes on the links.
"""

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "hosts"))

from virtual_hosts import VirtualHosts  # noqa: E402  found by the line above


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
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
    bound_bytes = 2 * (n_hosts - 1) / n_hosts * row["nbytes"]
    bound_s = bound_bytes / usable
    times = sorted(row["seconds"])
    median_s = times[len(times) // 2]
    row["times_bound"] = median_s / bound_s
    row["times_bytes"] = max(row["sent"]) / bound_bytes
    way = f"{row['nbytes'] >> 20:5} MiB  {row['name']:24}"
    factor = f"{row['times_bound']:.3f} of the bound"
    lowest = times[0] / bound_s
    highest = times[-1] / bound_s
    spread = f"({lowest:.3f} .. {highest:.3f})"
    sent = f"bytes {row['times_bytes']:.3f}"
    print(f"{way} {1000 * median_s:8.1f} ms  {factor} {spread}  {sent}")


def parse_bytes(text):
    """Return the number of bytes of a text such as 4M or 64K."""
    number = int(text[:-1])
    shifts = {"K": 10, "M": 20}
    return number << shifts[text[-1]]


def main():
    args = parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    sizes = [parse_bytes(text) for text in args.sizes.split(",")]
    job = ROOT / "benchmarks" / "hosts_job.py"
    command = [sys.executable, job, args.repeats, *sizes]
    environ = {"OMP_NUM_THREADS": "1"}
    with VirtualHosts(args.hosts, args.rate, burst_bytes=args.burst) as hosts:
        before = hosts.calibrate()
        outcome = hosts.run(command, args.ranks, environ=environ, timeout_s=1800)
        after = hosts.calibrate()
    usable = max(before, after)
    before_mb = before / 1e6
    after_mb = after / 1e6
    rates = f"{before_mb:.1f} and {after_mb:.1f} MB/s before and after"
    print(f"{args.hosts} hosts x {args.ranks} ranks, usable rate {rates}")
    for row in outcome.result["rows"]:
        show(row, usable, args.hosts)
    report = {"usable_bytes_per_s": [before, after], **outcome.result}
    (args.out / "hosts.json").write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()

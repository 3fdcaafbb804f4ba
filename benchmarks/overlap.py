"""How much communication shows when a model computes as long as it communicates, between virtual hosts.

python benchmarks/overlap.py --out out/overlap            four hosts of one rank, 200 Mbit/s
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
    parser.add_argument("--out", type=Path, required=True, help="folder for overlap.json")
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--rate", type=float, default=2e8, help="bits per second of each link")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument(
        "--features", type=int, default=362, help="of each layer: 16 of 362 are 8.4 MB"
    )
    parser.add_argument(
        "--forward",
        type=float,
        default=1 / 3,
        help="share of the computing that is before backward",
    )
    parser.add_argument("--repeats", type=int, default=7)
    return parser.parse_args()


def main():
    args = parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    job = ROOT / "benchmarks" / "overlap_job.py"
    command = [sys.executable, job, args.layers, args.features, args.repeats, args.forward]
    environ = {"OMP_NUM_THREADS": "1"}
    with VirtualHosts(args.hosts, args.rate) as hosts:
        times_s = hosts.run(command, 1, environ=environ, timeout_s=1200).result
    medians = {}
    times = []
    for name in ("bare", "serial", "overlapped"):
        median_s = sorted(times_s[name])[args.repeats // 2]
        medians[name] = median_s
        times.append(f"{name} {1000 * median_s:.0f} ms")
    exposed = (medians["overlapped"] - medians["bare"]) / medians["serial"]
    share = f"exposed {100 * exposed:.1f} % of the serial time"
    megabytes = times_s["nbytes"] / 1e6
    print(f"{args.hosts} hosts, {megabytes:.1f} MB: {', '.join(times)}; {share}")
    (args.out / "overlap.json").write_text(json.dumps(times_s, indent=1))


if __name__ == "__main__":
    main()

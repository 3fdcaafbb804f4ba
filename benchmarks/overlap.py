"""How much communication shows when a model computes as long as it communicates, between virtual hosts.

python benchmarks/overlap.py --out out/overlap            four hosts of one rank, 200 Mbit/s
"""

import sys
from pathlib import Path
from statistics import median

from command_line import parser_of, virtual_hosts, write_json

#: Milliseconds of a step without a sum, with the sum after backward, and with the sum during backward.
TIMES = "bare {:.0f} ms, serial {:.0f} ms, overlapped {:.0f} ms"
JOB = Path(__file__).with_name("overlap_job.py")


def parse_args():
    parser = parser_of(__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for overlap.json")
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--rate", type=float, default=2e8, help="bits per second of each link")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument(
        "--features",
        type=int,
        default=362,
        help="of each layer: 16 of 362 are 8.4 MB",
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
    command = [
        sys.executable,
        JOB,
        args.layers,
        args.features,
        args.repeats,
        args.forward,
    ]
    environ = {"OMP_NUM_THREADS": "1"}
    with virtual_hosts(args.hosts, args.rate) as hosts:
        outcome = hosts.run(command, 1, environ=environ, timeout_s=1200)
    result = outcome.result
    bare_ms = 1000 * median(result["bare"])
    serial_ms = 1000 * median(result["serial"])
    overlapped_ms = 1000 * median(result["overlapped"])
    exposed_ms = overlapped_ms - bare_ms
    share = f"exposed {exposed_ms / serial_ms:.1%} of the serial time"
    megabytes = round(result["nbytes"] / 1e6, 1)
    print(f"{args.hosts} hosts, {megabytes} MB:", end=" ")
    times = TIMES.format(bare_ms, serial_ms, overlapped_ms)
    print(f"{times}; {share}")
    write_json(args.out, "overlap", result)


if __name__ == "__main__":
    main()

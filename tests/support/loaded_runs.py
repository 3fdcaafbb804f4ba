"""Run the parts that start real jobs several times beside two busy processes; say what failed and what was unstable.

    python tests/support/loaded_runs.py --runs 5 --out out/loaded

A test that fails on a loaded machine is a defect. A run that has its verdict in the folder is not repeated, so that the
command continues where it was cut.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

PARTS = ("fault", "slurm", "hosts")
N_BUSY = 2
#: Ends with the process that started it, also when that is killed.
BUSY = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: pass"


def main() -> int:
    """Run what is missing; print a table; return 1 if a part failed."""
    args = parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    busy = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(N_BUSY)]
    try:
        verdicts = []
        for number in range(1, args.runs + 1):
            verdicts += [run_part(part, number, args) for part in args.parts]
    finally:
        for process in busy:
            process.kill()
            process.wait()
    print("\n".join(map(line_of, verdicts)))
    return int(any(verdict["code"] for verdict in verdicts))


def parse_args() -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5, help="number of runs of each part")
    parser.add_argument("--parts", nargs="+", default=PARTS, help="targets of the Makefile")
    parser.add_argument("--select", default="not slow and not sweep", help="which tests, by their markers")
    parser.add_argument("--out", type=Path, default=Path("out/loaded"), help="folder for outputs and verdicts")
    return parser.parse_args()


def run_part(part: str, number: int, args: argparse.Namespace) -> dict[str, object]:
    """Run a part, unless its verdict is there; return the verdict."""
    verdict_path = args.out / f"{part}-{number}.json"
    if verdict_path.exists():
        verdict: dict[str, object] = json.loads(verdict_path.read_text())
        return verdict
    unstable_path = Path("out/tests") / part / "unstable.json"
    unstable_path.unlink(missing_ok=True)
    started = time.monotonic()
    with (args.out / f"{part}-{number}.txt").open("w") as log:
        command = ["make", "--no-print-directory", part, f"SELECT={args.select}"]
        code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False).returncode
    if unstable_path.exists():
        unstable = json.loads(unstable_path.read_text())
    else:
        unstable = []
    seconds = round(time.monotonic() - started)
    verdict = {"part": part, "run": number, "code": code, "seconds": seconds, "unstable": unstable}
    verdict_path.write_text(json.dumps(verdict))
    print(line_of(verdict), flush=True)
    return verdict


def line_of(verdict: dict[str, object]) -> str:
    """Return a verdict as a line."""
    outcome = "failed" if verdict["code"] else "passed"
    return f"{verdict['part']} {verdict['run']}: {outcome}, {verdict['seconds']} s, unstable: {verdict['unstable']}"


if __name__ == "__main__":
    sys.exit(main())

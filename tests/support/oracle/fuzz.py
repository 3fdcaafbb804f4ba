"""Replay recorded programs on 1 to 4 ranks, and report: the second half of `make oracle`.

    python tests/support/oracle/fuzz.py --out out/oracle [--resume]

Recording and replaying 5,400 programs take about an hour.

Each number of ranks is an MPI job of many programs, with num_replicas, and, where each rank has one replica, with the
default strategy. A program that ends the job is a difference, and the next job continues after it.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

from program import line_of
from report import report

SECONDS_PER_JOB = 3600
HERE = Path(__file__).resolve().parent


def replay_on(folder: Path, n_ranks: int, is_default: bool) -> Path:
    """Replay what was not replayed yet on a number of ranks; return the file of outcomes."""
    out = folder / f"replay-{n_ranks}{'-default' if is_default else ''}.jsonl"
    running = out.with_suffix(".running")
    command = [str(Path(sys.executable).with_name("mpirun")), "-n", str(n_ranks), sys.executable]
    command += [str(HERE / "replay_programs.py"), "--answers", str(folder), "--out", str(out)]
    command += ["--default-strategy"] if is_default else []
    while True:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS_PER_JOB, env=environment())
        if done.returncode == 0:
            return out
        if not running.exists():
            raise SystemExit(done.stdout + done.stderr)
        record_end(out, int(running.read_text()), done.stderr)
        running.unlink()


def environment() -> dict[str, str]:
    """Return an environment for the hpcdist of this checkout, in which ranks that wait for each other soon give up."""
    return {**os.environ, "PYTHONPATH": str(HERE.parents[2]), "OMP_NUM_THREADS": "1", "HPCDIST_TIMEOUT_S": "10"}


def record_end(out: Path, number: int, stderr: str) -> None:
    record = {"number": number, "n_replicas": None, "step": None, "reason": None, "outcome": "different"}
    with out.open("a") as file:
        file.write(line_of({**record, "texts": [f"the job ended: {stderr.strip()[:300]}"]}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/oracle"))
    parser.add_argument("--resume", action="store_true", help="continue earlier replays")
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2, 3, 4])
    options = parser.parse_args()
    for old in [] if options.resume else options.out.glob("replay-*"):
        old.unlink()
    outcomes = []
    for n_ranks in options.ranks:
        outcomes += [replay_on(options.out, n_ranks, is_default) for is_default in (False, True)]
        print(f"{n_ranks} ranks: done", flush=True)
    raise SystemExit(report(outcomes) > 0)


if __name__ == "__main__":
    main()

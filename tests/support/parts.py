"""Run parts of the tests, whatever fails, and print a table of their times and the slowest tests.

    python tests/support/parts.py lint unit mpi fault:rest

PART:rest runs the slow tests of a part. Each part is a target of the Makefile. Tests that failed first and passed when
they were repeated (second_chance.py) are unstable: more than two of them fail the run, as does one that was unstable in
three of the last twenty runs on this machine.
"""

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

OUT = Path("out/tests")
TIMES = OUT / "times.jsonl"
#: Names of unstable tests, one list for each run, the newest last; it outlives a clone.
HISTORY = Path(os.environ.get("TEST_HISTORY", "~/.cache/hpcdist-tests/unstable.json")).expanduser()
N_SLOWEST = 20
#: Unstable tests that a run may have, and runs of the last ones in which one test may be unstable.
MAX_UNSTABLE = 2
MAX_RUNS = 2
N_RUNS = 20
#: PART:rest runs these tests of a part, by their markers; the Makefile selects others.
REST = "slow and not sweep"


@dataclass(frozen=True)
class Part:
    """A part that was run.

    Attributes:
        name: as on the command line.
        has_passed: whether its exit code was 0.
        seconds: time it took.
        unstable: names of its unstable tests.
    """

    name: str
    has_passed: bool
    seconds: float
    unstable: tuple[str, ...] = ()


def main(names: list[str]) -> int:
    """Run parts; return 1 if one failed, or too many tests were unstable."""
    OUT.mkdir(parents=True, exist_ok=True)
    TIMES.unlink(missing_ok=True)
    parts = list(map(run_part, names))
    print(table_of(parts, read_times()), flush=True)
    unstable = unstable_of(parts)
    history = [*read_history(), unstable][-N_RUNS:]
    write_history(history)
    reasons = failures_of(parts, history)
    print(f"{len(history)} runs in {HISTORY}")
    print("\n".join(reasons or [f"all parts passed: {' '.join(names)}"]))
    return int(bool(reasons))


def run_part(name: str) -> Part:
    """Run the target of a part."""
    target, _, selection = name.partition(":")
    print(f"== make {name}", flush=True)
    folder = name.replace(":", "-")
    unstable_path = OUT / folder / "unstable.json"
    unstable_path.unlink(missing_ok=True)
    started = time.monotonic()
    environment = {**os.environ, "TEST_TIMES": str(TIMES.resolve())}
    command = ["make", "--no-print-directory", target, f"OUT_NAME={folder}"]
    if selection == "rest":
        command.append(f"SELECT={REST}")
    code = subprocess.run(command, env=environment, check=False).returncode
    seconds = time.monotonic() - started
    if unstable_path.is_file():
        unstable = json.loads(unstable_path.read_text())
    else:
        unstable = []
    if code:
        result = "failed"
    else:
        result = "passed"
    print(f"== make {name}: {seconds:.0f} s, {result}", flush=True)
    return Part(name, code == 0, seconds, tuple(unstable))


def unstable_of(parts: list[Part]) -> list[str]:
    """Return the names of the unstable tests of all parts."""
    names: list[str] = []
    for part in parts:
        names += part.unstable
    return names


def read_times() -> list[tuple[float, str]]:
    """Return (seconds, name) of the tests that were run, the slowest first; conftest.py notes them."""
    if not TIMES.is_file():
        return []
    lines = list(map(json.loads, TIMES.read_text().splitlines()))
    return sorted(((line["seconds"], line["test"]) for line in lines), reverse=True)


def table_of(parts: list[Part], times: list[tuple[float, str]]) -> str:
    """Return the table of parts and of the slowest tests."""
    lines = ["", "seconds  part"]
    for part in parts:
        remark = "" if part.has_passed else "  failed"
        lines.append(f"{part.seconds:7.0f}  {part.name}{remark}")
    lines.append(f"{sum(part.seconds for part in parts):7.0f}  together")
    lines += ["", f"seconds  the {N_SLOWEST} slowest tests"]
    lines += [f"{seconds:7.1f}  {name}" for seconds, name in times[:N_SLOWEST]]
    lines += [f"unstable: {name}" for name in unstable_of(parts)]
    return "\n".join([*lines, ""])


def failures_of(parts: list[Part], history: list[list[str]]) -> list[str]:
    """Return why a run fails, a line each. Pure.

    Args:
        parts: parts of the run.
        history: unstable tests of the last runs, this one included.
    """
    failed = [part.name for part in parts if not part.has_passed]
    reasons = [f"failed: {' '.join(failed)}"] if failed else []
    unstable = sorted(history[-1])
    if len(unstable) > MAX_UNSTABLE:
        reasons.append(f"failed: {len(unstable)} tests were unstable, at most {MAX_UNSTABLE} may be")
    for name in unstable:
        n_runs = sum(name in names for names in history)
        if n_runs > MAX_RUNS:
            reasons.append(f"failed: {name} was unstable in {n_runs} of the last {len(history)} runs")
    return reasons


def read_history() -> list[list[str]]:
    """Return the unstable tests of the last runs; a file that cannot be read counts as none."""
    try:
        history = json.loads(HISTORY.read_text())
        return list(map(list, history))
    except (OSError, ValueError, TypeError):
        return []


def write_history(history: list[list[str]]) -> None:
    """Write the unstable tests of the last runs."""
    try:
        HISTORY.parent.mkdir(parents=True, exist_ok=True)
        HISTORY.write_text(json.dumps(history))
    except OSError as error:
        print(f"the history of unstable tests was not written: {error}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

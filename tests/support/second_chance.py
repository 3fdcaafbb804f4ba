"""Run a part whose tests start real jobs; run what failed once more, alone, at the end.

    python tests/support/second_chance.py fault tests/fault -m "not slow"

A test that fails twice fails the part. One that passes the second time is unstable: it is printed, and both outputs are
kept under out/tests/PART. parts.py, which adds up the parts of a run, allows two of them. pytest does the work, by
--last-failed; this only looks at what it wrote.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

#: Exit codes of pytest: all passed, some failed, and no test was selected.
PASSED = 0
FAILED = 1
NONE_SELECTED = 5
#: More failures than this are no accident: they are not repeated.
MAX_REPEATED = 5
OUT = Path("out/tests")


def main(part: str, arguments: list[str]) -> int:
    """Run pytest, and again what failed; return the exit code."""
    folder = OUT / part
    folder.mkdir(parents=True, exist_ok=True)
    code = run_pytest([*arguments, "--cache-clear"], folder, "first.txt")
    if code == NONE_SELECTED:
        return PASSED
    failed = failed_tests(folder)
    if code != FAILED or not failed or len(failed) > MAX_REPEATED:
        return code
    print(f"== {part}: {len(failed)} failed, once more and alone: {', '.join(failed)}", flush=True)
    repeat_code = run_pytest([*arguments, "--last-failed"], folder, "second.txt")
    if repeat_code not in (PASSED, FAILED):
        return repeat_code
    if repeat_code == FAILED:
        failed_twice = failed_tests(folder)
    else:
        failed_twice = []
    unstable = [name for name in failed if name not in failed_twice]
    for name in unstable:
        print(f"unstable: {name} ({folder}/first.txt, {folder}/second.txt)", flush=True)
    (folder / "unstable.json").write_text(json.dumps(unstable))
    return repeat_code


def run_pytest(arguments: list[str], folder: Path, log: str) -> int:
    """Run pytest; its output goes to the screen and to a file. Return its exit code."""
    (folder / "unstable.json").unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-o", f"cache_dir={(folder / 'cache').resolve()}", *arguments]
    with (folder / log).open("wb") as file:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        assert process.stdout is not None
        while piece := os.read(process.stdout.fileno(), 1 << 12):  # not by lines: a line of dots takes minutes
            file.write(piece)
            sys.stdout.buffer.write(piece)
            sys.stdout.buffer.flush()
        process.stdout.close()
        return process.wait()


def failed_tests(folder: Path) -> list[str]:
    """Return the names of the tests that failed in the last run, as pytest's cache has them."""
    path = folder / "cache" / "v" / "cache" / "lastfailed"
    if path.is_file():
        return sorted(json.loads(path.read_text()))
    return []


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))

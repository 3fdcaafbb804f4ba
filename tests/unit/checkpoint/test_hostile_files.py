"""Thousands of changed checkpoints: refused, without a crash, in little time and memory, or what was committed is read.

`make crashes` reads all; else all that lie with a digest that fits, and every 20th of the others.
"""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from hostile_files import SEED, Original, all_cases, lies
from scale import SCALE

from hpcdist.checkpoint.layout import stored_dtype

IS_FULL = SCALE.is_full
PROGRAM = Path(__file__).resolve().parents[2] / "support" / "programs" / "hostile_reads.py"
BATCH = 1000


def read_all(folder, environ, first, last, every):
    """Return (case, report) of each case of a batch, read by a process of its own."""
    done = subprocess.run(
        [sys.executable, PROGRAM, folder, *map(str, (first, last, every))],
        env={**environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    lines = list(map(json.loads, done.stdout.splitlines()))
    assert done.returncode == 0, f"status {done.returncode} at {lines[-1:]}: {done.stderr[-2000:]}"
    return list(zip(lines[::2], lines[1::2], strict=True))


def what_is_wrong(case, report):
    """Return what must not be of a case, or None."""
    allowed = {
        "damage": report["outcome"] == "refused",
        "lie": report["outcome"] == "refused",
        "structure": report["outcome"] == "refused" or report["same"],
        "noise": report["outcome"] in ("refused", "read"),
        "ledger": report["same"],
    }
    if not allowed[case["kind"]]:
        return f"{case['name']}: {report['outcome']} {report['text']}"
    if report["opened"]:
        return f"{case['name']}: given to libhdf5"
    return None


@pytest.mark.parametrize("name", ["object", ">f4", "U3", "M8[s]", "longdouble", "index"])
def test_a_dtype_that_is_not_stored_has_no_name(name):
    """numpy would know all but one of these names."""
    with pytest.raises(KeyError):
        stored_dtype(name)


@pytest.mark.feature("checkpoints.checksums-and-fallback")
@pytest.mark.timeout(1800)
def test_a_changed_checkpoint_is_refused_or_read_as_it_was(fast_folder, clean_environ):
    n_cases = len(all_cases(Original(fast_folder / "original")))
    n_lies = len(list(lies()))
    case_reports = read_all(fast_folder, clean_environ, 0, n_lies, 1)
    every = 1 if IS_FULL else 20
    for first in range(n_lies, n_cases, BATCH * every):
        case_reports += read_all(fast_folder, clean_environ, first, first + BATCH * every, every)
    counts = Counter((case["kind"], report["outcome"]) for case, report in case_reports)
    print(f"{len(case_reports)} changed checkpoints, seed {SEED}: {dict(counts)}")
    assert [text for case, report in case_reports if (text := what_is_wrong(case, report))] == []
    if IS_FULL:
        least_cases = 5000
    else:
        least_cases = 400
    assert len(case_reports) >= least_cases
    assert counts["lie", "refused"] >= 125

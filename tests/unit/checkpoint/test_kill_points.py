"""Killed at any operation on the disk, and started again, a training ends with the same bits and has lost nothing.

`make crashes` takes every operation; else it is a sample: every third, and few of the program with a handler.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from scale import SCALE

IS_FULL = SCALE.is_full
PROGRAM = Path(__file__).resolve().parents[2] / "support" / "programs" / "kill_points.py"
DURING_SAVES = {
    "make_new",
    "open_end",
    "replace_link",
    "create",
    "allocate",
    "write",
    "sync",
    "close",
    "rename",
    "sync_folder",
    "remove",
}


def sweep(folder, clean_environ, start, program, every):
    """Return how many kill points there were, by operation."""
    done = subprocess.run(
        [sys.executable, PROGRAM, folder, start, program, str(every)],
        env={**clean_environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    shutil.rmtree(folder, ignore_errors=True)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout)
    print(f"{sum(report['points'].values())} kill points, {program} program, {start} start: {report['points']}")
    assert report["wrong"] == []
    return report["points"]


@pytest.mark.feature("complaints.broken-checkpoint-files")
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("start", "more"), [("fresh", {"make_folder"}), ("broken", set())])
def test_killed_before_and_after_every_operation(fast_folder, clean_environ, start, more):
    points = sweep(fast_folder / "run", clean_environ, start, "plain", 1 if IS_FULL else 3)
    assert set(points) <= DURING_SAVES | more
    assert sum(points.values()) > (150 if IS_FULL else 50)
    assert not IS_FULL or set(points) == DURING_SAVES | more


@pytest.mark.timeout(1800)
def test_a_handler_is_killed_too(fast_folder, clean_environ):
    points = sweep(fast_folder / "run", clean_environ, "fresh", "managed", 1 if IS_FULL else 37)
    assert sum(points.values()) >= (300 if IS_FULL else 6)
    assert not IS_FULL or "truncate" in points

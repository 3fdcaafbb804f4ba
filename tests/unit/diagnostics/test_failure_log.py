"""A rank's own file for its tracebacks: whatever is in them, and wherever it is to be."""

import json
import time
from types import SimpleNamespace

import pytest

from hpcdist.diagnostics import logs
from hpcdist.diagnostics.logs import FailureLog

WORLD = SimpleNamespace(task=SimpleNamespace(type="worker", index=3), rank=3, size=16, step=None)


def test_texts_that_are_no_texts(tmp_path):
    """A name of a file that is not UTF-8 comes as a surrogate, and is written as what it is."""
    path = tmp_path / "logs" / "rank-00003.log"
    for number in range(2):
        FailureLog(path, WORLD).write("uncaught exception", f"Traceback\nKeyError: '\udcff {number} %s'\n")
    first, *following_lines = path.read_text().splitlines()
    assert " ERROR [worker:3 r3/16 " in first
    assert first.endswith("hpcdist: uncaught exception")
    assert following_lines[1] == "KeyError: '\\udcff 0 %s'"
    assert len(following_lines) == 5


def test_lines_of_json(tmp_path, monkeypatch):
    monkeypatch.setenv("HPCDIST_LOG", "json")
    path = tmp_path / "logs" / "rank-00003.log"
    FailureLog(path, WORLD).write("uncaught exception", "Traceback\nValueError\n")
    assert json.loads(path.read_text())["message"] == "uncaught exception\nTraceback\nValueError"


def test_a_host_without_the_run_folder(tmp_path):
    FailureLog(tmp_path / "run" / "logs" / "rank-00003.log", WORLD).write("x", "y")
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written(tmp_path, capfd):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank-00003.log").mkdir()
    FailureLog(tmp_path / "logs" / "rank-00003.log", WORLD).write("x", "y")
    assert "got Is a directory; it is lost" in capfd.readouterr().err


@pytest.mark.parametrize("limit_s", [0.2])
def test_a_disk_that_hangs(tmp_path, monkeypatch, limit_s):
    monkeypatch.setattr(logs, "_WRITE_S", limit_s)
    log = FailureLog(tmp_path / "logs" / "rank-00003.log", WORLD)
    monkeypatch.setattr(log, "_append", lambda text: time.sleep(5))
    began = time.monotonic()
    log.write("x", "y")
    assert time.monotonic() - began < 3

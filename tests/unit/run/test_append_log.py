"""Lines that wait for a thread to append them, while the program goes on, goes back, or loses some."""

import threading
from pathlib import Path

import pytest

from hpcdist.run.append_log import AppendLog, Line


class SlowFile:
    """Takes lines once it may. After a restore they replace those of their steps and of later ones."""

    def __init__(self):
        self.may_go_on = threading.Event()
        self.has_begun = threading.Event()
        self.steps = []
        self.is_restored = False

    def append(self, lines, last_step):
        self.has_begun.set()
        assert self.may_go_on.wait(30)
        self.is_restored = self.is_restored or last_step is not None
        if self.is_restored and lines:
            self.steps = [step for step in self.steps if step < lines[0].step]
            self.is_restored = False
        self.steps += [line.step for line in lines]


@pytest.fixture
def file():
    return SlowFile()


@pytest.fixture
def log(file):
    return AppendLog("test", Path("lines"), file.append, max_waiting=8, limit_s=30.0, is_kept_at_exit=False)


def add(log, steps):
    for step in steps:
        log.add(Line(b"line\n", step))


@pytest.mark.parametrize("n_times", [1, 2])
def test_lines_that_are_undone_while_they_are_appended_are_undone_by_the_next_append(log, file, n_times):
    add(log, [1, 2])
    assert file.has_begun.wait(30)
    add(log, [3])
    for _ in range(n_times):
        log.go_back_to(1)
    file.may_go_on.set()
    add(log, [2])
    log.call(log.append_waiting)
    assert file.steps == [1, 2]
    assert log.n_waiting == 0


def test_lines_of_the_file_are_undone_whatever_comes_before_the_next_line(log, file):
    file.may_go_on.set()
    add(log, [1, 2, 3])
    log.call(log.append_waiting)
    log.go_back_to(1)
    log.call(log.append_waiting)
    add(log, [2])
    log.call(log.append_waiting)
    assert file.steps == [1, 2]


def test_of_too_many_lines_the_older_half_is_lost(log, file, caplog):
    add(log, range(1, 10))
    assert "test: 4 records that lines did not take are lost." in caplog.text
    assert log.n_waiting == 5
    file.may_go_on.set()
    log.call(log.append_waiting)
    assert file.steps[-5:] == [5, 6, 7, 8, 9]


def test_lines_that_are_not_due_wait_until_there_are_many(file):
    log = AppendLog("test", Path("lines"), file.append, max_waiting=8, limit_s=30.0, is_kept_at_exit=False)
    file.may_go_on.set()
    for step in range(4):
        log.add(Line(b"line\n", step), may_start=False)
    assert not log.wait(0)
    assert file.steps == []
    log.add(Line(b"line\n", 4), may_start=False)
    assert log.wait(30)
    assert file.steps == [0, 1, 2, 3, 4]

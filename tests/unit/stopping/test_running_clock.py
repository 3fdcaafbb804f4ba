"""The clock of deadlines: a pause of the process does not count, nor does a wall clock that is set."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref

import pytest

from hpcdist.cluster.slurm import time_left_s
from hpcdist.saving.durations import Durations
from hpcdist.stopping.deadline import BatchEnd
from hpcdist.stopping.pace import Pace
from hpcdist.stopping.running_clock import Clocks, RunningClock
from hpcdist.stopping.time_left import TimeLeft


class System:
    """Clocks of a system that a test moves."""

    def __init__(self):
        self.monotonic_s = 100.0
        self.computed_s = 0.0
        self.wall_s = 5e8

    def run(self, seconds, computed_s=0.0):
        self.monotonic_s += seconds
        self.wall_s += seconds
        self.computed_s += computed_s

    def clock(self):
        return RunningClock(Clocks(lambda: self.monotonic_s, lambda: self.computed_s, lambda: self.wall_s))


@pytest.fixture
def system():
    return System()


def test_it_runs_with_the_process(system):
    clock = system.clock()
    began_s = clock()
    for _ in range(100):
        system.run(1.0)
        clock()
    assert clock() - began_s == pytest.approx(100)
    assert clock.n_interruptions == 0


@pytest.mark.parametrize("pause_s", [10.0, 3600.0])
def test_a_pause_does_not_count(system, pause_s):
    clock = system.clock()
    began_s = clock()
    system.run(pause_s, computed_s=0.1)
    assert clock() - began_s == pytest.approx(1.0, abs=0.5)
    assert clock.n_interruptions == 1
    system.run(2.0)
    assert clock() - began_s == pytest.approx(3.0, abs=0.5)
    assert clock.n_interruptions == 1


def test_a_long_computation_that_lets_nobody_look_is_no_pause(system):
    clock = system.clock()
    began_s = clock()
    system.run(60.0, computed_s=59.0)
    assert clock() - began_s == pytest.approx(60.0)
    assert clock.n_interruptions == 0


@pytest.mark.parametrize("jump_s", [-86400.0, 7200.0])
def test_a_wall_clock_that_is_set_is_an_interruption_and_no_time(system, jump_s):
    clock = system.clock()
    began_s = clock()
    system.wall_s += jump_s
    assert clock() - began_s == pytest.approx(0.0)
    assert clock.n_interruptions == 1
    system.run(1.0)
    assert clock() - began_s == pytest.approx(1.0)
    assert clock.n_interruptions == 1


def test_its_thread_looks_and_ends_with_it():
    clock = RunningClock()
    clock.start()
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "hpcdist-clock"]
    gone = weakref.ref(clock)
    del clock
    gc.collect()
    assert gone() is None
    thread.join(30)
    assert not thread.is_alive()


PAUSED = """
import time
from hpcdist.stopping.running_clock import RunningClock

clock = RunningClock()
clock.start()
began_s = clock()
wall_s = time.monotonic()
print("begun", flush=True)
while clock.n_interruptions == 0 and time.monotonic() - wall_s < 60:
    time.sleep(0.05)
print(clock.n_interruptions, time.monotonic() - wall_s - (clock() - began_s))
"""


def test_a_process_that_is_stopped_for_eight_seconds():
    process = subprocess.Popen([sys.executable, "-c", PAUSED], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "begun\n"
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(8)
    os.kill(process.pid, signal.SIGCONT)
    output, _ = process.communicate(timeout=60)
    n_interruptions, uncounted_s = output.split()
    assert int(n_interruptions) >= 1
    assert 6 < float(uncounted_s) < 20


def answer_of(batch_end):
    until = time.monotonic() + 30
    while (answer := batch_end.new_end()) is None and time.monotonic() < until:
        time.sleep(0.01)
    return answer


def test_the_batch_system_is_asked_once_after_an_interruption(system):
    clock = system.clock()
    queries = []

    def ask():
        queries.append(1)
        return 1234.0

    batch_end = BatchEnd(clock, ask)
    assert batch_end.new_end() is None
    system.run(600.0)
    end = answer_of(batch_end)
    assert end == clock() + 1234.0
    assert batch_end.new_end() is None
    assert len(queries) == 1


def test_a_batch_system_that_does_not_answer_moves_nothing(system):
    answered = threading.Event()
    clock = system.clock()
    batch_end = BatchEnd(clock, lambda: answered.wait(60) and None)
    system.run(600.0)
    for _ in range(100):
        assert batch_end.new_end() is None
    answered.set()


def test_an_answer_counts_from_the_moment_when_it_came(system):
    """A step or an evaluation may keep the program from looking for long."""
    clock = system.clock()
    has_answered = threading.Event()

    def ask():
        has_answered.set()
        return 100.0

    batch_end = BatchEnd(clock, ask)
    system.run(600.0)
    assert batch_end.new_end() is None
    assert has_answered.wait(30)
    asked_at = clock()
    until = time.monotonic() + 30
    while not batch_end._answer.done() and time.monotonic() < until:
        time.sleep(0.01)
    for _ in range(50):
        system.run(1.0)
        clock.look()
    assert batch_end.new_end() == asked_at + 100.0


def test_a_grace_period_counts_the_time_in_which_nothing_looks():
    """Its clock looks by itself, also where no deadline is known."""
    clocks = []
    for has_grace_period in (False, True):
        clock = RunningClock()
        TimeLeft(clock, None, has_grace_period, False, Pace(clock), Durations(), lambda: 1)
        clocks.append(clock)
    assert [clock._thread.is_alive() for clock in clocks] == [False, True]
    clocks[1].stop()


SCONTROL = """#!/bin/sh
echo "$*" >> "$(dirname "$0")/asked"
echo "JobId=17 JobName=a\\nb JobState=RUNNING RunTime=10 EndTime=$END TimeLimit=60"
"""


@pytest.mark.parametrize(
    ("environ", "end", "expected_s"),
    [
        ({"SLURM_JOB_ID": "17"}, 600, 600),
        ({"SLURM_JOB_ID": "17"}, "Unknown", None),
        ({}, 600, None),
    ],
)
def test_slurm_is_asked_for_the_end(tmp_path, monkeypatch, environ, end, expected_s):
    program = tmp_path / "scontrol"
    program.write_text(SCONTROL)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    if isinstance(end, int):
        text = str(int(time.time()) + end)
    else:
        text = end
    left_s = time_left_s({**environ, "PATH": os.environ["PATH"], "END": text})
    if expected_s is None:
        expected = None
    else:
        expected = pytest.approx(expected_s, abs=20)
    assert left_s == expected


def test_without_slurm_there_is_no_answer(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert time_left_s({"SLURM_JOB_ID": "17"}) is None

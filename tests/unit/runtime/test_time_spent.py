"""What the main thread waits for: each second counts once, whatever is inside of what."""

import contextlib
import threading
import time

import pytest

from hpcdist.diagnostics.journal import Journal
from hpcdist.runtime.time_spent import REPLICA_THREAD, TimeSpent


@pytest.fixture
def clock(monkeypatch):
    """Return a list whose only element is the time."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def totals(spent):
    return spent.input_s, spent.communication_s, spent.save_s


def pass_time(clock, journal, before_s, inside_s, after_s):
    """Make one collective, with time around it."""
    clock[0] += before_s
    journal.enter("all_reduce", "float32", 8)
    clock[0] += inside_s
    journal.leave()
    clock[0] += after_s


def test_a_collective_within_a_save_is_a_part_of_the_save(clock):
    spent = TimeSpent()
    journal = Journal()
    spent.watch(journal, is_background=False)
    pass_time(clock, journal, 1, 2, 0)
    with spent.timed("save", "save"):
        pass_time(clock, journal, 4, 8, 16)
    assert totals(spent) == (0.0, 2.0, 28.0)


def test_a_wait_within_a_wait_counts_once(clock):
    spent = TimeSpent()
    with spent.timed("save", "save"):
        clock[0] += 1
        with spent.timed("save", "wait for the disk"):
            clock[0] += 2
    assert spent.save_s == 3.0
    assert [span.name for span in spent.spans_since(0)[0]] == ["save"]


def test_background_threads_do_not_wait_for_the_main_one(clock):
    spent = TimeSpent()
    journal = Journal()
    spent.watch(journal, is_background=True)
    pass_time(clock, journal, 0, 5, 0)
    assert spent.communication_s == 0.0
    foreground, background = spent.spans_since(0)
    assert (foreground, [span.name for span in background]) == ([], ["all_reduce float32 x 8"])


def test_what_a_group_took_stays_when_it_is_freed(clock):
    spent = TimeSpent()
    journal = Journal()
    spent.watch(journal, is_background=False)
    pass_time(clock, journal, 0, 3, 0)
    spent.leave(journal)
    pass_time(clock, journal, 0, 9, 0)
    assert spent.communication_s == 3.0


def test_a_wait_that_raises_counts(clock):
    spent = TimeSpent()
    with contextlib.suppress(ValueError), spent.timed("input", "next batch"):
        clock[0] += 2
        raise ValueError
    assert spent.input_s == 2.0
    with spent.timed("input", "next batch"):
        clock[0] += 1
    assert spent.input_s == 3.0


@pytest.mark.parametrize(("name", "expected_s"), [("prefetch", 0.0), (REPLICA_THREAD, 4.0)])
def test_threads_of_the_program_are_not_waited_for(clock, name, expected_s):
    """One reads batches while the main thread computes and sums; replicas' waits are those of the steps."""
    spent = TimeSpent()
    inside = threading.Event()
    is_over = threading.Event()
    journal = Journal()
    spent.watch(journal, is_background=False)

    def read():
        with spent.timed("input", "next batch"):
            inside.set()
            is_over.wait(10)

    thread = threading.Thread(target=read, name=name)
    thread.start()
    assert inside.wait(10)
    clock[0] += 4
    is_over.set()
    thread.join()
    with spent.timed("save", "save"):
        clock[0] += 1
    pass_time(clock, journal, 0, 2, 0)
    assert totals(spent) == (expected_s, 2.0, 1.0)

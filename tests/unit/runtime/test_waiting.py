"""The one bounded wait, with a clock of its own: no time passes."""

import pytest

from hpcdist.errors import CollectiveTimeoutError
from hpcdist.runtime import waiting
from hpcdist.runtime.waiting import AWAKE_S, MAX_SLEEP_S, late, wait_until


class Clock:
    """Time that passes in sleeps only."""

    def __init__(self, monkeypatch, oversleep_s=0.0):
        self.now_s = 0.0
        self.slept = []
        self.n_yields = 0
        self._oversleep_s = oversleep_s
        monkeypatch.setattr(waiting.time, "monotonic", lambda: self.now_s)
        monkeypatch.setattr(waiting.time, "sleep", self._sleep)
        monkeypatch.setattr(waiting.os, "sched_yield", self._yield)

    def _sleep(self, seconds):
        self.slept.append(seconds)
        self.now_s += seconds + self._oversleep_s

    def _yield(self):
        self.n_yields += 1


def after(n_looks):
    looks = iter(range(n_looks))
    return lambda: next(looks, None) is None


def test_what_is_done_already_costs_nothing(monkeypatch):
    clock = Clock(monkeypatch)
    assert wait_until(after(0), 1.0)
    assert wait_until(after(0), 0.0, yields=0)
    assert (clock.n_yields, clock.slept) == (0, [])


def test_it_yields_first_then_sleeps_longer_each_time(monkeypatch):
    clock = Clock(monkeypatch)
    assert wait_until(after(10), 100.0, yields=3)
    assert clock.n_yields == 3
    assert len(clock.slept) == 7
    assert clock.slept[0] < clock.slept[1] <= MAX_SLEEP_S
    assert clock.slept[-1] == MAX_SLEEP_S


def test_it_gives_up_after_the_limit_and_not_before(monkeypatch):
    clock = Clock(monkeypatch)
    assert not wait_until(lambda: False, 2.0, yields=0)
    assert 2.0 < clock.now_s < 2.0 + 2 * MAX_SLEEP_S


def test_time_in_which_the_process_was_suspended_does_not_count(monkeypatch):
    clock = Clock(monkeypatch, oversleep_s=1000.0)
    assert not wait_until(lambda: False, 10 * AWAKE_S, yields=0)
    assert len(clock.slept) > 10


def test_the_error_names_what_is_missing_and_the_limit():
    error = late("all_reduce", 2.5, "rank 1 (worker 1)", "rank 0 (worker 0)")
    assert isinstance(error, CollectiveTimeoutError)
    assert "expected every rank within 2.5 s, got no answer from rank 1 (worker 1) on rank 0 (worker 0)" in str(error)
    with pytest.raises(TimeoutError):
        raise error

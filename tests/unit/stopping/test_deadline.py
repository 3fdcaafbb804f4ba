"""The rule that a deadline is kept by: time left <= p99 step, or a longer call, + p99 save + slack."""

import pytest

from hpcdist.saving.durations import N_REMEMBERED, Durations
from hpcdist.stopping.deadline import (
    EXPECTED_TIMES,
    MIN_SLACK_S,
    Calls,
    Deadline,
    must_stop,
    needed_s,
    slack_s,
)


def durations(*seconds):
    recorded = Durations()
    for duration_s in seconds:
        recorded.add(duration_s)
    return recorded


def test_nothing_measured():
    assert durations().p99 == durations().spread == 0.0
    assert not durations().is_measured
    assert needed_s(durations(), durations()) == MIN_SLACK_S


@pytest.mark.parametrize(
    ("seconds", "p99"),
    [([2.0], 2.0), ([1.0, 3.0], 3.0), ([1.0] * 99 + [9.0], 9.0), ([1.0] * 199 + [9.0], 1.0), (range(1, 501), 496)],
)
def test_p99(seconds, p99):
    assert durations(*seconds).p99 == p99


def test_memory_is_bounded_and_old_measures_are_forgotten():
    recorded = durations(*[100.0] * 10, *[1.0] * N_REMEMBERED)
    assert recorded.n_remembered == N_REMEMBERED
    assert recorded.p99 == 1.0


def test_slack_is_the_measured_spread_or_the_minimum():
    assert slack_s(durations(1.0, 1.0, 1.5), durations(2.0)) == MIN_SLACK_S
    assert slack_s(durations(1.0, 1.0, 9.0), durations(2.0, 2.0, 6.0)) == pytest.approx(8.0 + 4.0)


@pytest.mark.feature("checkpoints.stop-before-the-time-limit", "complaints.time-to-save")
@pytest.mark.parametrize("left_s", [0.0, 11.9, 12.0, 12.1, 100.0])
def test_the_rule(left_s):
    step = durations(3.0)
    save = durations(4.0)
    assert needed_s(step, save) == 3.0 + 4.0 + MIN_SLACK_S
    assert must_stop(left_s, step, save) == (left_s <= 12.0)


@pytest.mark.feature("semantics.handler-grace-period")
def test_a_save_under_way_is_waited_for():
    step = durations(1.0)
    save = durations(20.0)
    n_saves = [1]
    assert needed_s(step, save, 2) == 1.0 + 2 * 20.0 + MIN_SLACK_S
    deadline = Deadline(1040.0, step, save, lambda: 1000.0, lambda: n_saves[0])
    assert deadline.can_save
    assert not deadline.is_near
    n_saves[0] = 2
    assert deadline.is_near
    assert "too soon for a step and a save, so this attempt stops at once" in deadline.describe()
    assert not deadline.can_save


def test_a_call_that_is_longer_than_steps_must_fit_in_too():
    step = durations(1.0)
    save = durations(20.0)
    calls = Calls()
    assert needed_s(step, save, call_s=0.5) == 1.0 + 20.0 + MIN_SLACK_S
    assert needed_s(step, save, 2, call_s=400.0) == 400.0 + 2 * 20.0 + MIN_SLACK_S
    deadline = Deadline(1300.0, step, save, lambda: 1000.0, calls=calls)
    assert not deadline.is_near
    calls.add(400.0)
    assert deadline.is_near, "300 s are left, and the next evaluation would be killed"
    assert deadline.can_save
    assert "too soon for a step and a save" in deadline.describe()


def calls_of(*seconds, between_s=0.0):
    """Return calls that were made one after the other, and their clock."""
    now = [1000.0]
    calls = Calls(lambda: now[0])
    for duration_s in seconds:
        now[0] += duration_s
        calls.add(duration_s)
        now[0] += between_s
    return calls, now


def test_without_calls_none_is_expected():
    assert Calls().longest_s == 0.0


def test_a_long_call_is_expected_however_many_short_ones_follow():
    assert calls_of(400.0, *[1.0] * 3600)[0].longest_s == 400.0
    assert calls_of(*[0.1] * 10**4, 400.0, 0.1)[0].longest_s == 400.0


def test_a_call_that_was_long_once_is_not_expected_for_ever():
    calls, now = calls_of(180.0, *[1.0] * 10)
    now[0] = 1000.0 + 180.0 + EXPECTED_TIMES * 180.0 - 1
    calls.add(1.0)
    assert calls.longest_s == 180.0
    now[0] += 1
    assert calls.longest_s == 1.0
    now[0] += EXPECTED_TIMES
    assert calls.longest_s == 0.0


def test_evaluations_that_become_shorter_are_expected_when_the_longest_is_forgotten():
    calls, now = calls_of(500.0, 400.0, 390.0, between_s=18000.0)
    assert calls.longest_s == 400.0, "it was made 36390 s ago, and the one of 500 s 54790 s ago"
    now[0] += 3700.0
    assert calls.longest_s == 390.0


def test_memory_of_calls_is_bounded():
    calls, _ = calls_of(*[10.0 - number / 10**4 for number in range(10**4)])
    assert calls.n_remembered <= EXPECTED_TIMES + 1
    assert calls_of(*[1.0] * 1000)[0].n_remembered == 1


def test_a_deadline_comes_nearer_and_says_so():
    now = [1000.0]
    step = durations()
    save = durations()
    deadline = Deadline(1100.0, step, save, lambda: now[0])
    assert "job ends at " in deadline.describe()
    assert "5 s before that, plus the time of a step and a save" in deadline.describe()
    assert not deadline.needs_measure
    now[0] = 1011.0
    assert deadline.needs_measure, "a tenth of the time is over, and nobody knows what a save costs"
    save.add(20.0)
    step.add(1.0)
    assert not deadline.needs_measure
    assert deadline.describe().endswith("will save and stop about 26 s before that")
    now[0] = 1073.9
    assert not deadline.is_near
    now[0] = 1074.0
    assert deadline.is_near
    assert deadline.can_save
    assert "stops at once" in deadline.describe()
    now[0] = 1080.0
    assert not deadline.can_save

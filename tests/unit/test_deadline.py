"""The rule that a deadline is kept by: time left <= p99 step + p99 save + slack."""

import pytest

from hpcdist.resilience.deadline import MIN_SLACK_S, N_REMEMBERED, Deadline, Durations, must_stop, needed_s, slack_s


def durations(*seconds):
    made = Durations()
    for one in seconds:
        made.add(one)
    return made


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
    made = durations(*[100.0] * 10, *[1.0] * N_REMEMBERED)
    assert len(made._last) == N_REMEMBERED
    assert made.p99 == 1.0


def test_slack_is_the_measured_spread_or_the_minimum():
    assert slack_s(durations(1.0, 1.0, 1.5), durations(2.0)) == MIN_SLACK_S
    assert slack_s(durations(1.0, 1.0, 9.0), durations(2.0, 2.0, 6.0)) == pytest.approx(8.0 + 4.0)


@pytest.mark.parametrize("left_s", [0.0, 11.9, 12.0, 12.1, 100.0])
def test_the_rule(left_s):
    step, save = durations(3.0), durations(4.0)
    assert needed_s(step, save) == 3.0 + 4.0 + MIN_SLACK_S
    assert must_stop(left_s, step, save) == (left_s <= 12.0)


def test_a_save_under_way_is_waited_for():
    step, save, n_saves = durations(1.0), durations(20.0), [1]
    assert needed_s(step, save, 2) == 1.0 + 2 * 20.0 + MIN_SLACK_S
    deadline = Deadline(1040.0, step, save, lambda: 1000.0, lambda: n_saves[0])
    assert deadline.can_save
    assert not deadline.is_near
    n_saves[0] = 2
    assert deadline.is_near
    assert "1 s + 40 s + 5 s" in deadline.describe()
    assert not deadline.can_save


def test_a_deadline_comes_nearer_and_says_so():
    now = [1000.0]
    step, save = durations(), durations()
    deadline = Deadline(1100.0, step, save, lambda: now[0])
    assert "deadline in 100 s" in deadline.describe()
    assert "not measured yet" in deadline.describe()
    assert not deadline.wants_measure
    now[0] = 1011.0
    assert deadline.wants_measure, "a tenth of the time is over, and nobody knows what a save costs"
    save.add(20.0)
    step.add(1.0)
    assert not deadline.wants_measure
    assert "1 s + 20 s + 5 s" in deadline.describe()
    now[0] = 1073.9
    assert not deadline.is_near
    now[0] = 1074.0
    assert deadline.is_near
    assert deadline.can_save
    assert "stops at once" in deadline.describe()
    now[0] = 1080.0
    assert not deadline.can_save

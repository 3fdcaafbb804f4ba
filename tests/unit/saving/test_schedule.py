import math

import pytest

from hpcdist.errors import UsageError
from hpcdist.saving.schedule import SaveSchedule, is_crossed


@pytest.mark.parametrize(
    ("every", "step", "last", "expected"),
    [(5, 5, 4, True), (5, 4, 0, False), (5, 6, 5, False), (5, 11, 4, True), (1, 1, 0, True), (None, 100, 0, False)],
)
def test_whether_a_multiple_was_passed(every, step, last, expected):
    assert is_crossed(every, step, last) == expected


@pytest.mark.feature("checkpoints.save-and-retention-policy")
def test_youngs_rule():
    """A save of 2 s and a failure a day: every 588 s. The shorter of two intervals counts."""
    day_s = 86400.0
    assert math.isclose(SaveSchedule(mtbf_s=day_s).interval_s(2.0), math.sqrt(2 * 2.0 * day_s))
    assert SaveSchedule(mtbf_s=day_s, every_s=60.0).interval_s(2.0) == 60.0
    assert SaveSchedule(mtbf_s=day_s, every_s=6000.0).interval_s(2.0) < 600
    assert SaveSchedule(mtbf_s=day_s).interval_s(None) == 0.0  # one save at once, to learn its cost
    assert SaveSchedule(every_steps=3).interval_s(2.0) is None


def test_the_rule_loses_least_time():
    """Time lost per second: the cost of saves, and half an interval for each failure."""
    cost_s = 1.5
    mtbf_s = 7200.0

    def lost(interval_s):
        return cost_s / interval_s + interval_s / 2 / mtbf_s

    best = SaveSchedule(mtbf_s=mtbf_s).interval_s(cost_s)
    assert all(lost(best) <= lost(best * factor) for factor in (0.5, 0.9, 0.99, 1.01, 1.1, 2.0))


@pytest.mark.parametrize("name", ["every_steps", "every_s", "mtbf_s", "in_memory_every_steps", "compare_every_steps"])
def test_nothing_below_one(name):
    with pytest.raises(UsageError, match=f"expected {name} above 0, got 0"):
        SaveSchedule(**{name: 0})

"""What counts as a step: programs of every kind, as the calls and optimizer steps that they make."""

import itertools
from contextlib import nullcontext

import pytest

from hpcdist.resilience.steps import StepCount
from hpcdist.runtime.step_flags import StepFlags

STEP, EVALUATE, TRAIN, GAN, TELL = "step", "evaluate", "train", "gan", "tell"


def count(events, base=0, made_before=0, saved=0, is_outside=False):
    """Return the values after each of some events."""
    return followed(events, base, made_before, saved, is_outside)[0]


def followed(events, base=0, made_before=0, saved=0, is_outside=False):
    """Return the values after each of some events, and the count."""
    flags = StepFlags()
    flags.n_steps = made_before
    steps = StepCount(flags, base, is_outside)
    values = []
    for event in events:
        with steps.call() if event in (EVALUATE, TRAIN, GAN) else nullcontext():
            for _ in range({STEP: 1, TRAIN: 1, GAN: 2}.get(event, 0)):
                flags.n_steps += 1
                assert steps.value <= max(values, default=base) + 1
        if event == TELL:
            steps.count_reported(saved)
        values.append(steps.value)
    return values, steps


@pytest.mark.parametrize(
    ("events", "values"),
    [
        ([], []),
        ([STEP] * 3, [1, 2, 3]),
        ([TRAIN] * 3, [1, 2, 3]),
        ([GAN] * 3, [1, 2, 3]),
        ([EVALUATE] * 3, [1, 2, 3]),  # numpy: nothing tells a step from an evaluation
        ([STEP, STEP, EVALUATE, STEP], [1, 2, 2, 3]),
        ([EVALUATE, STEP, EVALUATE, EVALUATE, STEP], [1, 2, 2, 2, 3]),
        ([TRAIN, TRAIN, EVALUATE, TRAIN], [1, 2, 3, 4]),  # as in TensorFlow
        ([TELL] * 3, [1, 2, 3]),
        ([STEP, TELL, STEP, TELL], [1, 1, 1, 2]),
        ([STEP, STEP, TELL, STEP, STEP, TELL], [1, 2, 1, 1, 1, 2]),  # a GAN's: two until the program tells
        ([STEP, TRAIN, STEP, EVALUATE], [1, 2, 3, 3]),
    ],
)
def test_values(events, values):
    assert count(events) == values
    assert count(events, base=500, made_before=77) == [500 + value for value in values]


@pytest.mark.parametrize(
    "loop",
    [
        [TRAIN, TRAIN, EVALUATE],
        [STEP, STEP, EVALUATE],
        [EVALUATE, STEP, STEP],
        [STEP, TRAIN, EVALUATE],
        [[STEP, TELL], [STEP, TELL]],  # no attempt ends between a step and the word of it
        [[STEP, STEP, TELL], EVALUATE],
    ],
)
def test_a_program_that_is_cut_anywhere_has_the_values_of_one_that_is_not(loop):
    events = [[event] if isinstance(event, str) else event for event in loop * 3]
    uncut = values_after(events)
    for cut in range(len(events) + 1):
        first, steps = values_after(events[:cut]), followed(sum(events[:cut], []))[1]
        then = values_after(events[cut:], steps.value, made_before=5, saved=steps.value, is_outside=steps.is_outside)
        assert first + then == uncut, cut


def values_after(events, *args, **kwargs):
    """Return the values after each of some lists of events."""
    values = count(sum(events, []), *args, **kwargs)
    return [values[end - 1] for end in itertools.accumulate(map(len, events))]


def test_what_was_saved_is_not_gone_back_behind():
    assert count([STEP, STEP, STEP, TELL, TELL], saved=2) == [1, 2, 3, 2, 3]


@pytest.mark.parametrize(
    ("events", "was_evaluation"),
    [
        ([], False),
        ([TRAIN], False),
        ([TRAIN, EVALUATE], True),
        ([TRAIN, EVALUATE, TRAIN], False),
        ([STEP, EVALUATE], True),
        ([EVALUATE], False),  # or the first step of a numpy program, which is slow
        ([EVALUATE, EVALUATE], True),
    ],
)
def test_calls_that_may_be_evaluations(events, was_evaluation):
    assert followed(events)[1].was_evaluation == was_evaluation


def test_evaluations_before_the_first_step_of_a_later_attempt_are_left_out():
    assert not followed([EVALUATE, EVALUATE], base=8, is_outside=True)[1].was_evaluation
    assert followed([EVALUATE, STEP, EVALUATE], base=8, is_outside=True)[1].was_evaluation


@pytest.mark.parametrize("n_steps", [0, 1, 2])
def test_a_call_that_raises_counts_if_the_optimizer_has_stepped(n_steps):
    flags = StepFlags()
    steps = StepCount(flags, 10)

    def fail():
        with steps.call():
            flags.n_steps += n_steps
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert steps.value == 10 + min(n_steps, 1)
    with steps.call():
        pass
    assert steps.value == 11 + min(n_steps, 1), "nothing was taken for a step outside"

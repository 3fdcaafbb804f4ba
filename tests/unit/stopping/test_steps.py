"""What counts as a step: programs of every kind, as the calls and optimizer steps that they make."""

import itertools
from contextlib import nullcontext

import pytest

from hpcdist.runtime.step_flags import StepFlags
from hpcdist.stopping.steps import StepCount

STEP = "step"
RUN = "run"
TRAIN = "train"
GAN = "gan"
EVALUATE = "evaluate"
TELL = "tell"
#: Optimizer steps that an event makes.
N_STEPS = {STEP: 1, TRAIN: 1, GAN: 2, EVALUATE: 1}


def count(events, base=0, made_before=0, saved=0):
    """Return the values after each of some events."""
    flags = StepFlags()
    for _ in range(made_before):
        flags.count_step()
    steps = StepCount(flags, base)
    values = []
    for event in events:
        inside = {RUN: steps.call, TRAIN: steps.call, GAN: steps.call, EVALUATE: steps.evaluation}
        with inside.get(event, nullcontext)():
            for _ in range(N_STEPS.get(event, 0)):
                flags.count_step()
                assert steps.value <= max(values, default=base) + 1
        if event == TELL:
            steps.count_reported(saved)
        values.append(steps.value)
    return values


@pytest.mark.parametrize(
    ("events", "values"),
    [
        ([], []),
        ([STEP] * 3, [1, 2, 3]),
        ([TRAIN] * 3, [1, 2, 3]),
        ([GAN] * 3, [1, 2, 3]),
        ([RUN] * 3, [1, 2, 3]),  # numpy
        ([EVALUATE] * 3, [0, 0, 0]),
        ([STEP, STEP, EVALUATE, STEP], [1, 2, 2, 3]),
        ([EVALUATE, STEP, EVALUATE, EVALUATE, STEP], [0, 1, 1, 1, 2]),
        ([TRAIN, EVALUATE, RUN, TRAIN], [1, 1, 2, 3]),
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
    events = []
    for event in loop * 3:
        if isinstance(event, str):
            events.append([event])
        else:
            events.append(event)
    uncut = values_after(events)
    for cut in range(len(events) + 1):
        first = values_after(events[:cut])
        last = first[-1] if first else 0
        assert first + values_after(events[cut:], last, made_before=5, saved=last) == uncut, cut


def values_after(events, *args, **kwargs):
    """Return the values after each of some lists of events."""
    values = count(sum(events, []), *args, **kwargs)
    return [values[end - 1] for end in itertools.accumulate(map(len, events))]


@pytest.mark.parametrize("calls", [["call"], ["call", "call"], ["count_reported", "call"], ["evaluation", "call"]])
def test_nothing_in_an_evaluation_counts(calls):
    """As where a function that trains is called to evaluate."""
    flags = StepFlags()
    steps = StepCount(flags, 10)
    with steps.evaluation():
        for name in calls:
            if name == "count_reported":
                steps.count_reported(0)
                continue
            with getattr(steps, name)():
                flags.count_step()
            flags.count_step()
        assert steps.value == 10
    assert steps.value == 10
    flags.count_step()
    assert steps.value == 11


def test_an_optimizer_step_after_an_inner_call_belongs_to_the_outer_one():
    flags = StepFlags()
    steps = StepCount(flags, 0)
    with steps.call():
        with steps.call():
            flags.count_step()
        flags.count_step()
        assert steps.value == 1
    assert steps.value == 2


def test_what_was_saved_is_not_gone_back_behind():
    assert count([STEP, STEP, STEP, TELL, TELL], saved=2) == [1, 2, 3, 2, 3]


@pytest.mark.parametrize("n_steps", [0, 1, 2])
def test_a_call_that_raises_counts_if_the_optimizer_has_stepped(n_steps):
    flags = StepFlags()
    steps = StepCount(flags, 10)

    def fail(block):
        with block():
            for _ in range(n_steps):
                flags.count_step()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail(steps.call)
    assert steps.value == 10 + min(n_steps, 1)
    with pytest.raises(ZeroDivisionError):
        fail(steps.evaluation)
    with steps.call():
        pass
    assert steps.value == 11 + min(n_steps, 1), "nothing was taken for a step outside"

"""500 random programs of fit give what Keras 3 gives, as recorded by tests/support/oracle/record_fits.py."""

import itertools
import json

import pytest
from oracle.fit_programs import LOSSES, OPTIMIZERS, Program, draw_program
from oracle.fit_replay import CASES, check
from scale import SCALE

#: With --full all of them.
COMPARED = CASES if SCALE.is_full else CASES[::5]
N_PARTS = 4


@pytest.mark.feature("training.compile-and-fit")
@pytest.mark.parametrize("part", range(N_PARTS))
def test_fit_gives_what_keras_gives(part):
    for case in COMPARED[part::N_PARTS]:
        check(case)


def test_the_programs_are_those_that_are_drawn_and_have_all_losses_and_optimizers():
    drawn = [draw_program(number).as_json() for number in range(500)]
    assert [case["program"] for case in CASES] == json.loads(json.dumps(drawn))
    programs = [Program(**case["program"]) for case in CASES]
    assert {program.optimizer for program in programs} == set(OPTIMIZERS)
    losses = itertools.chain(*LOSSES.values())
    assert {program.loss for program in programs} == {name for name, _, _ in losses}
    assert sum(program.class_weight is not None for program in programs) > 40
    assert sum(program.has_weights for program in programs) > 100
    assert sum(len(case["history"]["loss"]) < case["program"]["epochs"] for case in CASES) > 5

"""What a scheduled function uses: what must be the same for a worker to keep its copy."""

import math

import torch

from hpcdist.strategy.coordination.functions import is_constant, is_of_program, used_by

NUMBER = 3


def made(start):
    def adds(x, y=7, *, z=8):
        return x + y + z + start + NUMBER + math.pi

    def counts():
        nonlocal start
        start += 1
        return start

    def counts_inside():
        def inner():
            nonlocal start
            start += 1

        inner()

    def has_its_own():
        n = 0

        def inner():
            nonlocal n
            n += 1
            return n

        return inner()

    return adds, counts, counts_inside, has_its_own


def test_globals_free_variables_and_defaults_are_used():
    adds, *_ = made(5)
    assert sorted(map(str, used_by(adds))) == sorted(map(str, [5, 7, 8, NUMBER, math]))


def test_functions_that_keep_state_are_not_described():
    _, counts, counts_inside, has_its_own = made(5)
    assert used_by(counts) is None
    assert used_by(counts_inside) is None
    assert used_by(has_its_own) == []
    has_its_own.calls = 0
    assert used_by(has_its_own) is None


def writes_a_global():
    global NUMBER
    NUMBER = 3


def test_a_function_that_writes_a_global_is_not_described():
    assert used_by(writes_a_global) is None


def test_constants():
    class Own:
        pass

    for value in (None, 3, "a", math, len, torch.float32, (1, ("b", None)), math.sqrt, torch.nn.Linear, used_by):
        assert is_constant(value), value
    for value in ([1], {}, (1, [2]), torch.zeros(1), Own, Own(), made(1)[0]):
        assert not is_constant(value), value
    assert is_of_program(Own)
    assert not is_of_program(used_by)

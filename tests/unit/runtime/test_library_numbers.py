"""The state of Python's and numpy's random numbers, read from memory, is what the libraries themselves say."""

import random

import numpy as np
import pytest

from hpcdist.runtime.library_numbers import NUMPY, PYTHON


def python_says():
    _, numbers, gauss = random.getstate()
    return list(numbers[:-1]), numbers[-1], gauss


def numpy_says():
    _, words, position, has_gauss, gauss = np.random.get_state()
    return words.tolist(), position, gauss if has_gauss else None


def take_ahead(library):
    """Take a normal number that was drawn before, so that position and words stay as they are."""
    state = library.state()
    library.set_state({**state, "gauss": 0.25})
    assert library.state()["gauss"] == 0.25
    random.gauss(0, 1) if library is PYTHON else np.random.randn()


def set_as_program(library):
    if library is PYTHON:
        random.setstate((*random.getstate()[:2], 0.5))
    else:
        np.random.set_state((*np.random.get_state()[:3], 1, 0.5))


CHANGES = {
    "nothing": lambda library: None,
    "a number": lambda library: library._draw(),
    "700 numbers": lambda library: [library._draw() for _ in range(700)],
    "a normal number": lambda library: random.gauss(0, 1) if library is PYTHON else np.random.randn(),
    "a normal number drawn ahead": take_ahead,
    "a seed of the program": lambda library: (random if library is PYTHON else np.random).seed(7),
    "a state of the program": set_as_program,
    "a seed of a place in training": lambda library: library.seed(11),
}


@pytest.mark.parametrize("library", [PYTHON, NUMPY], ids=["Python", "numpy"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_state_is_what_the_library_says(library, change):
    says = python_says if library is PYTHON else numpy_says
    before = library.state()
    try:
        library.seed(5)
        for _ in range(2):
            library.state()
            CHANGES[change](library)
            state = library.state()
            assert (state["words"].tolist(), state["position"], state["gauss"]) == says()
    finally:
        library.set_state(before)


def test_numpy_s_number_drawn_ahead_is_known_where_words_and_position_are_the_same():
    before = NUMPY.state()
    try:
        NUMPY.seed(3)
        start = NUMPY.state()
        np.random.randn(4)
        assert NUMPY.state()["gauss"] is None
        NUMPY.set_state(start)
        np.random.randn(3)
        assert NUMPY.state()["gauss"] == numpy_says()[2] is not None
    finally:
        NUMPY.set_state(before)


def test_another_seed_is_seen_though_position_and_first_word_are_the_same():
    before = PYTHON.state()
    try:
        states = []
        for key in (1, 2):
            PYTHON.seed(key)
            states.append(PYTHON.state())
        assert states[0]["words"][0] == states[1]["words"][0]
        assert states[0]["words"].tolist() != states[1]["words"].tolist()
    finally:
        PYTHON.set_state(before)

"""Random numbers of rows: what may seed them, and where."""

import threading

import numpy as np
import pytest

from hpcdist.data.row_numbers import DrawsBesideLoopError, RowNumbers, own_random_numbers, run_beside_loop


def raised_beside_the_loop(call):
    """Return the error that a call raises in a thread beside the loop, or None."""
    errors = []

    def run():
        run_beside_loop()
        try:
            call()
        except DrawsBesideLoopError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        return errors[0]
    return None


def seed_here():
    with own_random_numbers():
        np.random.rand()


@pytest.mark.parametrize("call", [seed_here, lambda: RowNumbers().call(None, np.random.rand)], ids=["seeds", "draws"])
def test_nothing_seeds_or_draws_beside_the_loop(call):
    np.random.seed(3)
    before = np.random.get_state()[1].tolist()
    assert raised_beside_the_loop(call) is not None
    assert np.random.get_state()[1].tolist() == before or call is not seed_here
    call()


def test_what_draws_nothing_may_run_beside_the_loop():
    assert raised_beside_the_loop(lambda: RowNumbers().call(None, np.arange, 3)) is None


class LateDataset:
    """Makes its generator when it reads the first row."""

    def __init__(self):
        self.generator = None

    def read(self):
        if self.generator is None:
            self.generator = np.random.default_rng(1)
        return self.generator.random()


def test_a_generator_that_is_made_beside_the_loop_is_seeded_in_the_loop():
    dataset = LateDataset()
    numbers = RowNumbers([dataset])
    assert raised_beside_the_loop(lambda: numbers.call(lambda: 3, dataset.read)) is not None
    assert numbers.is_drawing
    assert numbers.call(lambda: 3, dataset.read) == numbers.call(lambda: 3, dataset.read)

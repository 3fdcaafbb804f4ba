"""The digest that tells whether a program has changed anything since the end of a pass."""

import numpy as np
import pytest
import torch

from hpcdist.saving.checkpoint import Checkpoint


class Counter:
    """An object of the user, with a state of its own."""

    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


class Gathered(Counter):
    """An object whose `state_dict` is collective: a digest, which is not, must not call it."""

    is_state_collective = True

    def __init__(self, part):
        super().__init__(None)
        self.part = part

    def state_dict(self):
        raise AssertionError("expected no collective call")

    def local_state(self):
        return self.part


class GatheredAsAWhole(Counter):
    """As the metrics of another library may be: no part of the state can be asked for."""

    is_state_collective = True

    def state_dict(self):
        raise AssertionError("expected no collective call")


class ModuleWithLocalState(torch.nn.Linear):
    """A module that has a method of that name for its own purpose."""

    def local_state(self):
        raise AssertionError("expected no call of the user's method")


def raise_learning_rate(objects):
    objects["optimizer"].param_groups[0]["lr"] = 0.5


def draw(objects):
    objects["generator"].random()


def change_array(objects):
    objects["array"][1] = 7.0


def change_buffer(objects):
    objects["model"][1].running_mean.add_(1.0)


def count(objects):
    objects["counter"].state = {"n": 2}


def update_metric(objects):
    objects["metric"].part = [1.0, 2.0]


CHANGES = [raise_learning_rate, draw, change_array, change_buffer, count, update_metric]


@pytest.fixture
def objects():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    return {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "generator": np.random.default_rng(0),
        "array": np.zeros(3),
        "counter": Counter({"n": 1}),
        "metric": Gathered([1.0, 1.0]),
        "other": GatheredAsAWhole(None),
        "module": ModuleWithLocalState(1, 1),
    }


def test_what_did_not_change_has_the_same_digest(objects):
    checkpoint = Checkpoint(**objects)
    digest = checkpoint.digest_between_passes()
    assert digest is not None
    assert checkpoint.digest_between_passes() == digest


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_changes_the_digest(objects, change):
    checkpoint = Checkpoint(**objects)
    before = checkpoint.digest_between_passes()
    change(objects)
    assert checkpoint.digest_between_passes() != before


def test_a_value_changes_the_digest(objects):
    checkpoint = Checkpoint(epoch=1, **objects)
    before = checkpoint.digest_between_passes()
    checkpoint["epoch"] = 2
    assert checkpoint.digest_between_passes() != before


@pytest.mark.parametrize("state", [{"when": object()}, {(1, 2): 3}, {"f": print}])
def test_a_state_that_no_checkpoint_can_hold_has_no_digest(objects, state):
    """The stop then waits for the next pass, where the save says what is wrong."""
    assert Checkpoint(odd=Counter(state), **objects).digest_between_passes() is None

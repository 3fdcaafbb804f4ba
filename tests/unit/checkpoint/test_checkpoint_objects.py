"""Objects of a Checkpoint to a state and back, without ranks or files: orders of bytes, and states that are none."""

import json

import numpy as np
import pytest
import torch
from loading import load

from hpcdist.checkpoint.tree import NamedArray
from hpcdist.errors import CheckpointDamaged, CheckpointError
from hpcdist.saving.checkpoint import Checkpoint


def saved(**objects):
    """Return the state and copies of the arrays, as a file gives them back."""
    state, arrays = Checkpoint(**objects).collect({})
    return json.loads(json.dumps(state)), [NamedArray(a.name, a.dtype, a.values.copy()) for a in arrays]


@pytest.mark.parametrize(("before", "now"), [(">f8", ">f8"), (">f8", "<f8"), ("<f8", ">f8")])
def test_an_array_of_another_byte_order_is_restored(before, now):
    state, arrays = saved(values=np.arange(5).astype(before))
    values = np.zeros(5, now)
    load(Checkpoint(values=values), state, arrays, "file")
    assert values.tolist() == [0, 1, 2, 3, 4]
    assert values.dtype == np.dtype(now)


def test_an_array_of_another_precision_is_refused():
    with pytest.raises(CheckpointError, match=r"5.*1.*'values'.*5"):
        load(Checkpoint(values=np.zeros(5, ">f8")), *saved(values=np.zeros(5, ">f4")), "file")


def test_a_state_that_is_none_is_damage_that_names_the_file():
    """What must be refused is told in hostile_files.py."""
    model = torch.nn.Linear(2, 1)
    state, arrays = saved(model=model)
    for changed in (7, {**state, "objects": {"model": 7}}, {**state, "objects": {"model": {"pickle": 0}}}):
        with pytest.raises(CheckpointDamaged, match="step-00000004.h5") as caught:
            load(Checkpoint(model=model), changed, arrays, "step-00000004.h5")
        assert "\n" not in str(caught.value)


def test_numbers_that_no_tensor_has_are_damage():
    state, arrays = saved(model=torch.nn.Linear(2, 1, bias=False))
    arrays[0] = NamedArray("model/weight", "float128", arrays[0].values.astype("float128"))
    with pytest.raises(CheckpointDamaged, match="tensors.*'model'.*file"):
        load(Checkpoint(model=torch.nn.Linear(2, 1, bias=False)), state, arrays, "file")


def test_optimizers_that_name_their_parameters_are_restored():
    class Named(torch.optim.SGD):
        def state_dict(self):
            state = super().state_dict()
            return {"state": {"weight": 1}, "param_groups": [{**state["param_groups"][0], "params": ["weight"]}]}

        def load_state_dict(self, state):
            self.loaded = state

    optimizer = Named([torch.zeros(2)], 0.1)
    load(Checkpoint(optimizer=optimizer), *saved(optimizer=optimizer), "file")
    assert optimizer.loaded["state"] == {"weight": 1}


def test_an_optimizer_with_other_groups_is_refused():
    smaller_optimizer, larger_optimizer = (torch.optim.SGD([torch.zeros(2)], 0.1) for _ in range(2))
    larger_optimizer.add_param_group({"params": [torch.zeros(3), torch.zeros(4)]})
    state, arrays = saved(optimizer=larger_optimizer)
    with pytest.raises(CheckpointError, match="'group 1'.*2.*'group 1'.*2"):
        load(Checkpoint(optimizer=smaller_optimizer), state, arrays, "file")


class Lookahead:
    """An optimizer around another, whose state is nested in its own."""

    def __init__(self, base):
        self.base = base
        self.n_steps = 0

    @property
    def param_groups(self):
        return self.base.param_groups

    def state_dict(self):
        return {"base_optimizer": self.base.state_dict(), "n_steps": self.n_steps}

    def load_state_dict(self, state):
        self.base.load_state_dict(state["base_optimizer"])
        self.n_steps = state["n_steps"]


def test_an_optimizer_around_another_is_restored():
    def make():
        return Lookahead(torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], 0.1, momentum=0.9))

    before = make()
    now = make()
    before.param_groups[0]["params"][0].grad = torch.full((2,), 3.0)
    before.base.step()
    before.n_steps = 1
    load(Checkpoint(optimizer=now), *saved(optimizer=before), "file")
    assert now.n_steps == 1
    assert now.base.state_dict()["state"][0]["momentum_buffer"].tolist() == [3.0, 3.0]

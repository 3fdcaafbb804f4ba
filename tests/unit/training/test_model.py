"""How a model knows its device: that of its first parameter, as of torch's own generator of parameters."""

import pytest
from torch import nn

from hpcdist.training.compiled_module import _first_parameter


def with_children(*children):
    module = nn.Module()
    for number, child in enumerate(children):
        module.add_module(str(number), child)
    return module


def with_own_parameter():
    module = with_children(nn.Linear(1, 1))
    module.scale = nn.Parameter()
    return module


MODULES = {
    "none": with_children(),
    "children without": with_children(nn.ReLU(), nn.Sequential(nn.Identity())),
    "an empty place": with_children(None, nn.Linear(1, 1)),
    "a missing parameter": with_children(nn.BatchNorm1d(1, affine=False), nn.Linear(1, 1)),
    "after an empty branch": with_children(nn.Sequential(nn.ReLU()), nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))),
    "of the module itself": with_own_parameter(),
}


@pytest.mark.parametrize("name", MODULES)
def test_the_first_parameter_is_torch_s(name):
    module = MODULES[name]
    assert _first_parameter(module) is next(module.parameters(), None)

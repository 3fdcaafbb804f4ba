"""A Sequential of torch's layers is made again from JSON; anything else is not taken for one."""

import json

import pytest
import torch
from torch import nn

from hpcdist.errors import CheckpointMismatch
from hpcdist.tf_compat import losses
from hpcdist.training.description import _describe_nest, describe_layers, make_layers, make_nest

CNN = nn.Sequential(
    nn.Conv2d(1, 8, 3, padding="same", bias=False),
    nn.BatchNorm2d(8, momentum=0.2),
    nn.ReLU(inplace=True),
    nn.MaxPool2d((2, 2), stride=2),
    nn.Sequential(nn.Dropout(0.3), nn.Flatten()),
    nn.Linear(32, 10),
    nn.LayerNorm(10),
    nn.GELU("tanh"),
    nn.Softmax(dim=-1),
)


def test_layers_are_made_again():
    rebuilt = make_layers(json.loads(json.dumps(describe_layers(CNN))))
    assert repr(rebuilt) == repr(CNN)
    rebuilt.load_state_dict(CNN.state_dict())
    x = torch.randn(2, 1, 4, 4)
    assert torch.equal(rebuilt.eval()(x), CNN.eval()(x))


@pytest.mark.parametrize(
    "module",
    [
        nn.Sequential(nn.Linear(2, 2), type("Own", (nn.Linear,), {})(2, 2)),
        nn.TransformerEncoderLayer(4, 2),
        type("Own", (nn.Sequential,), {})(nn.Linear(2, 2)),
    ],
    ids=["a class of the program", "layers in a layer", "a subclass of Sequential"],
)
def test_what_cannot_be_made_again(module):
    assert describe_layers(module) is None


@pytest.mark.parametrize(
    "description",
    [None, [], {}, {"Linear": {}}, {"Linear": {"in_features": "two"}}, {"Module": {}, "Linear": {}}, {"os": {}}],
)
def test_descriptions_that_are_none(description):
    with pytest.raises(CheckpointMismatch, match="load_model: expected"):
        make_layers(description)


def test_a_loss_of_the_program_is_not_taken_for_ours_of_the_same_name():
    same_name = type("Huber", (losses.Huber,), {})
    assert _describe_nest(same_name()) is None
    assert make_nest(_describe_nest(losses.Huber(delta=2.0))).delta == 2.0


def test_an_activation_that_comes_twice_is_there_twice():
    act = nn.ReLU()
    rebuilt = make_layers(describe_layers(nn.Sequential(nn.Linear(2, 2), act, nn.Linear(2, 2), act)))
    assert [type(layer).__name__ for layer in rebuilt] == ["Linear", "ReLU", "Linear", "ReLU"]
    shared = nn.Linear(2, 2)
    assert describe_layers(nn.Sequential(shared, shared)) is None

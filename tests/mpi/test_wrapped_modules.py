"""Checkpoints of wrapped models have the names of the plain ones, and load into either."""

import pytest
import torch
from torch import nn

import hpcdist
from hpcdist.errors import CheckpointMismatch
from hpcdist.program.wrapped_modules import plain_state, without_prefixes

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.* is deprecated"),  # of torch.compile
]


def make_plain():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Sequential(nn.Linear(4, 1)))


def compile_inner(model):
    model[2] = torch.compile(model[2])
    return model


WRAPPERS = {
    "plain": lambda model: model,
    "compiled": torch.compile,
    "parallel": nn.DataParallel,
    "parallel, compiled": lambda model: torch.compile(nn.DataParallel(model)),
    "compiled, parallel": lambda model: nn.DataParallel(torch.compile(model)),
    "inner compiled": compile_inner,
    "inner and outer compiled": lambda model: torch.compile(compile_inner(model)),
}


@pytest.mark.feature("checkpoints.names-without-wrappers")
@pytest.mark.parametrize("how", ["read", "load_checkpoint", "manager"])
@pytest.mark.parametrize("saved_as", WRAPPERS)
@pytest.mark.parametrize("loaded_as", ["plain", "compiled", "inner compiled"])
def test_a_model_loads_whatever_wrapped_it(shared_path, saved_as, loaded_as, how):
    strategy = hpcdist.MultiWorkerMirroredStrategy()
    with strategy.scope():
        torch.manual_seed(1)
        saved = WRAPPERS[saved_as](make_plain())
        torch.manual_seed(2)
        plain = make_plain()
    model = WRAPPERS[loaded_as](plain)
    assert list(plain_state(saved)) == list(make_plain().state_dict())
    checkpoint = hpcdist.Checkpoint(model=saved, strategy=strategy)
    target = hpcdist.Checkpoint(model=model, strategy=strategy)
    if how == "manager":
        hpcdist.CheckpointManager(checkpoint, shared_path / "run").save(1)
        hpcdist.CheckpointManager(target, shared_path / "run").restore_or_initialize()
    else:
        checkpoint.write(shared_path / "model.h5")
        if how == "read":
            target.read(shared_path / "model.h5")
        else:
            hpcdist.load_checkpoint(shared_path / "model.h5", model=model)
    for name, value in plain_state(saved).items():
        assert torch.equal(plain_state(model)[name], value)


class NamedModule(nn.Module):
    """Has a module that is called as a wrapper's is."""

    def __init__(self):
        super().__init__()
        self.module = nn.Linear(2, 2)


def test_a_name_that_only_looks_like_a_wrappers_stays():
    assert list(plain_state(NamedModule())) == ["module.weight", "module.bias"]


class Outer(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.net = inner


def test_an_error_names_the_prefix(shared_path):
    strategy = hpcdist.MultiWorkerMirroredStrategy()
    with strategy.scope():
        outer = Outer(nn.Linear(2, 2))
        inner = nn.Linear(2, 2)
    hpcdist.Checkpoint(model=outer, strategy=strategy).write(shared_path / "model.h5")
    with pytest.raises(CheckpointMismatch, match=r"there all names begin with 'net\.'; build the same model"):
        hpcdist.Checkpoint(model=inner, strategy=strategy).read(shared_path / "model.h5")


def test_names_of_files_of_others():
    assert without_prefixes(["module.a", "module.b.c"]) == {"module.a": "a", "module.b.c": "b.c"}
    assert without_prefixes(["module.a", "b"]) == {"module.a": "module.a", "b": "b"}
    assert without_prefixes(["_orig_mod.module.a"]) == {"_orig_mod.module.a": "a"}
    assert without_prefixes(["a._orig_mod.b", "c"]) == {"a._orig_mod.b": "a.b", "c": "c"}

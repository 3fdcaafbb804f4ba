"""The first use of a model, which makes it equal on all ranks, wherever it is; and tensors that come after it."""

import threading

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, grad, hessian, jacrev, vmap
from torch.nn.utils import prune

import hpcdist
from hpcdist.errors import ConfigurationError, DesyncError

pytestmark = pytest.mark.mpi


class Program:
    def __init__(self, comm, *more):
        self.strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op="mean")
        torch.manual_seed(comm.rank)
        with self.strategy.scope():
            self.model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1), *more)
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.x = torch.ones(2, 3) * (comm.rank + 1)

    def step(self):
        self.optimizer.zero_grad()
        self.model(self.x).square().mean().backward()
        self.optimizer.step()

    def is_equal(self, comm):
        digests = comm.allgather([value.numpy().tobytes() for value in self.model.state_dict().values()])
        return all(digest == digests[0] for digest in digests)


def in_a_thread(program):
    thread = threading.Thread(target=program.model, args=(program.x,))
    thread.start()
    thread.join()


def by_a_fake_tensor(program):
    with FakeTensorMode(allow_non_fake_inputs=True):
        program.model(torch.empty(2, 3))


def on_the_meta_device(program):
    with torch.device("meta"):
        program.model(program.x)


def by_autocast(program):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        program.model(program.x)


def in_inference(program):
    with torch.inference_mode():
        program.model(program.x)


def scalar(program):
    return lambda row: program.model(row[None])[0, 0]


USES = {
    "jacrev": lambda program: vmap(jacrev(scalar(program)))(program.x),
    "hessian": lambda program: vmap(hessian(scalar(program)))(program.x),
    "grad": lambda program: vmap(grad(scalar(program)))(program.x),
    "jit.trace": lambda program: torch.jit.trace(program.model, program.x),
    "fake": by_a_fake_tensor,
    "meta": on_the_meta_device,
    "autocast": by_autocast,
    "inference": in_inference,
    "thread": in_a_thread,
    "export": lambda program: torch.export.export(program.model, (program.x,)),
    "functional_call": lambda program: functional_call(
        program.model, dict(program.model.named_parameters()), (program.x,)
    ),
}


@pytest.mark.feature("semantics.first-use-anywhere")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own tracing
@pytest.mark.parametrize("name", USES)
def test_the_first_use_may_be_anywhere(comm, name):
    program = Program(comm)
    USES[name](program)
    if name != "export":  # which looks at the code, and calls nothing
        assert program.is_equal(comm)
    assert program.model[0].weight.dtype is torch.float32
    program.step()
    assert program.is_equal(comm)


def test_a_first_use_on_the_chief_alone_is_named_at_once(comm):
    if comm.size == 1:
        pytest.skip("one rank is all ranks")
    program = Program(comm)
    rows = hpcdist.Dataset.range(12).batch(6)
    call = program.strategy.experimental_distribute_dataset
    argument = rows
    if comm.rank == 0:
        call = program.model
        argument = program.x
    with pytest.raises(DesyncError, match="first use of a model.*collective: make it on every rank"):
        call(argument)
    assert len(program.strategy.experimental_distribute_dataset(rows)) == 2, "ranks go on together"


ODD_BUFFERS = {
    "coo": lambda: torch.eye(3).to_sparse(),
    "csr": lambda: torch.eye(3).to_sparse_csr(),
    "fp8": lambda: torch.zeros(3, dtype=torch.float8_e4m3fn),
    "expanded": lambda: torch.zeros(1, 3).expand(3, 3),
}


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("name", ODD_BUFFERS)
def test_buffers_that_cannot_be_made_equal_are_refused_on_all_ranks(comm, name):
    if comm.size == 1:
        pytest.skip("one rank has nothing to make equal")
    program = Program(comm)
    program.model.register_buffer("odd", ODD_BUFFERS[name]())
    with pytest.raises(ConfigurationError, match="expected dense buffers .* 'odd'"):
        program.model(program.x)


@pytest.mark.parametrize("is_in_scope", [False, True])
def test_masks_that_are_made_after_the_first_use_are_the_chiefs(comm, is_in_scope):
    program = Program(comm)
    program.step()
    torch.manual_seed(100 + comm.rank)
    if is_in_scope:
        with program.strategy.scope():
            prune.random_unstructured(program.model[0], "weight", amount=0.5)
    else:
        prune.random_unstructured(program.model[0], "weight", amount=0.5)
    for _ in range(3):
        program.step()
    assert "0.weight_mask" in program.model.state_dict()
    assert program.is_equal(comm)


def test_a_buffer_that_is_set_again_is_not_planned_again(comm):
    program = Program(comm, nn.BatchNorm1d(1))
    program.step()
    norm = program.model[3]
    for _ in range(3):
        norm.running_mean = norm.running_mean + 1
        assert program.strategy.engine.planner.has_plan
        program.step()
    norm.register_buffer("late", torch.full((2,), float(comm.rank)))
    assert not program.strategy.engine.planner.has_plan
    program.step()
    assert norm.late.tolist() == [0.0, 0.0]


class Masked(nn.Module):
    """Keeps a mask for each length of its inputs."""

    def forward(self, x):
        name = f"mask_{len(x)}"
        if name not in self._buffers:
            self.register_buffer(name, torch.ones(len(x), 1), persistent=False)
        return x * self._buffers[name]


def test_what_a_forward_keeps_for_its_inputs_is_each_ranks_own(comm):
    program = Program(comm)
    with program.strategy.scope():
        program.model.append(Masked())
    for length in (2, 2 + comm.rank, 2):
        program.x = torch.ones(length, 3)
        program.optimizer.zero_grad()
        program.strategy.set_row_count(length)
        program.model(program.x).square().mean().backward()
        program.optimizer.step()
    assert program.strategy.engine.planner.has_plan

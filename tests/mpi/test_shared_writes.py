"""Writes in `run` to what replicas share, that no optimizer makes: refused on any number of ranks, never made twice."""

import gc

import pytest
import torch
from torch import nn

import hpcdist
from hpcdist.replicas import shared_writes

pytestmark = pytest.mark.mpi


class Trained:
    """A strategy, a model of it with a frozen parameter, an optimizer and a scheduler."""

    def __init__(self, n_replicas):
        self.strategy = hpcdist.MultiWorkerMirroredStrategy(num_replicas=n_replicas, gradient_op="sum")
        with self.strategy.scope():
            self.model = nn.Linear(20, 1)
            self.frozen = nn.Linear(2, 1).requires_grad_(False)
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.5)

    def parameters(self):
        return [*self.model.parameters(), *self.frozen.parameters()]

    def step(self, before=lambda: None, after=lambda: None):
        def step():
            self.optimizer.zero_grad()
            self.model(torch.ones(1, 20)).square().sum().mul(0.1).backward()
            before()
            self.optimizer.step()
            after()

        self.strategy.run(step)


@pytest.fixture(params=["one replica a rank", "several"])
def trained(request, comm):
    is_single = request.param == "one replica a rank" and comm.size > 1
    trained = Trained(comm.size if is_single else 2 * comm.size + 1)
    trained.step()
    return trained


def shrink(parameter):
    with torch.no_grad():
        parameter.mul_(0.5)


def shrink_array(parameter):
    parameter.detach().numpy()[...] *= 0.5


def exchange(parameter):
    parameter.data = parameter.data * 0.5


WRITES = {
    "in place": lambda t: shrink(t.model.weight),
    "to a frozen parameter": lambda t: shrink(t.frozen.weight),
    "through data": lambda t: t.model.weight.data.mul_(0.5),
    "another tensor": lambda t: exchange(t.model.weight),
    "through numpy": lambda t: shrink_array(t.model.bias),
    "a scheduler": lambda t: t.scheduler.step(),
    "a learning rate": lambda t: t.optimizer.param_groups[0].update(lr=0.3),
}


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("write", WRITES)
def test_a_write_in_run_is_refused(trained, write, moment):
    with pytest.raises(hpcdist.errors.UsageError, match=r"run.*replicas.*leave"):
        trained.step(**{moment: lambda: WRITES[write](trained)})


@pytest.mark.parametrize("write", WRITES)
def test_a_merge_call_writes_once(trained, write):
    """And code outside of run may write as it likes."""

    def values():
        rate = torch.tensor(trained.optimizer.param_groups[0]["lr"])
        return [rate, *(parameter.detach().clone() for parameter in trained.parameters())]

    before = values()
    trained.strategy.run(lambda: hpcdist.get_replica_context().merge_call(lambda strategy: WRITES[write](trained)))
    factors = [float((new / old).mean()) for old, new in zip(before, values(), strict=True)]
    changed = [factor for factor in factors if factor != 1]
    assert changed == pytest.approx([3.0 if write == "a learning rate" else 0.5])
    WRITES[write](trained)
    trained.step()


def test_a_whole_parameter_changed_past_torch_s_counters_is_found_at_once(trained):
    for _ in range(shared_writes._N_HASHED_RUNS):
        trained.step()
    with pytest.raises(hpcdist.errors.UsageError, match="parameter '0:weight'"):
        trained.step(after=lambda: trained.model.weight.data.mul_(0.5))


def test_writes_past_torch_s_counters_are_found_later_too(trained):
    """Between the ends of a parameter: of one after another, once the first runs are over."""

    def go_on():
        for _ in range(len(trained.parameters()) * shared_writes._HASHED_RUN):
            trained.step(after=lambda: trained.model.weight.data[0, 5:15].mul_(0.5))

    for _ in range(shared_writes._N_HASHED_RUNS):
        trained.step()
    errors = (hpcdist.errors.UsageError, hpcdist.errors.DesyncError)  # ranks with other replicas drift apart, too
    with pytest.raises(errors, match="parameters? '0:weight'"):
        go_on()


def test_an_error_in_a_turn_is_the_user_s(trained):
    """The look at the end of a turn hides no error of the program, and the next run begins anew."""

    def fail():
        shrink(trained.model.weight)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        trained.step(after=fail)
    trained.step()


def test_what_the_garbage_collector_takes_in_a_turn_is_no_write(trained):
    with trained.strategy.scope():
        parameter = nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([parameter], lr=0.7)
        later = torch.optim.SGD(trained.model.parameters(), lr=0.3)
    dropped = [parameter, optimizer]
    del parameter, optimizer

    def drop():
        dropped.clear()
        gc.collect()

    trained.step(after=drop)
    assert not dropped
    with pytest.raises(hpcdist.errors.UsageError, match="write.*optimizer.*'s '"):
        trained.step(after=lambda: later.param_groups[0].update(lr=0.1))

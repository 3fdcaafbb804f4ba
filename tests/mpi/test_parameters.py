"""Parameters that are in no module, and trainable variables: equal at the start, summed in run, saved and restored."""

import pytest
import torch
from torch import nn

import hpcdist
from hpcdist.errors import GradientError, UsageError

pytestmark = pytest.mark.mpi


class Trained:
    """A parameter that is in no module, a trainable variable, and a model beside them that takes no part at first."""

    def __init__(self, comm, n_replicas=None, scale=1.0):
        self.strategy = hpcdist.MultiWorkerMirroredStrategy(num_replicas=n_replicas, gradient_op="sum")
        with self.strategy.scope():
            self.weight = nn.Parameter(torch.ones(3, dtype=torch.float64) * (comm.rank + 1) * scale)
            self.variable = hpcdist.Variable(2.0 * scale, trainable=True, dtype=torch.float64)
            self.unused = nn.Linear(3, 1)
            self.optimizer = torch.optim.Adam([self.weight, self.variable.parameter], lr=0.1)

    def step(self, first, last):
        """Train the replica's factors of first..last."""
        context = hpcdist.get_replica_context()
        replica_factors = range(first, last)[context.replica_id_in_sync_group :: context.num_replicas_in_sync]
        self.optimizer.zero_grad()
        loss = (
            sum(((self.weight * self.variable).sum() - factor) ** 2 for factor in replica_factors)
            + 0 * self.weight.sum()
        )
        loss.backward()
        self.optimizer.step()

    def train(self, n_steps):
        for number in range(n_steps):
            self.strategy.run(self.step, args=(number, number + 12))
        return self.weight.tolist(), self.variable.numpy().item()


def trained_alone(n_steps):
    weight = nn.Parameter(torch.ones(3, dtype=torch.float64))
    factor = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
    optimizer = torch.optim.Adam([weight, factor], lr=0.1)
    for number in range(n_steps):
        optimizer.zero_grad()
        sum(((weight * factor).sum() - target) ** 2 for target in range(number, number + 12)).backward()
        optimizer.step()
    return weight.tolist(), factor.item()


@pytest.mark.parametrize("n_replicas", [None, 5])
def test_they_train_as_in_one_process(comm, n_replicas):
    trained = Trained(comm, n_replicas)
    weight, variable = trained.train(3)
    expected, factor = trained_alone(3)
    assert weight == pytest.approx(expected, rel=1e-9)
    assert variable == pytest.approx(factor, rel=1e-9)
    assert len(set(comm.allgather((tuple(weight), variable)))) == 1


def test_they_belong_to_the_scope(comm):
    trained = Trained(comm)
    extended = trained.strategy.extended
    assert extended.variable_created_in_scope(trained.weight)
    assert extended.variable_created_in_scope(trained.variable)
    assert not extended.variable_created_in_scope(nn.Parameter(torch.ones(1)))


def test_a_save_makes_them_equal_and_a_restore_fills_them(comm, shared_path):
    trained = Trained(comm)
    checkpoint = hpcdist.Checkpoint(weight=trained.weight, variable=trained.variable, table=torch.arange(4).bfloat16())
    manager = hpcdist.CheckpointManager(checkpoint, shared_path)
    path = manager.save(1)
    manager.wait()
    assert trained.weight.tolist() == [1, 1, 1]
    trained.train(2)
    checkpoint["table"].zero_()
    checkpoint.read(comm.bcast(path))
    assert checkpoint["table"].tolist() == [0, 1, 2, 3]
    assert trained.weight.tolist() == [1, 1, 1]
    assert trained.variable.numpy() == 2
    assert trained.weight.requires_grad
    trained.train(1)


def test_without_run_the_step_says_what_to_do(comm):
    trained = Trained(comm)
    (trained.weight * trained.variable).sum().backward()
    if comm.size == 1:
        trained.optimizer.step()
        return
    with pytest.raises(GradientError, match=r"strategy\.run"):
        trained.optimizer.step()


def test_a_variable_is_an_operand_with_a_gradient(comm):
    trained = Trained(comm)
    y = torch.exp(trained.variable) * 3
    (gradient,) = torch.autograd.grad(y, trained.variable.parameter)
    assert gradient == y
    assert float(trained.variable) == 2
    trained.variable.assign(7.0)
    assert trained.variable.parameter == 7


@pytest.mark.parametrize(("aggregation", "expected"), [("SUM", 1 + 21), ("MEAN", 1 + 3.5)])
@pytest.mark.parametrize("n_local", [1, 3])
def test_what_replicas_assign_together_is_written_once(comm, aggregation, expected, n_local):
    strategy = hpcdist.MultiWorkerMirroredStrategy(num_replicas=n_local * comm.size)
    n_replicas = strategy.num_replicas_in_sync
    with strategy.scope():
        variable = hpcdist.Variable(1.0, trainable=True, aggregation=hpcdist.VariableAggregation[aggregation])

    def add():
        number = hpcdist.get_replica_context().replica_id_in_sync_group + 1
        variable.assign_add(number * 42 / (n_replicas * (n_replicas + 1)) * (n_replicas / 6 if is_mean else 1))

    is_mean = aggregation == "MEAN"
    strategy.run(add)
    assert float(variable) == pytest.approx(expected)
    assert len(set(comm.allgather(float(variable)))) == 1

    def shrink_too():
        add()
        with torch.no_grad():
            variable.parameter.mul_(0.5)

    if n_replicas > 1:
        with pytest.raises(UsageError, match="write.*parameter"):
            strategy.run(shrink_too)


def test_whole_numbers_are_not_trained(comm):
    whole = hpcdist.Variable(3, trainable=True)
    assert whole.trainable
    assert whole.parameter is None
    assert hpcdist.Variable(3).parameter is None

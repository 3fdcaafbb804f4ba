"""no_sync with several replicas on a rank: what each replica accumulates is summed once, on any number of ranks."""

import pytest
import torch
from torch import nn

import hpcdist
from hpcdist.errors import GradientError

pytestmark = pytest.mark.mpi

ROWS = 24


def micro_batches(n_parts):
    """Return the micro-batches of one step: tensors of rows, the same on all ranks."""
    return torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64).chunk(n_parts)


class Trained:
    """A model of which one layer is used in the first micro-batch only."""

    def __init__(self, n_replicas, gradient_op="sum"):
        self.strategy = hpcdist.MultiWorkerMirroredStrategy(num_replicas=n_replicas, gradient_op=gradient_op)
        torch.manual_seed(0)
        with self.strategy.scope():
            self.model = nn.Linear(3, 2).double()
            self.first = nn.Linear(3, 2).double()
            parameters = [*self.model.parameters(), *self.first.parameters()]
            self.optimizer = torch.optim.SGD(parameters, lr=0.1)

    def backward(self, rows, is_first):
        context = hpcdist.get_replica_context()
        replica_rows = rows[context.replica_id_in_sync_group :: context.num_replicas_in_sync]
        y = self.model(replica_rows)
        if is_first:
            y = y + self.first(replica_rows)
        (y.square().sum() / ROWS if self.strategy.is_summing else y.square().sum(1).mean()).backward()

    def step_in_one_run(self):
        *before, last = micro_batches(3)
        self.optimizer.zero_grad()
        for number, rows in enumerate(before):
            with self.strategy.no_sync():
                self.backward(rows, number == 0)
        self.backward(last, False)
        self.optimizer.step()

    def train_in_one_run(self, n_steps):
        for _ in range(n_steps):
            self.strategy.run(self.step_in_one_run)
        return self.weights()

    def train_in_several_runs(self, n_steps):
        """With a run for each micro-batch, and zero_grad outside of runs."""
        *before, last = micro_batches(3)
        for _ in range(n_steps):
            self.optimizer.zero_grad()
            with self.strategy.no_sync():
                for number, rows in enumerate(before):
                    self.strategy.run(self.backward, args=(rows, number == 0))
            self.strategy.run(self.last, args=(last,))
        return self.weights()

    def last(self, rows):
        self.backward(rows, False)
        self.optimizer.step()

    def weights(self):
        parts = []
        for param_group in self.optimizer.param_groups:
            for parameter in param_group["params"]:
                parts.append(parameter.detach().reshape(-1))
        return torch.cat(parts)


def trained_alone(n_steps):
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    first = nn.Linear(3, 2).double()
    optimizer = torch.optim.SGD([*model.parameters(), *first.parameters()], lr=0.1)
    for _ in range(n_steps):
        optimizer.zero_grad()
        for number, rows in enumerate(micro_batches(3)):
            ((model(rows) + (first(rows) if number == 0 else 0)).square().sum() / ROWS).backward()
        optimizer.step()
    return torch.cat([parameter.detach().reshape(-1) for parameter in [*model.parameters(), *first.parameters()]])


@pytest.mark.feature("collectives.accumulation-without-sync")
@pytest.mark.parametrize("way", [Trained.train_in_one_run, Trained.train_in_several_runs])
@pytest.mark.parametrize("n_replicas", [None, 4, 8])
def test_it_trains_as_in_one_process(comm, way, n_replicas):
    trained_parameters = way(Trained(n_replicas), 3)
    torch.testing.assert_close(trained_parameters, trained_alone(3), rtol=1e-12, atol=1e-14)
    assert len(set(comm.allgather(trained_parameters.numpy().tobytes()))) == 1


@pytest.mark.parametrize("way", [Trained.train_in_one_run, Trained.train_in_several_runs])
def test_means_of_equal_micro_batches(comm, way):
    trained_parameters = way(Trained(4, "mean"), 2)
    if comm.size == 4:
        expected = way(Trained(None, "mean"), 2)
    else:
        expected = None
    if expected is not None:
        torch.testing.assert_close(trained_parameters, expected, rtol=1e-12, atol=1e-14)
    assert len(set(comm.allgather(trained_parameters.numpy().tobytes()))) == 1


@pytest.mark.feature("collectives.accumulation-without-sync")
def test_zero_grad_between_runs_drops_what_all_replicas_have(comm):
    trained = Trained(8)
    fresh = Trained(8)
    rows = micro_batches(1)[0]
    with trained.strategy.no_sync():
        trained.strategy.run(trained.backward, args=(rows * 100, True))
    trained.optimizer.zero_grad()
    trained.strategy.run(trained.last, args=(rows,))
    fresh.strategy.run(fresh.last, args=(rows,))
    assert torch.equal(trained.weights(), fresh.weights())


@pytest.mark.parametrize("holder", ["all", "only the first"])
@pytest.mark.parametrize("zero", ["none", "in place"])
def test_zeroing_between_runs_drops_what_any_replica_has(comm, holder, zero):
    trained = Trained(8)
    fresh = Trained(8)
    rows = micro_batches(1)[0]

    def accumulate():
        if holder == "all" or hpcdist.get_replica_context().replica_id_in_sync_group == 0:
            trained.backward(rows * 100, True)

    with trained.strategy.no_sync():
        trained.strategy.run(accumulate)
    trained.optimizer.zero_grad(set_to_none=zero == "none")
    trained.strategy.run(trained.last, args=(rows,))
    fresh.strategy.run(fresh.last, args=(rows,))
    assert torch.equal(trained.weights(), fresh.weights())


def test_changing_between_runs_what_replicas_have_is_refused(comm):
    trained = Trained(max(4, 2 * comm.size))
    rows = micro_batches(1)[0]
    with trained.strategy.no_sync():
        trained.strategy.run(trained.backward, args=(rows, True))
    for parameter in trained.model.parameters():
        parameter.grad.mul_(0.5)
    with pytest.raises(GradientError, match="no_sync"):
        trained.strategy.run(trained.last, args=(rows,))


def test_what_a_replica_drops_in_a_run_does_not_weigh(comm):
    """It accumulates other rows afterwards, through fewer layers."""
    trained = Trained(4, "mean")
    fresh = Trained(4, "mean")
    rows = micro_batches(1)[0]

    def accumulate(first_rows, is_dropped):
        trained.backward(first_rows, True)
        if is_dropped:
            trained.optimizer.zero_grad()

    with trained.strategy.no_sync():
        trained.strategy.run(accumulate, args=(rows, True))
        trained.strategy.run(trained.backward, args=(rows[:12], False))
    trained.strategy.run(trained.last, args=(rows[12:],))
    with fresh.strategy.no_sync():
        fresh.strategy.run(fresh.backward, args=(rows[:12], False))
    fresh.strategy.run(fresh.last, args=(rows[12:],))
    assert torch.equal(trained.weights(), fresh.weights())


def test_a_step_on_local_gradients_is_refused(comm):
    trained = Trained(max(4, 2 * comm.size))

    def step():
        with trained.strategy.no_sync():
            trained.backward(micro_batches(1)[0], True)
        trained.optimizer.step()

    with pytest.raises(GradientError, match="gradients.*replicas"):
        trained.strategy.run(step)


def test_accumulating_on_a_sum_is_refused(comm):
    trained = Trained(max(4, 2 * comm.size))

    def step():
        trained.backward(micro_batches(1)[0], True)
        with trained.strategy.no_sync():
            trained.backward(micro_batches(1)[0], True)

    with pytest.raises(GradientError, match="no_sync.*zeroed.*gradients"):
        trained.strategy.run(step)


def test_replicas_that_clip_otherwise_are_refused(comm):
    trained = Trained(max(4, 2 * comm.size))

    def step():
        trained.backward(micro_batches(1)[0], True)
        if hpcdist.get_replica_context().replica_id_in_sync_group % 2:
            nn.utils.clip_grad_norm_(trained.model.parameters(), 1e-3)
        trained.optimizer.step()

    with pytest.raises(GradientError, match="replica.*gradients"):
        trained.strategy.run(step)


def test_a_scaler_takes_one_replica_per_rank(comm):
    trained = Trained(max(4, 2 * comm.size))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    def step():
        scaler.scale(trained.model(torch.ones(1, 3).double()).sum()).backward()
        scaler.step(trained.optimizer)

    with pytest.raises(GradientError, match="GradScaler"):
        trained.strategy.run(step)

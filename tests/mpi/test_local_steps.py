"""Local SGD: steps on a replica's own gradients, averages of weights and optimizers, saves and stops between rounds."""

import pytest
import torch
from sklearn import datasets as sklearn_datasets
from torch import nn

import hpcdist
from hpcdist.errors import ConfigurationError, GradientError

pytestmark = pytest.mark.mpi

GLOBAL_ROWS = 24


def make_strategy(local_steps, first_local_step=0, gradient_op="sum", **options):
    communication_options = hpcdist.CommunicationOptions(local_steps=local_steps, first_local_step=first_local_step)
    return hpcdist.MultiWorkerMirroredStrategy(
        communication_options=communication_options, gradient_op=gradient_op, **options
    )


def make_model():
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1)).double()


def rows_of(step, rank, size):
    rows = torch.randn(GLOBAL_ROWS, 3, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    return rows[rank::size]


class Trained:
    """A model, an optimizer, and a handler, in a loop whose steps are reported to the handler."""

    def __init__(self, local_steps=4, first_local_step=0, gradient_op="sum", make_optimizer=None):
        self.strategy = make_strategy(local_steps, first_local_step, gradient_op)
        with self.strategy.scope():
            self.model = make_model()
            make_optimizer = make_optimizer or (lambda parameters: torch.optim.Adam(parameters, lr=0.02))
            self.optimizer = make_optimizer(self.model.parameters())
        self.n_steps = 0

    def loss(self):
        x = rows_of(self.n_steps, self.strategy.rank, self.strategy.size)
        losses = (self.model(x) - x.sum(1, keepdim=True)).square()
        if self.strategy.sums.is_mean:
            return losses.mean()
        return losses.sum() / GLOBAL_ROWS

    def step(self):
        self.optimizer.zero_grad()
        self.loss().backward()
        self.optimizer.step()
        self.n_steps += 1

    def weights(self):
        state = self.model.state_dict()
        return torch.cat([value.reshape(-1).double() for value in state.values()])


def trained_by_hand(comm, n_steps, n_in_round, first_local_step=0):
    """Return the weights after steps that each rank makes in torch alone, with means taken by MPI."""
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    n_local = 0
    for step in range(n_steps):
        x = rows_of(step, comm.rank, comm.size)
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        if step < first_local_step:
            for parameter in model.parameters():
                parameter.grad = torch.from_numpy(comm.allreduce(parameter.grad.numpy()) / comm.size)
        optimizer.step()
        n_local += step >= first_local_step
        if step < first_local_step or n_local % n_in_round == 0:
            means = list(model.buffers())
            if step >= first_local_step:
                means += model.parameters()
                for state in optimizer.state.values():
                    means += state.values()
            for tensor in means:
                if tensor.dim():
                    tensor.data.copy_(torch.from_numpy(comm.allreduce(tensor.detach().numpy()) / comm.size))
    return torch.cat([value.reshape(-1).double() for value in model.state_dict().values()])


@pytest.mark.feature("strategies.local-sgd")
@pytest.mark.parametrize("gradient_op", ["sum", "mean"])
@pytest.mark.parametrize(("n_in_round", "first"), [(4, 0), (3, 5)])
def test_they_are_the_local_steps_of_every_rank_and_their_mean(comm, gradient_op, n_in_round, first):
    trained = Trained(n_in_round, first, gradient_op)
    n_steps = first + 2 * n_in_round
    for _ in range(n_steps):
        trained.step()
    expected = trained_by_hand(comm, n_steps, n_in_round, first)
    torch.testing.assert_close(trained.weights(), expected, rtol=1e-8, atol=1e-10)
    assert len(set(comm.allgather(trained.weights().numpy().tobytes()))) == 1
    trained.step()
    assert len(set(comm.allgather(trained.weights().numpy().tobytes()))) == comm.size


@pytest.mark.feature("strategies.local-sgd")
def test_nothing_is_sent_inside_a_round(comm):
    trained = Trained(5)
    trained.step()
    journal = trained.strategy.group.journal
    before = journal.n_entered
    for _ in range(3):
        trained.step()
    assert journal.n_entered == before
    trained.step()
    assert (journal.n_entered > before) == (comm.size > 1)


@pytest.mark.feature("strategies.local-sgd")
def test_a_save_waits_for_the_average_and_a_restart_has_the_bits(comm, shared_path):
    """The handler saves every 3 steps: at the end of the round that it falls into."""

    def run(n_steps, directory):
        trained = Trained(4)
        checkpoint = hpcdist.Checkpoint(model=trained.model, optimizer=trained.optimizer, strategy=trained.strategy)
        manager = hpcdist.CheckpointManager(checkpoint, shared_path / directory, max_to_keep=None)
        schedule = hpcdist.SaveSchedule(every_steps=3)
        handler = hpcdist.PreemptionCheckpointHandler(trained.strategy.cluster_resolver, manager, schedule=schedule)
        with handler:
            trained.n_steps = handler.step
            while trained.n_steps < n_steps:
                trained.step()
                handler.save_checkpoint_if_preempted()
        return trained.weights()

    whole = run(16, "whole")
    run(8, "parts")
    parts = run(16, "parts")
    assert torch.equal(whole, parts)
    if comm.size > 1:
        names = sorted(path.name[:13] for path in (shared_path / "whole").glob("step-*.h5"))
        assert names == ["step-00000004", "step-00000008", "step-00000012", "step-00000016"]


def test_a_save_of_the_programs_own_ends_the_round(comm, shared_path):
    trained = Trained(4)
    manager = hpcdist.CheckpointManager(
        hpcdist.Checkpoint(model=trained.model, optimizer=trained.optimizer), shared_path
    )
    for _ in range(3):
        trained.step()
    manager.save(3)
    assert len(set(comm.allgather(trained.weights().numpy().tobytes()))) == 1
    manager.wait()


def make_manager(trained, folder, **options):
    checkpoint = hpcdist.Checkpoint(model=trained.model, optimizer=trained.optimizer)
    return hpcdist.CheckpointManager(checkpoint, folder, **options)


@pytest.mark.parametrize("call", ["save_fast", "check_equal"])
def test_copies_and_comparisons_end_the_round(comm, shared_path, tmp_path, call):
    trained = Trained(4)
    manager = make_manager(trained, shared_path, fast_directory=tmp_path)
    trained.step()
    if call == "save_fast":
        manager.save_fast(1)
    else:
        manager.check_equal()
    assert len(set(comm.allgather(trained.weights().numpy().tobytes()))) == 1
    manager.wait()
    manager.forget_copies()


def test_a_restore_ends_the_round(comm, shared_path):
    """All ranks have the same values then, and the next round begins with the next step."""
    trained = Trained(2)
    manager = make_manager(trained, shared_path)
    path = manager.save(0)
    trained.step()
    assert trained.strategy.world.step_flags.is_in_round
    manager.checkpoint.restore(path)
    assert not trained.strategy.world.step_flags.is_in_round
    trained.step()
    assert trained.strategy.world.step_flags.is_in_round
    trained.step()
    assert len(set(comm.allgather(trained.weights().numpy().tobytes()))) == 1
    manager.wait()


def test_the_average_at_the_end_of_a_round_belongs_to_its_last_step(comm, shared_path):
    """A program that ends there is saved, as nothing has changed since."""
    trained = Trained(2)
    handler = hpcdist.PreemptionCheckpointHandler(None, make_manager(trained, shared_path))
    with handler:
        for _ in range(2):
            trained.step()
            handler.poll()
        assert not handler._last_values.have_changed()


def test_accumulation_before_a_local_step(comm):
    """Two halves of a batch, the first under no_sync, give the step of the whole."""
    whole = Trained(2)
    halves = Trained(2)
    for trained in (whole, halves):
        trained.optimizer.zero_grad()
    whole.loss().backward()
    with halves.strategy.no_sync():
        (halves.loss() / 2).backward()
    (halves.loss() / 2).backward()
    whole.optimizer.step()
    halves.optimizer.step()
    torch.testing.assert_close(
        torch.cat([parameter.reshape(-1) for parameter in halves.model.parameters()]),
        torch.cat([parameter.reshape(-1) for parameter in whole.model.parameters()]),
    )


def test_what_cannot_be_averaged(comm):
    if comm.size == 1:
        return
    trained = Trained(2, make_optimizer=lambda parameters: torch.optim.LBFGS(parameters))
    with pytest.raises(GradientError, match="optimizer.*averaged"):
        trained.optimizer.step(trained.loss)


def test_a_scaler_that_would_skip_steps_on_one_rank(comm):
    if comm.size == 1:
        return
    trained = Trained(2)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(trained.loss()).backward()
    with pytest.raises(GradientError, match="GradScaler"):
        scaler.step(trained.optimizer)
    disabled = torch.amp.GradScaler("cpu", enabled=False)  # as programs have it that train in bfloat16
    disabled.step(trained.optimizer)


@pytest.mark.parametrize("options", [{"num_replicas": 8}])
def test_one_replica_per_rank(options):
    with pytest.raises(ConfigurationError, match="replica.*weights"):
        make_strategy(4, **options)
    with pytest.raises(ConfigurationError, match="local_steps.*1"):
        hpcdist.CommunicationOptions(local_steps=0)


@pytest.mark.feature("strategies.local-sgd")
def test_digits_are_learned(comm):
    images, labels = sklearn_datasets.load_digits(return_X_y=True)
    images = torch.tensor(images / 16, dtype=torch.float32)
    labels = torch.tensor(labels)
    strategy = make_strategy(8, 24, gradient_op=None)
    torch.manual_seed(0)
    with strategy.scope():
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = hpcdist.Dataset.from_tensor_slices((images[:1500], labels[:1500])).shuffle(seed=1).batch(60)
    train = strategy.experimental_distribute_dataset(data)
    for _ in range(8):
        for x, y in train:
            losses = nn.functional.cross_entropy(model(x), y, reduction="none")
            optimizer.zero_grad()
            hpcdist.compute_average_loss(losses, global_batch_size=60).backward()
            optimizer.step()
    assert len(set(comm.allgather(model[0].weight.detach().numpy().tobytes()))) == 1
    right = (model(images[1500:]).argmax(1) == labels[1500:]).float().mean()
    print(f"accuracy {right:.3f} with averages every 8 steps")
    assert right > 0.87


def test_the_state_of_a_parameter_without_dimensions_is_averaged(comm):
    strategy = hpcdist.MultiWorkerMirroredStrategy(
        communication_options=hpcdist.CommunicationOptions(local_steps=2), gradient_op="sum"
    )
    with strategy.scope():
        scale = nn.Parameter(torch.tensor(0.5))
        optimizer = torch.optim.Adam([scale], lr=0.1)
    for _ in range(2):
        strategy.run(lambda: ((scale * (comm.rank + 1)) ** 2).backward())
        optimizer.step()
        optimizer.zero_grad()
    states = comm.allgather((scale.item(), *(value.item() for value in optimizer.state[scale].values())))
    assert len(set(states)) == 1

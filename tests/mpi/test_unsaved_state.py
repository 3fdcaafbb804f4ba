"""A Checkpoint that lacks what drives its optimizers is refused, and one that lacks something else is not."""

import copy

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler, swa_utils
from torch.utils.data import DataLoader, TensorDataset

import hpcdist
from hpcdist.errors import UsageError

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("no_handler_left")]


class Program:
    """A model, an optimizer and batches, as a program has them."""

    def __init__(self):
        self.strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op="mean")
        torch.manual_seed(3)
        with self.strategy.scope():
            self.model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        rows = TensorDataset(torch.arange(72.0).reshape(24, 3), torch.ones(24, 1))
        self.batches = self.strategy.experimental_distribute_dataset(DataLoader(rows, 6))
        self.after_step = []
        self.scaler = None

    def train(self, folder, n_epochs=2, **objects):
        """Train with a handler, and call `after_step` after each step."""
        checkpoint = hpcdist.Checkpoint(
            model=self.model, optimizer=self.optimizer, data=self.batches, strategy=self.strategy, **objects
        )
        handler = hpcdist.PreemptionCheckpointHandler(None, checkpoint, folder / "checkpoints", save_every_steps=100)
        with handler:
            for _ in range(self.batches.epoch, n_epochs):
                for x, y in self.batches:
                    self.step(x, y)
                    for act in self.after_step:
                        act()
        return handler.step

    def step(self, x, y):
        self.optimizer.zero_grad()
        loss = nn.functional.mse_loss(self.model(x), y)
        if self.scaler is None:
            loss.backward()
            self.optimizer.step()
            return
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()


class ForeignScheduler:
    """A scheduler as other libraries have it: derived from nothing of torch."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.base_values = [group["lr"] for group in optimizer.param_groups]

    def step(self, epoch=None):
        """Change nothing."""

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        """There is none."""


class Wrapper:
    """Holds a scheduler, as trainers' wrappers do."""

    def __init__(self, scheduler):
        self.scheduler = scheduler

    def state_dict(self):
        return self.scheduler.state_dict()

    def load_state_dict(self, state):
        self.scheduler.load_state_dict(state)


def sequence_of(optimizer):
    members = [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    return lr_scheduler.SequentialLR(optimizer, members, [3])


SCHEDULERS = {
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=50),
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
    "ReduceLROnPlateau": lr_scheduler.ReduceLROnPlateau,
    "SequentialLR": sequence_of,
    "ChainedScheduler": lambda optimizer: lr_scheduler.ChainedScheduler([lr_scheduler.ExponentialLR(optimizer, 0.9)]),
    "SWALR": lambda optimizer: swa_utils.SWALR(optimizer, 0.05),
    "ForeignScheduler": ForeignScheduler,
}


@pytest.mark.feature("checkpoints.what-drives-optimizers")
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_that_is_left_out_is_refused_after_the_first_step(shared_path, name):
    program = Program()
    scheduler = SCHEDULERS[name](program.optimizer)
    n_steps = []
    program.after_step = [lambda: n_steps.append(1)]
    with pytest.raises(UsageError, match=rf"got no {name}.*Checkpoint\(\.\.\., schedule=schedule\), or leave_out="):
        program.train(shared_path / "run")
    assert len(n_steps) == 1
    assert scheduler is not None


@pytest.mark.parametrize("how", ["saved", "wrapped", "left out", "class left out"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_that_is_saved_or_left_out_by_name_is_not_refused(shared_path, name, how):
    program = Program()
    scheduler = SCHEDULERS[name](program.optimizer)
    objects = {
        "saved": {"schedule": scheduler},
        "wrapped": {"schedule": Wrapper(scheduler)},
        "left out": {"leave_out": [scheduler]},
        "class left out": {"leave_out": [type(scheduler), lr_scheduler.LRScheduler]},
    }
    assert program.train(shared_path / "run", **objects[how]) == 8


def test_an_average_of_one_rank_alone_ends_all(comm, shared_path):
    program = Program()
    if comm.rank == comm.size - 1:
        average = swa_utils.AveragedModel(program.model)
    else:
        average = None
    with pytest.raises(UsageError, match="got no AveragedModel"):
        program.train(shared_path / "run")
    del average


def test_a_scheduler_that_is_made_later_is_refused_at_the_next_save(shared_path):
    program = Program()
    schedulers = []
    program.after_step = [lambda: schedulers or schedulers.append(swa_utils.SWALR(program.optimizer, 0.05))]
    with pytest.raises(UsageError, match="got no SWALR"):
        program.train(shared_path / "run")


def test_a_manager_without_a_handler_refuses_too(shared_path):
    program = Program()
    scheduler = lr_scheduler.ExponentialLR(program.optimizer, 0.9)
    checkpoint = hpcdist.Checkpoint(model=program.model, optimizer=program.optimizer, strategy=program.strategy)
    manager = hpcdist.CheckpointManager(checkpoint, shared_path / "run")
    with pytest.raises(UsageError, match="got no ExponentialLR"):
        manager.save(1)
    assert not list((shared_path / "run").glob("*.h5"))
    del scheduler


@pytest.mark.parametrize(("is_enabled", "is_saved"), [(True, False), (True, True), (False, False)])
def test_a_scaler_is_refused_if_it_scales(shared_path, is_enabled, is_saved):
    program = Program()
    scaler = torch.amp.GradScaler("cpu", enabled=is_enabled)
    program.scaler = scaler
    objects = {"scaler": scaler} if is_saved else {}
    if is_saved or not is_enabled:
        assert program.train(shared_path / "run", **objects) == 8
        return
    with pytest.raises(UsageError, match=r"got no GradScaler.*scaler=scaler"):
        program.train(shared_path / "run")


class Average:
    """An average of weights as people write it."""

    def __init__(self, model):
        self.copy = copy.deepcopy(model)

    @torch.no_grad()
    def update(self, model):
        for average, parameter in zip(self.copy.parameters(), model.parameters(), strict=True):
            average.lerp_(parameter, 0.1)


@pytest.mark.parametrize(
    "kind",
    ["torch's", "by hand", "by hand, with an optimizer that never steps", "by hand, without gradients in an optimizer"],
)
@pytest.mark.parametrize("how", ["saved", "left out", "forgotten"])
def test_an_average_of_weights(shared_path, kind, how):
    program = Program()
    optimizers = []
    if kind.startswith("by hand"):
        average = Average(program.model)
        program.after_step = [lambda: average.update(program.model)]
        if kind != "by hand":
            optimizers.append(torch.optim.SGD(average.copy.parameters(), lr=0.1))
        if kind.endswith("gradients in an optimizer"):
            program.after_step += [optimizer.step for optimizer in optimizers]
        objects = {"ema": average.copy}
    else:
        average = swa_utils.AveragedModel(program.model)
        program.after_step = [lambda: average.update_parameters(program.model)]
        objects = {"ema": average}
    if how == "left out":
        objects = {"leave_out": [type(objects["ema"])]}
    if how != "forgotten":
        assert program.train(shared_path / "run", **objects) == 8
        return
    with pytest.raises(UsageError, match=r"ema=ema"):
        program.train(shared_path / "run")


def test_a_model_with_an_optimizer_of_its_own_is_no_average(shared_path):
    """As another member of an ensemble, of the same class, that is trained in the same loop and saved elsewhere."""
    program = Program()
    member = copy.deepcopy(program.model)
    optimizer = torch.optim.SGD(member.parameters(), lr=0.1)

    def step_member():
        for parameter in member.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()

    program.after_step = [step_member]
    assert program.train(shared_path / "run") == 8


class Trainer:
    """Holds all, and has a step and a state, as trainers do."""

    def __init__(self, program):
        self.model = program.model
        self.optimizer = program.optimizer
        self.best = copy.deepcopy(program.model)
        self.reference = copy.deepcopy(program.model).requires_grad_(False)

    def step(self):
        """Keep the best model, here always the last one."""
        self.best.load_state_dict(self.model.state_dict())

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        """There is none."""


def test_what_merely_holds_or_copies_is_no_reason(shared_path):
    program = Program()
    trainer = Trainer(program)
    other_optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    scheduler_of_other = lr_scheduler.ExponentialLR(other_optimizer, 0.9)
    last_fold = Program()
    last_fold.scaler = torch.amp.GradScaler("cpu")
    average_of_other = swa_utils.AveragedModel(last_fold.model)
    last_fold.step(torch.ones(2, 3), torch.ones(2, 1))
    program.after_step = [trainer.step]
    assert program.train(shared_path / "run") == 8
    assert (scheduler_of_other, average_of_other) != (None, None)

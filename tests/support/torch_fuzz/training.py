"""Executes a program: the code that a user would write, over what differs between plain torch and hpcdist."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from torch_fuzz.models import Net, Rows, build_critic, build_net
from torch_fuzz.program import ModelSpec, OptimizerSpec, Phase, Program

#: Schedules of the learning rate, made from an optimizer.
SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 3, 0.5),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 8),
    "one_cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=1000, cycle_momentum=False),
    "plateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0),
    "warm_up": lambda optimizer: lr_scheduler.LinearLR(optimizer, 0.2, total_iters=5),
}


class Backend(Protocol):
    """What a program asks of the library it runs on."""

    def scope(self) -> AbstractContextManager[Any]:
        """Return the block in which models are made."""

    def no_sync(self) -> AbstractContextManager[Any]:
        """Return a block whose backwards only accumulate."""

    def run(self, step: Callable[..., Any], *args: Any) -> Any:
        """Call a step."""

    def merge(self, change: Callable[[], Any]) -> None:
        """Call, inside a step, what is done once for all replicas."""

    def batches(self, rows: Rows) -> Iterator[tuple[Any, int]]:
        """Yield (this replica's part, rows of the global batch), epoch after epoch."""

    def scale(self, losses: Tensor, weights: Tensor | None, divisor: int) -> Tensor:
        """Return the loss whose gradient is right."""

    def regularize(self, loss: Tensor) -> Tensor:
        """Return a replica's part of a loss that all have."""

    def total(self, value: Any) -> float:
        """Return the sum of what steps returned, outside of steps."""

    def total_inside(self, value: Tensor) -> Tensor:
        """Return the sum of a tensor over replicas, inside a step."""

    def sums(self, gradients: list[Tensor]) -> list[Tensor]:
        """Return sums of gradients over replicas, inside a step."""

    def make_optimizer(self, optimizer_class: Any, groups: list[Any], options: dict[str, Any]) -> torch.optim.Optimizer:
        """Return an optimizer of a class."""

    def clip_norm(self, optimizer: torch.optim.Optimizer, parameters: list[Tensor], max_norm: float) -> None:
        """Scale the gradients of an optimizer's parameters to a norm."""

    def clip_value(self, optimizer: torch.optim.Optimizer, parameters: list[Tensor], limit: float) -> None:
        """Bound the gradients of an optimizer's parameters."""

    def apply(self, optimizer: torch.optim.Optimizer, pairs: list[Any], is_method: bool) -> None:
        """Step on gradients of the program's own."""

    def synchronize_statistics(self, model: nn.Module) -> nn.Module:
        """Return a model whose BatchNorm has the statistics of the global batch."""

    def save_and_restore(self, objects: dict[str, Any], disturb: Callable[[], None]) -> None:
        """Save, disturb, and restore."""


class Training:
    """The state of a program that runs.

    Args:
        program: what to do.
        backend: what it is done with.
    """

    def __init__(self, program: Program, backend: Backend) -> None:
        self.program = program
        self.backend = backend
        self.dtype = getattr(torch, program.dtype)
        self.optimizers: list[torch.optim.Optimizer] = []
        self.schedulers: list[Any] = []
        self.kept: list[Any] = []  # what a program holds on to besides
        with backend.scope():
            self.model = self._build(program.model)
            if program.critic is None:
                self.critic = None
            else:
                self.critic = build_critic(program.critic.width, self.dtype)
            models = [self.model, *filter(None, [self.critic])]
            for model, spec in zip(models, program.optimizers, strict=True):
                if spec.is_in_scope:
                    self.optimizers.append(make_optimizer(backend, spec, model.parameters()))
        for model, spec in list(zip(models, program.optimizers, strict=True))[len(self.optimizers) :]:
            self.optimizers.append(make_optimizer(backend, spec, model.parameters()))
        if program.has_average:
            self.average = self._average()
        else:
            self.average = None
        self.make_schedulers()
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def _build(self, spec: ModelSpec) -> Net:
        model = build_net(spec.kind, spec.width, spec.n_heads, spec.has_counter, self.dtype)
        if spec.kind == "batch_norm":
            model.trunk = self.backend.synchronize_statistics(model.trunk)
        parameters = list(model.parameters())
        for number in spec.frozen:
            parameters[number % len(parameters)].requires_grad_(False)
        return model

    def _average(self) -> torch.optim.swa_utils.AveragedModel:
        swa = torch.optim.swa_utils
        return swa.AveragedModel(self.model, multi_avg_fn=swa.get_ema_multi_avg_fn(0.8))

    def make_schedulers(self) -> None:
        """Make the learning rates' schedules anew."""
        if self.program.scheduler:
            self.schedulers = [SCHEDULERS[self.program.scheduler](optimizer) for optimizer in self.optimizers]

    def run(self, rows: Rows) -> None:
        """Execute all phases."""
        from torch_fuzz.events import EVENTS

        batches = self.backend.batches(rows)
        for phase in self.program.phases:
            for event in phase.events:
                EVENTS[event](self)
            for number in range(phase.n_steps):
                value = self._take_step(phase, number, itertools.islice(batches, phase.n_batches))
                self._after_step(value)

    def _take_step(self, phase: Phase, number: int, batches: Iterator[tuple[Any, int]]) -> float:
        from torch_fuzz.steps import micro_step

        total = 0.0
        for index, (part, n_rows) in enumerate(batches):
            step = Step(self, phase, number, n_rows, index == 0, index == phase.n_batches - 1)
            total = self.backend.total(self.backend.run(micro_step, step, part))
        return total

    def _after_step(self, total: float) -> None:
        for scheduler in self.schedulers:
            if self.program.scheduler == "plateau":
                scheduler.step(total)
            else:
                scheduler.step()
        if self.average is not None:
            self.average.update_parameters(self.model)

    def state(self) -> dict[str, Any]:
        """Return everything that must be equal, by name: tensors, numbers and None."""
        state_by_name: dict[str, Any] = {}
        models = {"model": self.model, "critic": self.critic, "average": self.average}
        for name, model in models.items():
            if model is not None:
                state_by_name.update(_flat(name, model.state_dict()))
            if model is not None and not self.program.cluster.divides_steps:
                state_by_name.update(
                    {f"{name}.{parameter_name}.grad": p.grad for parameter_name, p in model.named_parameters()}
                )
        for number, optimizer in enumerate(self.optimizers):
            state_by_name.update(_flat(f"optimizer {number}", optimizer.state_dict()["state"]))
            state_by_name[f"learning rate {number}"] = optimizer.param_groups[0]["lr"]
        return state_by_name


class Step:
    """One global batch of a step: what `micro_step` needs to know.

    An object, so that `strategy.run` takes it as a leaf.
    """

    def __init__(
        self, training: Training, phase: Phase, number: int, n_rows: int, is_first: bool, is_last: bool
    ) -> None:
        self.training = training
        self.phase = phase
        self.number = number
        self.n_rows = n_rows
        self.is_first = is_first
        self.is_last = is_last
        self.is_critics = phase.trains_critic and number % 2 == 0

    @property
    def model(self) -> nn.Module:
        """The model that is trained in this step."""
        critic = self.training.critic
        if self.is_critics and critic is not None:
            return critic
        return self.training.model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Its optimizer."""
        return self.training.optimizers[1 if self.is_critics else 0]

    @property
    def parameters(self) -> list[Tensor]:
        """The optimizer's parameters that need a gradient."""
        parameters: list[Tensor] = []
        for param_group in self.optimizer.param_groups:
            parameters += [parameter for parameter in param_group["params"] if parameter.requires_grad]
        return parameters


def make_optimizer(backend: Backend, spec: OptimizerSpec, parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    """Return an optimizer whose groups have different learning rates."""
    owned = list(parameters)
    options = {}
    for key, value in spec.options.items():
        if isinstance(value, list):
            options[key] = tuple(value)
        else:
            options[key] = value
    rate = options["lr"]
    parts = [owned[number :: spec.n_groups] for number in range(spec.n_groups)]
    groups = []
    for number, part in enumerate(parts):
        if part:
            groups.append({"params": part, "lr": rate / (number + 1)})
    return backend.make_optimizer(getattr(torch.optim, spec.kind), groups, options)


def nothing() -> AbstractContextManager[None]:
    """Return a block without effect."""
    return nullcontext()


def _flat(name: str, nest: Any) -> dict[str, Any]:
    if isinstance(nest, dict):
        children = nest.items()
    elif isinstance(nest, (list, tuple)):
        children = enumerate(nest)
    else:
        return {name: nest}
    leaves: dict[str, Any] = {}
    for key, child in children:
        leaves.update(_flat(f"{name}.{key}", child))
    return leaves

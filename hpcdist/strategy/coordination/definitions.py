"""Objects of a coordinator's program that scheduled functions use by name: workers have copies of their own.

Strategy, variables, modules, optimizers, metrics, datasets and resources of the workers are defined once, in a log
that each worker reads up to where a function needs it; all else goes by value, with each function. Values of variables
are on servers. What else is shared travels with functions and their results: see `shared.py`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer

from hpcdist.data.dataset import Dataset
from hpcdist.data.distributed import DistributedInput
from hpcdist.errors import ClosureInputError, HpcdistError, UsageError
from hpcdist.gradients import torch_hooks
from hpcdist.gradients.engine import GradientEngine
from hpcdist.ps import pickles
from hpcdist.ps.messages import Bytes
from hpcdist.ps.served import Layout, ServedParameters, settings_of
from hpcdist.strategy import context
from hpcdist.strategy.base import Strategy
from hpcdist.strategy.coordination.shared import SharedState, is_shared
from hpcdist.strategy.coordination.values import PerWorkerValues, RemoteValue
from hpcdist.strategy.own_gradients import offer

#: Which object a name in a pickle means: its kind and its number.
Name = tuple[str, int]
_STRATEGY: Name = ("strategy", 0)
_PLAIN = frozenset((type(None), bool, int, float, str, bytes, tuple, list, dict, set, type))


class Definitions:
    """The coordinator's side.

    Args:
        strategy: whose scope the objects were made in.
        engine, storage: of the strategy.

    Attributes:
        log: definitions, as pickles.
        shared: the state of defined objects that is not on servers.
    """

    def __init__(self, strategy: Strategy, engine: GradientEngine, storage: ServedParameters) -> None:
        self._strategy, self._engine, self._storage = strategy, engine, storage
        self._objects: list[Any] = []
        self._names: dict[int, Name] = {}
        self._unfinished: set[int] = set()
        self._modules: dict[int, nn.Module] = {}
        self._optimizers: dict[int, Optimizer] = {}
        self._n_layouts = 0
        self.log: list[Bytes] = []
        self.shared = SharedState()

    def dump(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Bytes:
        """Return a function with its arguments as a pickle; what it uses is defined first.

        Raises:
            UsageError: when it cannot be sent.
        """
        self._engine.prepare()
        self._define_layouts()
        try:
            sent = pickles.dumps((function, args, kwargs), self._name_of)
        except HpcdistError:
            raise
        except Exception as error:
            raise UsageError(
                f"schedule: expected a function and arguments that can be sent to a worker, got "
                f"{getattr(function, '__name__', function)!r}: {type(error).__name__}: {error}; make files, locks, "
                f"generators and compiled modules on the worker, by create_per_worker_resource."
            ) from error
        settings = {number: settings_of(optimizer) for number, optimizer in self._optimizers.items()}
        training = {number: module.training for number, module in self._modules.items()}
        return pickles.dumps((sent, settings, training))

    def _name_of(self, obj: Any) -> Name | None:
        """Return the name that travels in place of an object; None: it goes by value."""
        if type(obj) in _PLAIN:
            return None
        if id(obj) in self._names:
            return self._names[id(obj)]
        if obj is self._strategy:
            return _STRATEGY
        if isinstance(obj, nn.Parameter):
            return self._name_of_variable(obj)
        self._refuse(obj)
        if isinstance(obj, Optimizer):
            return self._define_optimizer(obj)
        if isinstance(obj, PerWorkerValues):
            return self._define("resource", obj, obj.make)
        is_ours = isinstance(obj, nn.Module) and obj in self._engine.modules
        return self._define("object", obj, obj) if is_ours or isinstance(obj, Dataset) or is_shared(obj) else None

    def _name_of_variable(self, parameter: nn.Parameter) -> Name | None:
        number = self._storage.variable_number(parameter)
        if number is None and parameter.requires_grad:
            raise UsageError(
                f"schedule: expected parameters made in strategy.scope(), got one of shape {tuple(parameter.shape)} "
                f"that no server holds: workers would train copies of it; make it in the scope."
            )
        return None if number is None else ("variable", number)

    def _refuse(self, obj: Any) -> None:
        """Raise UsageError for what cannot go to a worker in a useful way."""
        if isinstance(obj, RemoteValue):
            raise UsageError(
                "schedule: expected arguments that are there, got a RemoteValue, which cannot be the input of another "
                "function; fetch it first."
            )
        if isinstance(obj, LRScheduler):
            raise UsageError(
                f"schedule: expected a function that leaves schedules alone, got one that uses {type(obj).__name__}, "
                f"of which each function would step a copy; step it on the coordinator: rates travel with functions."
            )
        if isinstance(obj, DistributedInput):
            raise UsageError(
                f"schedule: expected an iterator of each worker, got {type(obj).__name__}; pass "
                f"iter(coordinator.create_per_worker_dataset(...))."
            )
        if isinstance(obj, Strategy):
            raise UsageError(f"schedule: expected a function of the coordinator's strategy, got another one, {obj!r}.")

    def _define(self, kind: str, obj: Any, value: Any) -> Name:
        """Append the definition of an object to the log, after those of what it uses."""
        if id(obj) in self._unfinished:
            raise UsageError(
                f"schedule: expected no two objects that use each other, got that in {type(obj).__name__}."
            )
        self._unfinished.add(id(obj))
        try:
            payload = pickles.dumps(value, lambda part: None if part is value else self._name_of(part))
        finally:
            self._unfinished.discard(id(obj))
        number = len(self._objects)
        name = self._names[id(obj)] = (kind, number)
        self._objects.append(obj)  # kept, so that its id stays its own
        self.log.append(pickles.dumps((kind, number, payload)))
        if kind == "object":
            self.shared.add(number, obj)
        if isinstance(obj, nn.Module):
            self._modules[number] = obj
        return name

    def _define_optimizer(self, optimizer: Optimizer) -> Name:
        number = self._storage.number_of(optimizer)
        groups = [
            {key: list(value) if key == "params" else value for key, value in group.items()}
            for group in optimizer.param_groups
        ]
        name = self._define("optimizer", optimizer, (number, type(optimizer), optimizer.defaults, groups))
        self._optimizers[name[1]] = optimizer
        torch_hooks.note_step(optimizer)
        return name

    def _define_layouts(self) -> None:
        """Append to the log which variables servers hold since the last call."""
        for layout in self._storage.layouts[self._n_layouts :]:
            self.log.append(pickles.dumps(("layout", 0, pickles.dumps(layout))))
        self._n_layouts = len(self._storage.layouts)


class Copies:
    """A worker's side: its copies of what the coordinator has defined.

    Args:
        strategy: of this worker.
        engine, storage: of the strategy.
        worker: its number.

    Attributes:
        shared: the state of the copies that is not on servers.
    """

    def __init__(self, strategy: Strategy, engine: GradientEngine, storage: ServedParameters, worker: int) -> None:
        self._strategy, self._engine, self._storage = strategy, engine, storage
        self._worker = worker
        self._objects: dict[int, Any] = {}
        self._makers: dict[int, Callable[[], Any]] = {}
        self.shared = SharedState()

    def learn(self, definition: Bytes) -> None:
        """Take the next definition of the coordinator's log."""
        kind, number, payload = pickles.loads(definition)
        with context.entered(self._strategy), self._engine.watching():
            value = pickles.loads(payload, self._find)
            if kind == "layout":
                self._learn_layout(value)
        if kind == "optimizer":
            self._objects[number] = self._learn_optimizer(*value)
        elif kind == "resource":
            self._makers[number] = value
        elif kind == "object":
            if isinstance(value, Dataset) and value.has_drawn_seed:  # nobody asked for one order on all workers
                value = value.with_drawn_seed((value.order.seed or 0) + self._worker)
            self._objects[number] = value
            self.shared.add(number, value)

    def _learn_layout(self, layout: Layout) -> None:
        device = self._strategy.device
        made = [nn.Parameter(torch.zeros(one.shape, dtype=one.dtype, device=device)) for one in layout.variables]
        self._storage.learn(layout, made)

    def _learn_optimizer(
        self, number: int, kind: type[Optimizer], defaults: dict[str, Any], groups: list[dict[str, Any]]
    ) -> Optimizer:
        optimizer = kind.__new__(kind)
        optimizer.__setstate__({"defaults": defaults, "state": {}, "param_groups": groups})
        self._storage.learn_optimizer(number, optimizer)
        offer(self._strategy, optimizer)
        return optimizer

    def _find(self, name: Name) -> Any:
        """Return this worker's copy of an object; a resource is made at its first use.

        Raises:
            ClosureInputError: when the resource cannot be made.
        """
        kind, number = name
        if kind == "strategy":
            return self._strategy
        if kind == "variable":
            return self._storage.variable(number)
        if kind == "resource" and number not in self._objects:
            try:
                with context.entered(self._strategy):
                    self._objects[number] = self._makers[number]()
            except Exception as error:
                raise ClosureInputError(
                    f"schedule: expected a resource that this worker can make, got {type(error).__name__}: {error}.",
                    error,
                ) from error
        return self._objects[number]

    def load(self, payload: Bytes) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        """Return a function with its arguments, and set optimizers and modules as they were when it was scheduled."""
        sent, settings, training = pickles.loads(payload)
        for number, groups in settings.items():
            for group, values in zip(self._objects[number].param_groups, groups, strict=True):
                group.update(values)
        for number, is_training in training.items():
            self._objects[number].training = is_training
        loaded: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]] = pickles.loads(sent, self._find)
        return loaded

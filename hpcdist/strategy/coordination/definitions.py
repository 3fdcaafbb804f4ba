"""Objects of a coordinator's program that scheduled functions use by name: each worker has copies of them.

Strategy, variables, modules, optimizers, metrics, datasets and resources of the workers are defined once, in a log
that each worker reads; all else goes by value, with each function. Values of variables are on servers. All other
shared state travels with functions and their results: see `shared.py`.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer

from hpcdist.data.dataset import Dataset
from hpcdist.data.distributed_input import DistributedInput
from hpcdist.errors import ClosureInputError, HpcdistError, UsageError
from hpcdist.gradients.engine import GradientEngine
from hpcdist.program import torch_hooks
from hpcdist.ps import pickles
from hpcdist.ps.messages import Bytes
from hpcdist.ps.served import Layout, ServedParameters, settings_of
from hpcdist.strategy import context
from hpcdist.strategy.base import Strategy
from hpcdist.strategy.coordination.shared import SharedState, is_shared
from hpcdist.strategy.coordination.values import PerWorkerValues, RemoteValue
from hpcdist.strategy.own_gradients import offer

#: Name of an object in a pickle: its kind and its number.
Name = tuple[str, int]
_STRATEGY: Name = ("strategy", 0)
_PLAIN = frozenset((type(None), bool, int, float, str, bytes, tuple, list, dict, set, type))


class Definitions:
    """The coordinator's side: objects of the program, and their definitions.

    Args:
        strategy: strategy in whose scope the objects were made.
        engine, storage: engine and storage of the strategy.

    Attributes:
        log: definitions, as pickles.
        shared: state of defined objects that is not on servers.
    """

    def __init__(
        self,
        strategy: Strategy,
        engine: GradientEngine,
        storage: ServedParameters,
    ) -> None:
        self._strategy = strategy
        self._engine = engine
        self._storage = storage
        self._objects: list[Any] = []
        self._n_objects = 0
        self._names: dict[int, Name] = {}
        self._unfinished: set[int] = set()
        self._optimizers: dict[int, Optimizer] = {}
        self._n_layouts = 0
        self.log: list[Bytes] = []
        self.shared = SharedState(storage.holds)

    def dump(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Bytes:
        """Return a function with its arguments as a pickle; the objects that it uses are defined first.

        Raises:
            UsageError: when it cannot be sent.
        """
        self._engine.planner.prepare_run(())
        self._define_layouts()
        self._require_served()
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
        settings = {
            number: settings_of(optimizer) for number, optimizer in self._optimizers.items()
        }
        return pickles.dumps((sent, settings, self.shared.modes()))

    def _require_served(self) -> None:
        """Raise UsageError if a parameter is trained now that was frozen when workers got copies of it."""
        private = self.shared.private()
        if private is not None:
            raise UsageError(
                f"schedule: expected parameters that are trained from the first function on, got one of shape "
                f"{tuple(private.shape)} that was frozen then, so that each worker has its own; unfreeze it in the "
                f"scope before the first schedule, and freeze it after that."
            )

    def _name_of(self, obj: Any) -> Name | None:
        """Return the name that travels in place of an object; None if the object goes by value."""
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
        is_managed = isinstance(obj, nn.Module) and obj in self._engine.managed.modules
        if is_managed or isinstance(obj, Dataset) or is_shared(obj):
            return self._define("object", obj, obj)
        return None

    def _name_of_variable(self, parameter: nn.Parameter) -> Name | None:
        """Return the name of a parameter that servers hold; None for a frozen one that goes by value."""
        number = self._storage.variable_number(parameter)
        if number is not None:
            return ("variable", number)
        if parameter.requires_grad:
            raise UsageError(
                f"schedule: expected parameters made in strategy.scope(), got one of shape {tuple(parameter.shape)} "
                f"that no server holds: workers would train copies of it; make it in the scope."
            )
        return None

    def _refuse(self, obj: Any) -> None:
        """Raise UsageError for an object that cannot go to a worker in a useful way."""
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
            raise UsageError(
                f"schedule: expected a function of the coordinator's strategy, got another one, {obj!r}; use "
                f"coordinator.strategy."
            )

    def _define(self, kind: str, obj: Any, value: Any) -> Name:
        """Append the definition of an object to the log, after the definitions of the objects that it uses.

        Args:
            kind: "object", "optimizer" or "resource".
            obj: the object that the name will mean.
            value: object that is pickled to define it.
        """
        if id(obj) in self._unfinished:
            raise UsageError(
                f"schedule: expected no two objects that use each other, got that in {type(obj).__name__}; pass one "
                f"of them as an argument."
            )
        self._unfinished.add(id(obj))
        try:
            payload = pickles.dumps(
                value, lambda part: None if part is value else self._name_of(part)
            )
        finally:
            self._unfinished.discard(id(obj))
        self._n_objects += 1
        number = self._n_objects
        name = (kind, number)
        self._names[id(obj)] = name
        self.log.append(pickles.dumps((kind, number, payload)))
        if kind == "resource":  # it ends with the program's last reference to it
            finalizer = weakref.finalize(obj, _forget, weakref.ref(self), id(obj), number)
            finalizer.atexit = False
            return name
        self._objects.append(obj)  # kept alive, so that no other object gets its id
        if kind == "object":
            self.shared.add(number, obj)
        return name

    def forget(self, key: int, number: int) -> None:
        """Let workers forget a resource. From any thread.

        Args:
            key: id of the resource.
            number: number in its name.
        """
        self._names.pop(key, None)
        self.log.append(pickles.dumps(("forget", number, None)))

    def _define_optimizer(self, optimizer: Optimizer) -> Name:
        number = self._storage.number_of(optimizer)
        groups: list[dict[str, Any]] = []
        for group in optimizer.param_groups:
            groups.append({**group, "params": list(group["params"])})
        value = (number, type(optimizer), optimizer.defaults, groups)
        name = self._define("optimizer", optimizer, value)
        self._optimizers[name[1]] = optimizer
        torch_hooks.note_step(optimizer)
        return name

    def _define_layouts(self) -> None:
        """Append to the log which variables servers hold since the last call."""
        for layout in self._storage.layouts[self._n_layouts :]:
            self.log.append(pickles.dumps(("layout", 0, pickles.dumps(layout))))
        self._n_layouts = len(self._storage.layouts)


class Copies:
    """A worker's side: its copies of the objects that the coordinator has defined.

    Args:
        strategy: strategy of this worker.
        engine, storage: engine and storage of the strategy.
        worker: number of this worker.

    Attributes:
        shared: state of the copies that is not on servers.
    """

    def __init__(
        self,
        strategy: Strategy,
        engine: GradientEngine,
        storage: ServedParameters,
        worker: int,
    ) -> None:
        self._strategy = strategy
        self._engine = engine
        self._storage = storage
        self._worker = worker
        self._objects: dict[int, Any] = {}
        self._makers: dict[int, Callable[[], Any]] = {}
        self._errors: dict[int, Exception] = {}
        self.shared = SharedState(storage.holds)

    def learn(self, definition: Bytes) -> None:
        """Take the next definition of the coordinator's log; one that cannot be loaded raises where it is used."""
        kind, number, payload = pickles.loads(definition)
        if kind == "forget":
            self._objects.pop(number, None)
            self._makers.pop(number, None)
            return
        try:
            with context.entered(self._strategy), self._engine.planner.watching():
                value = pickles.loads(payload, self._find)
                if kind == "layout":
                    self._learn_layout(value)
        except Exception as error:  # noqa: BLE001  such as an import error on a node that lacks a module
            self._errors[number] = error
            return
        if kind == "optimizer":
            self._objects[number] = self._learn_optimizer(*value)
        elif kind == "resource":
            self._makers[number] = value
        elif kind == "object":
            # the program has not asked for one order on all workers
            if isinstance(value, Dataset) and value.has_drawn_seed:
                value = value.with_drawn_seed((value.order.seed or 0) + self._worker)
            self._objects[number] = value
            self.shared.add(number, value)

    def _learn_layout(self, layout: Layout) -> None:
        device = self._strategy.device
        variables = [
            nn.Parameter(torch.zeros(spec.shape, dtype=spec.dtype, device=device))
            for spec in layout.variables
        ]
        self._storage.learn(layout, variables)

    def _learn_optimizer(
        self,
        number: int,
        kind: type[Optimizer],
        defaults: dict[str, Any],
        groups: list[dict[str, Any]],
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
        if number in self._errors:
            raise _input_error(self._errors[number])
        if kind == "resource" and number not in self._objects:
            try:
                with context.entered(self._strategy):
                    self._objects[number] = self._makers[number]()
            except Exception as error:
                raise _input_error(error) from error
        return self._objects[number]

    def load(self, payload: Bytes) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        """Return a function with its arguments; set optimizers and modules as they were when it was scheduled."""
        sent, settings, modes = pickles.loads(payload)
        for number, groups in settings.items():
            if number in self._errors:
                continue
            for group, values in zip(self._objects[number].param_groups, groups, strict=True):
                group.update(values)
        self.shared.set_modes(modes)
        loaded: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]] = pickles.loads(
            sent, self._find
        )
        return loaded


def _forget(definitions: "weakref.ref[Definitions]", key: int, number: int) -> None:
    alive = definitions()
    if alive is not None:
        alive.forget(key, number)


def _input_error(error: BaseException) -> ClosureInputError:
    return ClosureInputError(
        f"schedule: expected what the function uses on this worker, got {type(error).__name__}: {error}; make it "
        f"there, or pass it as an argument.",
        error,
    )

"""Refuses a Checkpoint that lacks what drives its optimizers: after a restart that would begin anew."""

import itertools
import types
from collections.abc import Sequence
from typing import Any

from hpcdist.data.distributed_input import DistributedInput
from hpcdist.errors import UsageError
from hpcdist.program.optimizer_drivers import (
    averages_of,
    copies_of,
    fingerprint,
    scalers_of,
    schedulers_of,
)
from hpcdist.program.torch_hooks import Handle, after_any_step
from hpcdist.saving.items import is_module, is_optimizer, is_strategy

#: Depth to which objects are looked for inside the objects of the Checkpoint, such as wrappers.
_MAX_DEPTH = 3
#: Number of items of a list or dict that are looked at.
_MAX_ITEMS = 256


class UnsavedState:
    """Looks for schedulers, scalers and averages of weights that are not in a Checkpoint.

    It looks for schedulers of torch, and others that hold an optimizer and have a state; enabled GradScalers; torch's
    AveragedModel; and copies of the models that change from one step to the next, such as an exponential moving
    average. Copies that stand still or are set to the model's weights, such as the best model, do not count; nor do
    models that an optimizer steps, such as other members of an ensemble.

    Args:
        objects: the objects of the Checkpoint.
        left_out: objects, or classes of objects, that the program begins anew at each restart.
    """

    def __init__(self, objects: Sequence[Any], left_out: Sequence[Any]) -> None:
        self._objects = objects
        self._left_out = left_out
        self._models = [item for item in objects if is_module(item)]
        self._optimizers = [
            item for item in objects if is_optimizer(item) and hasattr(item, "step")
        ]
        self._has_looked = False
        self._copies: list[tuple[Any, int]] = []
        self._steps: Handle | None = None
        self._stepped_ids: set[int] = set()

    def look(self) -> None:
        """Look for schedulers, scalers and torch's averages that are missing. Not collective.

        Raises:
            UsageError: if something is missing; on this rank only.

        Cost: the first time a walk over all objects of the process.
        """
        if not self._optimizers:
            return
        is_first = not self._has_looked
        self._has_looked = True
        self._require("schedule", schedulers_of(self._optimizers, is_first))
        self._require("scaler", scalers_of(self._optimizers))
        self._require("ema", averages_of(self._models))

    def note_copies(self) -> None:
        """Note how the copies of the models are after a step. Cost: a walk over all objects of the process."""
        if self._optimizers:
            copies = copies_of(self._models)
            self._copies = [(copy, fingerprint(copy)) for copy in copies]
        if self._copies:
            self._steps = after_any_step(self._note_step)

    def look_at_copies(self) -> None:
        """Look for copies of the models that have changed since `note_copies`, one step before. Not collective.

        Raises:
            UsageError: if one has, to something else than the model is, and is not saved; on this rank only.
        """
        fingerprints = [fingerprint(model) for model in self._models if self._copies]
        changing: list[Any] = []
        for copy, old_fingerprint in self._copies:
            copy_ids = set(map(id, copy.parameters()))
            if copy_ids & self._stepped_ids:
                continue
            if fingerprint(copy) not in (old_fingerprint, *fingerprints):
                changing.append(copy)
        self._copies = []
        if self._steps is not None:
            self._steps.remove()
        self._require("ema", changing)

    def _note_step(self, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:  # others are held, and not stepped
                    self._stepped_ids.add(id(parameter))

    def _require(self, name: str, drivers: Sequence[Any]) -> None:
        """Raise UsageError unless all drivers are saved or left out.

        Args:
            name: name that a program would give to a driver, for the error.
            drivers: the objects that drive the optimizers.
        """
        if not drivers:
            return
        known_ids = self._known_numbers()
        classes = tuple(item for item in self._left_out if isinstance(item, type))
        for driver in drivers:
            if id(driver) not in known_ids and not isinstance(driver, classes):
                raise UsageError(
                    f"Checkpoint: expected all that drives its optimizers, got no {type(driver).__name__}, which would "
                    f"begin anew at a restart; write Checkpoint(..., {name}={name}), or leave_out=[{name}] if it is to "
                    f"begin anew."
                )

    def _known_numbers(self) -> set[int]:
        """Return the ids of the objects that are saved or left out, and of the objects inside them.

        Each object is looked into once.
        """
        known_ids: set[int] = set()
        level = [*self._objects, *self._left_out]
        for _ in range(_MAX_DEPTH + 1):
            inner: list[Any] = []
            for item in level:
                if is_module(item) and not isinstance(item, type):
                    known_ids.update(map(id, item.modules()))
                elif id(item) not in known_ids:
                    known_ids.add(id(item))
                    inner += _held_by(item)
            level = inner
        return known_ids


def _held_by(item: Any) -> list[Any]:
    """Return the objects inside an object that is no module: its attributes, or the items of a list, tuple or dict."""
    if isinstance(item, (type, types.ModuleType)):
        return []
    if isinstance(item, (list, tuple)):
        return list(itertools.islice(item, _MAX_ITEMS))
    if isinstance(item, dict):
        return list(itertools.islice(item.values(), _MAX_ITEMS))
    if isinstance(item, DistributedInput) or is_optimizer(item) or is_strategy(item):
        return []
    return list(getattr(item, "__dict__", {}).values())

"""Finds the objects that drive a program's optimizers beside gradients: schedulers, scalers, averages of weights.

The list of kinds is closed, as nobody can tell for any object whether training depends on it.
"""

import functools
import gc
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import xxhash
from torch import nn
from torch.amp import GradScaler
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel

#: Attributes of which a scheduler of another library than torch has one, beside an optimizer, `step` and a state.
_SIGNS_OF_SCHEDULER = ("get_lr", "_get_lr", "get_last_lr", "base_lrs", "base_values", "last_epoch")
#: Number of elements of each parameter that a fingerprint looks at.
_N_SAMPLED = 256

#: The schedulers of torch's classes in the order in which they were made, so that all ranks report the same first.
_schedulers: "weakref.WeakKeyDictionary[Any, None]" = weakref.WeakKeyDictionary()
#: The optimizers that each enabled scaler has stepped. torch's scaler forgets them at its update.
_scaled: "weakref.WeakKeyDictionary[GradScaler, weakref.WeakSet[Any]]" = weakref.WeakKeyDictionary()
#: The model that each average is of, which torch's average does not keep.
_averaged: "weakref.WeakKeyDictionary[AveragedModel, weakref.ref[nn.Module]]" = (
    weakref.WeakKeyDictionary()
)


def _remember_schedulers_of(kind: Any) -> None:
    """Let schedulers of a class be remembered when they are made."""
    init = kind.__init__

    @functools.wraps(init)
    def init_and_remember(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        _schedulers[self] = None

    kind.__init__ = init_and_remember


def _remember_averages() -> None:
    """Let averages be remembered when they are made."""
    init = AveragedModel.__init__

    @functools.wraps(init)
    def init_and_remember(
        self: AveragedModel,
        model: nn.Module,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        init(self, model, *args, **kwargs)
        _averaged[self] = weakref.ref(model)

    AveragedModel.__init__ = init_and_remember  # type: ignore[method-assign]


def _remember_scalers() -> None:
    """Let enabled scalers be remembered when they step an optimizer."""
    step = GradScaler.step

    @functools.wraps(step)
    def step_and_remember(
        self: GradScaler,
        optimizer: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if self.is_enabled():
            _scaled.setdefault(self, weakref.WeakSet()).add(optimizer)
        return step(self, optimizer, *args, **kwargs)

    GradScaler.step = step_and_remember  # type: ignore[method-assign]


_remember_schedulers_of(LRScheduler)
_remember_schedulers_of(ReduceLROnPlateau)
_remember_averages()
_remember_scalers()


def schedulers_of(
    optimizers: Sequence[Any],
    is_thorough: bool,
) -> list[Any]:
    """Return the schedulers that hold one of some optimizers, without members of others; those of torch oldest first.

    Args:
        optimizers: optimizers of torch.
        is_thorough: whether to look for classes of other libraries, too, among all objects that refer to the
            optimizers. Cost: a walk over all objects of the process.
    """
    holders = list(_schedulers)
    if is_thorough:
        for optimizer in optimizers:
            holders += _holders_of(optimizer)
    schedulers: list[Any] = []
    for holder in holders:
        is_theirs = any(getattr(holder, "optimizer", None) is optimizer for optimizer in optimizers)
        is_known = any(holder is scheduler for scheduler in schedulers)
        if is_theirs and not is_known and _is_scheduler(holder):
            schedulers.append(holder)
    member_ids: dict[int, set[int]] = {}
    for scheduler in schedulers:
        member_ids[id(scheduler)] = set(map(id, members_of(scheduler)))
    outermost: list[Any] = []
    for scheduler in schedulers:
        number = id(scheduler)
        holders_ids = [holder for holder, ids in member_ids.items() if number in ids]
        # of schedulers that hold each other none is outside
        if all(holder in member_ids[number] for holder in holders_ids):
            outermost.append(scheduler)
    return outermost


def _holders_of(optimizer: Any) -> list[Any]:
    """Return the objects that have an optimizer as an attribute."""
    holders: list[Any] = []
    for referrer in gc.get_referrers(optimizer):
        if isinstance(referrer, dict):  # the attributes of an object, before Python 3.11 always
            for owner in gc.get_referrers(referrer):
                if getattr(owner, "__dict__", None) is referrer:
                    holders.append(owner)
        else:
            holders.append(referrer)
    return holders


def _is_scheduler(holder: Any) -> bool:
    """Return whether an object is a scheduler of torch, or like one."""
    if isinstance(holder, (LRScheduler, ReduceLROnPlateau)):
        return True
    for name in ("step", "state_dict", "load_state_dict"):
        if not callable(getattr(holder, name, None)):
            return False
    return any(hasattr(holder, sign) for sign in _SIGNS_OF_SCHEDULER)


def members_of(scheduler: Any) -> list[Any]:
    """Return the schedulers at any depth inside another one, such as a SequentialLR or a wrapper."""
    members: list[Any] = []
    to_visit = [scheduler]
    while to_visit:
        for value in vars(to_visit.pop()).values():
            values = value if isinstance(value, (list, tuple)) else [value]
            for member in values:
                is_visited = any(member is visited for visited in [scheduler, *members])
                if not is_visited and _is_scheduler(member):
                    members.append(member)
                    to_visit.append(member)
    return members


def scalers_of(optimizers: Sequence[Any]) -> list[Any]:
    """Return the enabled GradScalers that have stepped one of some optimizers."""
    scalers: list[Any] = []
    for scaler, stepped in list(_scaled.items()):
        if scaler.is_enabled() and any(optimizer in stepped for optimizer in optimizers):
            scalers.append(scaler)
    return scalers


def averages_of(models: Sequence[nn.Module]) -> list[AveragedModel]:
    """Return torch's averages of the weights of models, or of wrappers or parts of them."""
    parameter_ids: set[int] = set()
    for model in models:
        parameter_ids.update(map(id, model.parameters()))
    averages: list[AveragedModel] = []
    for average, reference in list(_averaged.items()):
        averaged_model = reference()
        if averaged_model is None:
            continue
        if any(id(parameter) in parameter_ids for parameter in averaged_model.parameters()):
            averages.append(average)
    return averages


def copies_of(models: Sequence[nn.Module]) -> list[nn.Module]:
    """Return modules of the classes of models, with parameters of the same names and shapes in separate memory.

    Modules in torch's averages are left out; `averages_of` returns the averages.

    Cost: a walk over all objects of the process.
    """
    kinds: set[type] = set()
    layouts: list[Any] = []
    known_ids: set[int] = set()
    for model in models:
        kinds.add(type(model))
        layouts.append(_layout_of(model))
        known_ids.update(map(id, model.parameters()))
    for average in list(_averaged):
        known_ids.update(map(id, average.parameters()))
    copies: list[nn.Module] = []
    for item in gc.get_objects():
        if type(item) not in kinds or _layout_of(item) not in layouts:
            continue
        if not any(id(parameter) in known_ids for parameter in item.parameters()):
            copies.append(item)
    return copies


def _layout_of(module: nn.Module) -> list[tuple[str, tuple[int, ...]]]:
    return [(name, tuple(parameter.shape)) for name, parameter in module.named_parameters()]


@torch.no_grad()
def fingerprint(module: nn.Module) -> int:
    """Return a digest of a few elements of each parameter. Cost: 1 KiB of each parameter is copied to the host."""
    digest = xxhash.xxh3_64()
    for parameter in module.parameters():
        flat = parameter.detach().reshape(-1)
        sample = flat[:_N_SAMPLED].to("cpu").contiguous()
        sample_bytes = sample.view(torch.uint8).numpy()
        digest.update(sample_bytes.tobytes())
    return digest.intdigest()

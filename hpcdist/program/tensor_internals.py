"""What torch does not document about tensors: their memory, their versions, and operations on many of them at once."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import TensorWeakRef

Item = TypeVar("Item")
#: Release of torch, such as (2, 13).
_RELEASE = tuple(int(number) for number in torch.__version__.split(".")[:2])
#: Whether plain weak references to tensors are sound. Up to 2.8 a tensor may be freed while the object that a
#: reference returned is used.
_HAS_PLAIN_REFERENCES = _RELEASE >= (2, 13)


def weak_reference(item: Item) -> Callable[[], Item | None]:
    """Return a weak reference to an object, such as a tensor: a function that returns the object while it lives."""
    if isinstance(item, Tensor) and not _HAS_PLAIN_REFERENCES:
        return TensorWeakRef(item)
    return weakref.ref(item)


def _can_increment_several() -> bool:
    try:
        torch.autograd.graph.increment_version(())
    except (RuntimeError, TypeError):
        return False
    return True


_takes_several_tensors = _can_increment_several()


def increment_versions(tensors: Sequence[Tensor]) -> None:
    """Let autograd know that tensors were written past its counters. Some releases of torch take one tensor a call."""
    if _takes_several_tensors:
        torch.autograd.graph.increment_version(tensors)
        return
    for tensor in tensors:
        torch.autograd.graph.increment_version(tensor)


class StorageName:
    """Names the memory of a tensor and of all its views. While the name exists, no other memory gets its number."""

    def __init__(self, tensor: Tensor) -> None:
        self._reference = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        self.number: int = self._reference.cdata

    @property
    def is_freed(self) -> bool:
        """Whether no tensor has this memory any more."""
        return bool(self._reference.expired())  # type: ignore[no-untyped-call]


def storage_number(tensor: Tensor) -> int:
    """Return the number of a tensor's memory, as `StorageName` has it."""
    return int(tensor.untyped_storage()._cdata)


#: Operations of torch that a sharded gradient supports: to zero it, and to unscale it.
ZEROING = {torch.ops.aten.zero_.default, torch.ops.aten._foreach_zero_.default}
UNSCALING = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default
T = TypeVar("T", bound=Tensor)


def unscale(
    gradients: list[Tensor],
    found_inf: Tensor,
    inverse_scale: Tensor,
) -> None:
    """Multiply gradients by the inverse scale of a GradScaler; write 1 to `found_inf` if one is infinite or NaN."""
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, found_inf, inverse_scale)


def n_holders(tensor: Tensor) -> int:
    """Return the number of objects that hold a tensor's memory: tensors, and the storage object that counts them."""
    # a local variable, so that the object is counted in every release of torch
    storage = tensor.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata))


def copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy each source to its target, as `copy_` does, in one call."""
    if targets:
        torch._foreach_copy_(targets, sources)


def move_means(
    means: list[Tensor],
    values: list[Tensor],
    factor: float,
) -> None:
    """Replace each mean by factor * mean + (1 - factor) * value."""
    torch._foreach_lerp_(means, values, 1 - factor)


def move_mean_squares(
    means: list[Tensor],
    values: list[Tensor],
    factor: float,
) -> None:
    """Replace each mean by factor * mean + (1 - factor) * value²."""
    torch._foreach_mul_(means, factor)
    torch._foreach_addcmul_(means, values, values, 1 - factor)


def move_maxima(
    maxima: list[Tensor],
    values: list[Tensor],
    factor: float,
    epsilon: float,
) -> list[Tensor]:
    """Replace each maximum by the larger of factor * maximum and the absolute value; return them plus epsilon."""
    torch._foreach_mul_(maxima, factor)
    torch._foreach_maximum_(maxima, torch._foreach_abs(values))
    return list(torch._foreach_add(maxima, epsilon))


def roots_of(values: list[Tensor], epsilon: float) -> list[Tensor]:
    """Return the square root of each value + epsilon."""
    roots = list(torch._foreach_add(values, epsilon))
    torch._foreach_sqrt_(roots)
    return roots


def subtract_quotients(
    targets: list[Any],
    dividends: list[Tensor],
    divisors: list[Tensor],
    factor: float,
) -> None:
    """Subtract factor * dividend / divisor from each target."""
    torch._foreach_addcdiv_(targets, dividends, divisors, -factor)


def make_memoryless(kind: type[T], like: Tensor) -> T:
    """Return a tensor without memory, with the shape, strides, dtype and device of another one."""
    memoryless_tensor: T = Tensor._make_wrapper_subclass(
        kind, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device
    )
    return memoryless_tensor

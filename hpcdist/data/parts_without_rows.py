"""The part of a batch that a replica without rows gets, made of what a program's collate_fn returns."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from hpcdist.errors import DataError
from hpcdist.nest import Nest, children_of, form_of, is_nest, with_children


def part_without_rows(join: Callable[[list[Any]], Nest], item: Any) -> Nest:
    """Return what `join` would return for no items: it has the shapes and dtypes of other parts.

    An item is joined alone and twice. The dimension that grows is the dimension of the rows, wherever it is, and is cut
    to length 0. Values that are equal in both are kept.

    Args:
        join: function that makes a part of a list of items, at least one.
        item: any item of the dataset.

    Raises:
        DataError: where the part has a value whose form for no rows is unknown; the message names its type.
    """
    single = join([item])
    double = join([item, item])
    return _without_rows(single, double)


def _without_rows(single: Nest, double: Nest) -> Nest:
    """Return a part for no items, by the parts of one item and of two."""
    if is_nest(single):
        if not is_nest(double) or len(single) != len(double):
            raise _refusal(single)
        pairs = zip(children_of(single), children_of(double), strict=True)
        children = [_without_rows(*pair) for pair in pairs]
        return with_children(single, children)
    is_array = isinstance(single, np.ndarray) or _is_dense_tensor(single)
    if is_array and tuple(single.shape) != tuple(double.shape):
        return _without_rows_of_array(single, double)
    if not _are_equal(single, double):
        raise _refusal(single)
    return single


def _without_rows_of_array(single: Any, double: Any) -> Any:
    """Return an array with length 0 in the dimension that has length 1 for one item and 2 for two."""
    shape = list(single.shape)
    for dimension, length in enumerate(shape):
        doubled = list(shape)
        doubled[dimension] = 2 * length
        if length == 1 and doubled == list(double.shape):
            all_before = (slice(None),) * dimension
            index = (*all_before, slice(0))
            return single[index]
    raise _refusal(single)


def _is_dense_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def _are_equal(single: Any, double: Any) -> bool:
    """Return whether a value is the same for one item and for two."""
    if isinstance(single, torch.Tensor):
        return _is_dense_tensor(single) and torch.equal(single, double)
    if isinstance(single, np.ndarray):
        return bool(np.array_equal(single, double))
    is_plain = isinstance(single, (bool, int, float, complex, str, bytes, type(None)))
    return is_plain and single == double


def _refusal(value: Any) -> DataError:
    name = type(value).__name__
    if isinstance(value, torch.Tensor) and not _is_dense_tensor(value):
        layout = str(value.layout).removeprefix("torch.")
        name = f"a tensor of layout {layout}"
    elif isinstance(value, (torch.Tensor, np.ndarray)):
        name = f"{name} of shape {tuple(value.shape)}"
    elif is_nest(value):
        name = f"{name} of form {form_of(value)}"
    return DataError(
        f"DataLoader: expected tensors that grow with the rows, as the last batch leaves replicas without rows, got "
        f"{name} from its collate_fn; use drop_last=True, or return tensors."
    )

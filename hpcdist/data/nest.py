"""Nests of arrays: rows out of batches, batches out of rows, and what a nest looks like."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hpcdist.errors import DataError

#: A nest of arrays: an array, or a tuple, list or dict of nests.
Nest = Any


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of an array; a dimension that varies is None."""

    shape: tuple[int | None, ...]
    dtype: Any


def map_nest(function: Callable[..., Any], nest: Nest, *others: Nest) -> Nest:
    """Return the nest with function(array, ...) in place of every array; other nests have the same form."""
    if isinstance(nest, dict):
        return {key: map_nest(function, nest[key], *(other[key] for other in others)) for key in nest}
    if isinstance(nest, (tuple, list)):
        parts = [map_nest(function, *column) for column in zip(nest, *others, strict=True)]
        return type(nest)(*parts) if hasattr(nest, "_fields") else type(nest)(parts)
    return function(nest, *others)


def leaves(nest: Nest) -> list[Any]:
    """Return the arrays of a nest."""
    found: list[Any] = []
    map_nest(found.append, nest)
    return found


def as_array(value: Any) -> Any:
    """Return a tensor or array as it is, anything else as a numpy array."""
    return value if isinstance(value, (torch.Tensor, np.ndarray)) else np.asarray(value)


def stack(rows: Sequence[Nest]) -> Nest:
    """Return one nest of (n, ...) arrays of n rows, n at least 1.

    Raises:
        DataError: when rows differ in form or shape.
    """

    def join(*values: Any) -> Any:
        if isinstance(values[0], torch.Tensor):
            return torch.stack([torch.as_tensor(value) for value in values])
        return np.stack([np.asarray(value) for value in values])

    try:
        return map_nest(join, *rows)
    except (ValueError, RuntimeError, KeyError, TypeError) as error:
        raise DataError(
            f"batch: expected rows of one form and shape, got {type(error).__name__}: {error}; pad or crop them in map."
        ) from error


def unstack(nest: Nest) -> list[Nest]:
    """Return the rows of a nest of (n, ...) arrays."""
    n_rows = len(leaves(nest)[0])
    return [map_nest(lambda array, row=row: array[row], nest) for row in range(n_rows)]


def no_rows(nest: Nest) -> Nest:
    """Return the nest with (0, ...) arrays in place of (n, ...) arrays."""
    return map_nest(lambda array: array[:0], nest)


def zeros_like(specs: Nest) -> Nest:
    """Return the nest with zeros in place of everything with a shape and a dtype, of numpy or torch."""

    def zeros(spec: Any) -> Any:
        shape = tuple(spec.shape)
        return (
            torch.zeros(shape, dtype=spec.dtype) if isinstance(spec.dtype, torch.dtype) else np.zeros(shape, spec.dtype)
        )

    return map_nest(zeros, specs)


def spec_of(nest: Nest, n_rows: int | None) -> Nest:
    """Return the nest with a TensorSpec in place of every array, whose rows dimension is `n_rows`."""
    return map_nest(lambda array: TensorSpec((n_rows, *array.shape[1:]), array.dtype), nest)


def call_with(function: Callable[..., Any], element: Nest) -> Nest:
    """Return function(element), or function(*element) for a tuple, as tf.data calls mapped functions."""
    if isinstance(element, tuple) and not hasattr(element, "_fields"):
        return function(*element)
    return function(element)


def has_empty_array(values: Iterable[Any]) -> bool:
    """Return whether there is an array with 0 rows in any of the nests."""
    return any(tuple(getattr(leaf, "shape", ()))[:1] == (0,) for value in values for leaf in leaves(value))

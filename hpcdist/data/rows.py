"""Rows and parts of batches: nests of arrays, what they look like, and the functions that are mapped over them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hpcdist.errors import DataError
from hpcdist.nest import Nest, children_of, form_of, is_nest, leaves, map_nest, with_children

Function = Callable[..., Any]


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of an array; a dimension that varies is None."""

    shape: tuple[int | None, ...]
    dtype: Any


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


def padded(rows: Sequence[Nest], shapes: Nest = None, values: Nest = None) -> list[Nest]:
    """Return rows whose arrays are padded at their ends to one shape.

    Args:
        rows: nests of one form.
        shapes: nest of a shape for each array; None or -1 in it for the longest of the rows. None: all of the longest.
        values: nest of what is put there, or one number for all; None: zeros.

    Raises:
        DataError: at an array that is longer than its shape, or has other dimensions.
    """
    first = rows[0]
    if not is_nest(first):
        return _padded_arrays(
            [as_array(row) for row in rows], shapes, 0 if values is None else values
        )
    own_shapes = [None] * len(first) if shapes is None else children_of(shapes)
    own_values = children_of(values) if is_nest(values) else [values] * len(first)
    columns = zip(*(children_of(row) for row in rows), strict=True)
    padded_columns = [
        padded(*column) for column in zip(columns, own_shapes, own_values, strict=True)
    ]
    return [with_children(first, children) for children in zip(*padded_columns, strict=True)]


def _padded_arrays(arrays: list[Any], shape: Sequence[int | None] | None, value: Any) -> list[Any]:
    longest = [max(sizes) for sizes in zip(*(array.shape for array in arrays), strict=True)]
    limits = [None] * len(longest) if shape is None else list(shape)
    sizes = [
        longest_size if size in (None, -1) else size
        for size, longest_size in zip(limits, longest, strict=len(limits) != len(longest))
    ]
    if len(limits) != len(longest) or any(
        size < longest_size for size, longest_size in zip(sizes, longest, strict=True)
    ):
        raise DataError(
            f"padded_batch: expected arrays of at most the shape {tuple(limits)}, got one of {tuple(longest)}; give a "
            f"larger one, or None for the longest."
        )
    targets = []
    for array in arrays:
        target = (
            array.new_full(sizes, value)
            if isinstance(array, torch.Tensor)
            else np.full(sizes, value, array.dtype)
        )
        target[tuple(map(slice, array.shape))] = array
        targets.append(target)
    return targets


def unstack(nest: Nest) -> list[Nest]:
    """Return the rows of a nest of (n, ...) arrays."""
    return _rows_of(nest, n_rows_of(nest))


def _rows_of(nest: Nest, n_rows: int) -> list[Nest]:
    if not isinstance(nest, (dict, tuple, list)):
        return list(nest)
    columns = [_rows_of(child, n_rows) for child in children_of(nest)]
    rows = list(zip(*columns, strict=True)) if columns else [()] * n_rows
    return rows if type(nest) is tuple else [with_children(nest, row) for row in rows]


def n_rows_of(part: Nest) -> int:
    """Return the number of rows of a nest of (n, ...) arrays."""
    return len(leaves(part)[0])


def no_rows(part: Nest) -> Nest:
    """Return the nest with (0, ...) arrays in place of (n, ...) arrays."""
    return map_nest(lambda array: array[:0], part)


def zeros_like(specs: Nest) -> Nest:
    """Return the nest with zeros in place of everything that has a shape and a dtype of numpy or torch."""

    def zeros(spec: Any) -> Any:
        make = torch.zeros if isinstance(spec.dtype, torch.dtype) else np.zeros
        return make([size or 0 for size in spec.shape or ()], dtype=spec.dtype)

    return map_nest(zeros, specs)


def fitted(specs: Nest, row: Nest) -> Nest:
    """Return a row of a generator in the form, the shapes and the dtypes that its signature gives.

    Raises:
        DataError: when it has another form or shape, or a dtype that does not fit into the signature's.
    """
    if not is_nest(specs):
        return _fitted_array(specs, row)
    parts = [children_of(nest) if is_nest(nest) else [] for nest in (specs, row)]
    are_dicts = isinstance(specs, dict), isinstance(row, dict)
    if (
        are_dicts[0] != are_dicts[1]
        or len(parts[0]) != len(parts[1])
        or (are_dicts[0] and specs.keys() != row.keys())
    ):
        raise _misfit(f"rows of the form {form_of(specs)}", f"one of the form {form_of(row)}")
    return with_children(specs, [fitted(spec, child) for spec, child in zip(*parts, strict=True)])


def _fitted_array(spec: Any, value: Any) -> Any:
    if isinstance(spec.dtype, torch.dtype):
        tensor = torch.as_tensor(value)
        _check_shape(spec, tensor.shape)
        converted: Any = tensor.to(spec.dtype)
        is_kept = torch.can_cast(tensor.dtype, spec.dtype) and _is_kept(
            tensor, converted, spec.dtype.is_floating_point
        )
        actual_dtype: Any = tensor.dtype
    else:
        array = np.asarray(value)
        _check_shape(spec, array.shape)
        kinds = array.dtype.kind + np.dtype(spec.dtype).kind
        with np.errstate(over="ignore"):  # found below
            converted = array.astype(spec.dtype) if array.dtype != spec.dtype else array
        is_kind = np.can_cast(array.dtype, spec.dtype, "same_kind") or (
            kinds[0] in "biu" and kinds[1] in "iu"
        )
        is_kept = is_kind and (kinds[1] not in "iuf" or _is_kept(array, converted, kinds[1] == "f"))
        actual_dtype = array.dtype
    if not is_kept:
        raise _misfit(
            f"arrays of {spec.dtype}", f"one of {actual_dtype} that does not fit: {str(value)[:60]}"
        )
    return converted


def _is_kept(original: Any, converted: Any, is_float: bool) -> bool:
    """Return whether whole numbers are the same after a conversion, and floats no less finite."""
    if converted.dtype == original.dtype:
        return True
    library: Any = torch if isinstance(original, torch.Tensor) else np
    return bool(
        (library.isfinite(converted) == library.isfinite(original)).all()
        if is_float
        else (converted == original).all()
    )


def _check_shape(spec: Any, actual_shape: Sequence[int]) -> None:
    shape = tuple(actual_shape) if spec.shape is None else tuple(spec.shape)
    if len(shape) != len(actual_shape) or any(
        size not in (None, actual_size)
        for size, actual_size in zip(shape, actual_shape, strict=True)
    ):
        raise _misfit(f"arrays of shape {shape}", f"one of shape {tuple(actual_shape)}")


def _misfit(expected: str, actual: str) -> DataError:
    return DataError(
        f"from_generator: expected {expected}, as output_signature says, got {actual}; correct the signature, or what "
        f"the generator yields."
    )


def spec_of(part: Nest, n_rows: int | None) -> Nest:
    """Return the nest with a TensorSpec in place of every (n, ...) array; its first dimension is `n_rows`."""
    return map_nest(lambda array: TensorSpec((n_rows, *array.shape[1:]), array.dtype), part)


def apply(functions: tuple[Function, ...], element: Nest) -> Nest:
    """Return a row or a part with functions applied one after another; as in tf.data, a tuple becomes the arguments."""
    for function in functions:
        is_arguments = isinstance(element, tuple) and not hasattr(element, "_fields")
        element = function(*element) if is_arguments else function(element)
    return element


def apply_to_part(functions: tuple[Function, ...], part: Nest) -> Nest:
    """Return a part with the functions of whole parts applied; an error says when a part had no rows."""
    for function in functions:
        with explaining_empty_parts([part]):
            part = apply((function,), part)
    return part


@contextmanager
def explaining_empty_parts(values: Iterable[Nest]) -> Iterator[None]:
    """Add a note to an error in the block if an array among the values has 0 rows: that is often the cause."""
    try:
        yield
    except Exception as error:
        # the error keeps its class, as callers may catch it; Python 3.10 has no notes
        if _has_empty_array(values) and hasattr(error, "add_note"):
            error.add_note(
                "hpcdist: this replica's part of the global batch has 0 rows, because the last batch was too short for "
                "all replicas; use batch(..., drop_remainder=True), or a step that accepts 0 rows."
            )
        raise


def _has_empty_array(values: Iterable[Nest]) -> bool:
    return any(
        tuple(getattr(leaf, "shape", ()))[:1] == (0,) for value in values for leaf in leaves(value)
    )

"""Rows and parts of batches: nests of arrays, their specifications, and the functions that are mapped over them."""

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
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return value
    return np.asarray(value)


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
        shapes: nest of a shape for each array, in which None or -1 is the size of the longest array. None makes all
            arrays as long as the longest one.
        values: nest of the numbers that fill the arrays, or one number for all. None fills them with zeros.

    Raises:
        DataError: at an array that is longer than its shape, or has another number of dimensions.
    """
    first = rows[0]
    if not is_nest(first):
        arrays = [as_array(row) for row in rows]
        return _padded_arrays(arrays, shapes, 0 if values is None else values)
    child_shapes: list[Nest] = [None] * len(first)
    if shapes is not None:
        child_shapes = children_of(shapes)
    child_values: list[Nest] = [values] * len(first)
    if is_nest(values):
        child_values = children_of(values)
    columns = zip(*map(children_of, rows), strict=True)
    padded_columns: list[list[Nest]] = []
    for column, shape, value in zip(columns, child_shapes, child_values, strict=True):
        padded_columns.append(padded(column, shape, value))
    return [with_children(first, children) for children in zip(*padded_columns, strict=True)]


def _padded_arrays(
    arrays: list[Any],
    shape: Sequence[int | None] | None,
    value: Any,
) -> list[Any]:
    """Return arrays padded to one shape; see `padded`."""
    shapes = [array.shape for array in arrays]
    limits: list[int | None] = [None] * len(shapes[0])
    if shape is not None:
        limits = list(shape)
    numbers_of_dimensions = {len(array_shape) for array_shape in shapes}
    if numbers_of_dimensions != {len(limits)}:
        raise DataError(
            f"padded_batch: expected arrays of {len(limits)} dimensions, got {sorted(numbers_of_dimensions)}; give "
            f"padded_shapes with one size for each dimension."
        )
    longest = [max(sizes) for sizes in zip(*shapes, strict=True)]
    sizes: list[int] = []
    for limit, longest_size in zip(limits, longest, strict=True):
        size = longest_size
        if limit is not None and limit != -1:
            size = limit
        sizes.append(size)
    if any(size < longest_size for size, longest_size in zip(sizes, longest, strict=True)):
        raise DataError(
            f"padded_batch: expected arrays of at most the shape {tuple(limits)}, got one of {tuple(longest)}; give a "
            f"larger one, or None for the longest."
        )
    targets: list[Any] = []
    for array in arrays:
        if isinstance(array, torch.Tensor):
            target: Any = array.new_full(sizes, value)
        else:
            target = np.full(sizes, value, array.dtype)
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
    rows: list[Any] = [()] * n_rows
    if columns:
        rows = list(zip(*columns, strict=True))
    if type(nest) is tuple:
        return rows
    return [with_children(nest, row) for row in rows]


def n_rows_of(part: Nest) -> int:
    """Return the number of rows of a nest of (n, ...) arrays."""
    return len(leaves(part)[0])


def no_rows(part: Nest) -> Nest:
    """Return the nest with (0, ...) arrays in place of (n, ...) arrays."""
    return map_nest(lambda array: array[:0], part)


def zeros_like(specs: Nest) -> Nest:
    """Return the nest with zeros in place of everything that has a shape and a dtype of numpy or torch."""

    def zeros(spec: Any) -> Any:
        shape = [size or 0 for size in spec.shape or ()]
        make = torch.zeros if isinstance(spec.dtype, torch.dtype) else np.zeros
        return make(shape, dtype=spec.dtype)

    return map_nest(zeros, specs)


def fitted(specs: Nest, row: Nest) -> Nest:
    """Return a row of a generator in the form, the shapes and the dtypes that its signature gives.

    Raises:
        DataError: when it has another form or shape, or a dtype that does not fit into the signature's.
    """
    if not is_nest(specs):
        return _fitted_array(specs, row)
    child_specs = children_of(specs)
    children = children_of(row) if is_nest(row) else []
    has_form = isinstance(specs, dict) == isinstance(row, dict)
    if has_form and isinstance(specs, dict):
        has_form = specs.keys() == row.keys()
    if not has_form or len(child_specs) != len(children):
        raise _misfit(f"rows of the form {form_of(specs)}", f"one of the form {form_of(row)}")
    fitted_children: list[Nest] = []
    for spec, child in zip(child_specs, children, strict=True):
        fitted_children.append(fitted(spec, child))
    return with_children(specs, fitted_children)


def _fitted_array(spec: Any, value: Any) -> Any:
    """Return a leaf of a row in the dtype that its signature gives."""
    if isinstance(spec.dtype, torch.dtype):
        tensor = torch.as_tensor(value)
        _check_shape(spec, tensor.shape)
        converted: Any = tensor.to(spec.dtype)
        is_float = spec.dtype.is_floating_point
        has_kind = torch.can_cast(tensor.dtype, spec.dtype)
        is_kept = has_kind and _is_kept(tensor, converted, is_float)
        actual_dtype: Any = tensor.dtype
    else:
        array = np.asarray(value)
        _check_shape(spec, array.shape)
        kind = array.dtype.kind
        spec_kind = np.dtype(spec.dtype).kind
        converted = array
        if array.dtype != spec.dtype:
            with np.errstate(over="ignore"):  # _is_kept finds what has overflowed
                converted = array.astype(spec.dtype)
        are_integers = kind in "biu" and spec_kind in "iu"
        has_kind = are_integers or np.can_cast(array.dtype, spec.dtype, "same_kind")
        is_kept = has_kind
        if has_kind and spec_kind in "iuf":
            is_kept = _is_kept(array, converted, spec_kind == "f")
        actual_dtype = array.dtype
    if not is_kept:
        beginning = str(value)[:60]
        raise _misfit(
            f"arrays of {spec.dtype}", f"one of {actual_dtype} that does not fit: {beginning}"
        )
    return converted


def _is_kept(original: Any, converted: Any, is_float: bool) -> bool:
    """Return whether whole numbers are the same after a conversion, and floats no less finite."""
    if converted.dtype == original.dtype:
        return True
    if not is_float:
        return bool((converted == original).all())
    library: Any = torch if isinstance(original, torch.Tensor) else np
    are_finite = library.isfinite(converted) == library.isfinite(original)
    return bool(are_finite.all())


def _check_shape(spec: Any, actual_shape: Sequence[int]) -> None:
    """Raise DataError unless the shape of an array is as its signature says."""
    if spec.shape is None:
        return
    shape = tuple(spec.shape)
    has_shape = len(shape) == len(actual_shape)
    if has_shape:
        for size, actual_size in zip(shape, actual_shape, strict=True):
            has_shape = has_shape and size in (None, actual_size)
    if not has_shape:
        raise _misfit(f"arrays of shape {shape}", f"one of shape {tuple(actual_shape)}")


def _misfit(expected: str, actual: str) -> DataError:
    return DataError(
        f"from_generator: expected {expected}, as output_signature says, got {actual}; correct the signature, or what "
        f"the generator yields."
    )


def spec_of(part: Nest, n_rows: int | None) -> Nest:
    """Return the nest with a TensorSpec in place of every (n, ...) array; its first dimension is `n_rows`."""

    def array_spec(array: Any) -> TensorSpec:
        shape = (n_rows, *array.shape[1:])
        return TensorSpec(shape, array.dtype)

    return map_nest(array_spec, part)


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
    for value in values:
        for leaf in leaves(value):
            shape = tuple(getattr(leaf, "shape", ()))
            if shape[:1] == (0,):
                return True
    return False

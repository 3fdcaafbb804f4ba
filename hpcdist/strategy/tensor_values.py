"""What users hand to variables, as tensors; and totals dealt to replicas."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpcdist.errors import UsageError


def as_tensor(value: Any, dtype: Any = None) -> Tensor:
    """Return a value as a tensor that needs no gradient; a variable is read.

    Args:
        value: torch tensor, numpy array, number, nested list of numbers, or variable.
        dtype: a torch or numpy dtype, or its name; default: of the value.
    """
    if hasattr(value, "read_value"):
        value = value.read_value()
    wanted = dtype if dtype is None or isinstance(dtype, torch.dtype) else getattr(torch, np.dtype(dtype).name)
    try:
        return torch.as_tensor(value, dtype=wanted).detach()
    except (TypeError, ValueError, RuntimeError):
        raise UsageError(
            f"Variable: expected a tensor, an array or numbers, got {type(value).__name__}; convert it."
        ) from None


def holds(dtype: torch.dtype, number: complex) -> bool:
    """Return whether a Python number becomes this dtype without losing its kind."""
    return torch.can_cast(torch.as_tensor(number).dtype, dtype)


def indices_and_rows(method: str, delta: Any, whole: Tensor) -> tuple[Tensor, Tensor]:
    """Return (indices,) int64 and (indices, ...) rows for a scatter into `whole`, of its dtype and on its device.

    Args:
        method: for messages.
        delta: has `indices` and `values`, or is the pair.
        whole: (rows, ...).
    """
    is_pair = isinstance(delta, (tuple, list)) and len(delta) == 2
    if not is_pair and not (hasattr(delta, "indices") and hasattr(delta, "values")):
        raise UsageError(
            f"{method}: expected indices and values, got {type(delta).__name__}; pass the pair (indices, values)."
        )
    indices, rows = (as_tensor(part) for part in (delta if is_pair else (delta.indices, delta.values)))
    if indices.dim() != 1 or rows.shape != indices.shape + whole.shape[1:]:
        raise UsageError(
            f"{method}: expected one index and one row of {tuple(whole.shape[1:])} each, got indices of "
            f"{tuple(indices.shape)} and rows of {tuple(rows.shape)}; give them alike."
        )
    return indices.to(whole.device, torch.int64), rows.to(whole.device, whole.dtype)


def divided(total: Tensor, n_parts: int) -> list[Tensor]:
    """Return what each replica holds of a total: equal parts; of whole numbers, the first ones hold the remainder.

    >>> [int(part) for part in divided(torch.tensor(7), 3)]
    [3, 2, 2]
    """
    if total.dtype.is_floating_point or total.dtype.is_complex:
        return [total / n_parts] * n_parts
    part = torch.div(total, n_parts, rounding_mode="floor")
    rest = total - part * n_parts
    return [part + (number < rest).to(total.dtype) for number in range(n_parts)]


def dealt(rows: Tensor, n_replicas: int, aggregation: str) -> list[Tensor]:
    """Return one row for each replica that aggregate to what the rows given aggregate to.

    >>> [float(row) for row in dealt(torch.tensor([1.0, 2.0]), 3, "SUM")]
    [3.0, 0.0, 0.0]
    """
    if aggregation == "SUM":  # not divided: thirds would not add up to the bit
        return [rows.sum(0, dtype=rows.dtype)] + [torch.zeros_like(rows[0])] * (n_replicas - 1)
    is_mean = aggregation == "MEAN" and rows.dtype.is_floating_point
    return [rows.mean(0) if is_mean else rows[0]] * n_replicas

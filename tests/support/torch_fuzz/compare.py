"""Compares what a program leaves on the ranks with what it leaves in plain torch.

float64: differences up to 1e-9 of the largest value of a tensor, as sums are taken in another order only. float32: up
to 2e-4 of the largest value, at least 1, as in `tests/mpi/test_equal_to_one_rank.py`: rounding of 1e-7 is magnified by
optimizers that divide by small gradients. A program in which plain torch alone differs by a tenth of that, when it
takes the rows of each batch in reverse order, or features that differ in the last bit, or computes in float64, is
unstable: it says nothing. Ranks are compared bit by bit.
"""

import hashlib
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor

State = dict[str, Any]
#: Largest difference, relative to the largest value of a tensor but at least to a floor.
TOLERANCES = {"float64": (1e-9, 1e-2), "float32": (2e-4, 1.0)}


def plain_state(state: State) -> State:
    """Return a state whose tensors are arrays, which MPI can send."""
    return {key: value.detach().cpu().numpy() if isinstance(value, Tensor) else value for key, value in state.items()}


def digest(state: State) -> str:
    """Return a digest of all bits of a state."""
    hasher = hashlib.sha256()
    for key in sorted(state):
        value = state[key]
        hasher.update(f"{key} {None if value is None else np.shape(value)}".encode())
        hasher.update(b"" if value is None else np.ascontiguousarray(value).tobytes())
    return hasher.hexdigest()


def of_all_ranks(state: State) -> State:
    """Return what all ranks hold where the chief alone steps: some optimizers write into gradients, too."""
    return {key: value for key, value in state.items() if not key.startswith("optimizer") and not key.endswith(".grad")}


def unequal_names(states: list[State]) -> list[str]:
    """Return the names of what is not the same on all ranks, bit by bit."""
    names = sorted(set(itertools.chain.from_iterable(states)))
    different_names = []
    for name in names:
        digests = {digest({name: state.get(name)}) for state in states}
        if len(digests) > 1:
            different_names.append(name)
    return different_names


def largest_difference(actual: State, expected: State, dtype: str) -> tuple[float, str]:
    """Return the largest difference in units of the tolerance, and where it is; infinite where one lacks something."""
    worst = 0.0
    where = ""
    for name in sorted({*actual, *expected}):
        ratio = _ratio(actual.get(name), expected.get(name), *TOLERANCES[dtype])
        if not ratio <= worst:
            worst = ratio
            where = name
    return worst, where


def _ratio(actual: Any, expected: Any, tolerance: float, floor: float) -> float:
    if actual is None or expected is None:
        if actual is expected:
            return 0.0
        return float("inf")
    actual_array = np.asarray(actual, dtype=np.float64)
    expected_array = np.asarray(expected, dtype=np.float64)
    if actual_array.shape != expected_array.shape:
        return float("inf")
    if actual_array.size == 0 or np.array_equal(actual_array, expected_array, equal_nan=True):
        return 0.0
    scale = max(float(np.abs(expected_array).max()), floor)
    return float(np.abs(actual_array - expected_array).max()) / (tolerance * scale)


def judge(
    states: list[State], expected: State, dtype: str, expect_otherwise: Callable[[], list[State]]
) -> dict[str, Any]:
    """Return the outcome of a program that ended on all ranks.

    Args:
        states: of the ranks.
        expected: of plain torch.
        dtype: of the program.
        expect_otherwise: returns what plain torch leaves when it rounds otherwise.
    """
    different = unequal_names(states)
    if different:
        values = [str(state.get(different[0]))[:80] for state in states]
        return {"outcome": "ranks differ", "where": different[:4], "values": values}
    ratio, where = largest_difference(states[0], expected, dtype)
    if ratio <= 1:
        return {"outcome": "equal", "ratio": ratio}
    rounding = [largest_difference(state, expected, dtype)[0] for state in expect_otherwise()]
    if all(rounding_ratio <= 0.1 for rounding_ratio in rounding):
        kind = "differs"
    else:
        kind = "unstable"
    values = [str(state.get(where))[:80] for state in (states[0], expected)]
    return {"outcome": kind, "where": where, "ratio": ratio, "rounding": rounding, "values": values}

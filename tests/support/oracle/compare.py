"""Compares hpcdist's answer to a step with TensorFlow's, on one rank: the parts of its own replicas."""

from typing import Any

import numpy as np
from cases import Error, PerReplica

from hpcdist.errors import DataError, UsageError

#: Where an order of sums is not the same, and for means, which TensorFlow's graphs multiply by the inverse.
TOLERANCE = {"float32": 1e-5, "float64": 1e-6}
#: What hpcdist raises where TensorFlow raises; nothing else will do.
ERRORS: dict[str, tuple[type[Exception], ...]] = {
    "ValueError": (UsageError, DataError),
    "InvalidArgumentError": (UsageError, DataError),
    "TypeError": (TypeError,),
    "RuntimeError": (RuntimeError,),
    "NotImplementedError": (NotImplementedError,),
    "StopIteration": (StopIteration,),
    "OutOfRangeError": (StopIteration,),
}


def difference(found: Any, expected: Any, own: range, is_exact: bool) -> str:
    """Return how an answer differs from TensorFlow's on the replicas `own`; empty text when it does not."""
    if (found is None) != (expected is None):
        return f"skipped: {found is None}; TensorFlow: {expected is None}"
    if found is None:
        return ""
    if found["error"] or expected["error"]:
        text = error_difference(found.get("raised"), found["error"], expected["error"])
    else:
        text = value_difference(found["result"], expected["result"], own, is_exact)
    for name, copies in (expected["copies"] or {}).items():
        if not text and (wrong := value_difference(found["copies"].get(name), copies, own, False)):
            text = f"copies of {name}: {wrong}"
    return text


def error_difference(raised: Exception | None, found: Error | None, expected: Error | None) -> str:
    """Return how an error differs from TensorFlow's; empty text when it is of the class that stands for it."""
    if expected is None or found is None:
        return f"{found or 'no error'}; TensorFlow: {expected or 'no error'}"
    is_of_dtypes = expected.type == "TypeError" and "that don't all match" in expected.message
    allowed = (UsageError,) if is_of_dtypes else ERRORS.get(expected.type, ())
    return "" if type(raised) in allowed else f"{found}; TensorFlow: {expected}"


def value_difference(found: Any, expected: Any, own: range, is_exact: bool) -> str:
    if isinstance(expected, PerReplica) or isinstance(found, PerReplica):
        return replicas_difference(found, expected, own, is_exact)
    if isinstance(expected, (list, tuple, dict)) or isinstance(found, (list, tuple, dict)):
        return nest_difference(found, expected, own, is_exact)
    if expected is None or found is None or isinstance(expected, str):
        is_same = type(found) is type(expected) and found == expected
        return "" if is_same else f"{found!r}; TensorFlow: {expected!r}"
    return array_difference(found, expected, is_exact)


def replicas_difference(found: Any, expected: Any, own: range, is_exact: bool) -> str:
    """Compare what each replica has; a plain value stands for that of every one."""
    values = [expected.values[one] for one in own] if isinstance(expected, PerReplica) else [expected] * len(own)
    if isinstance(found, tuple) and not isinstance(values[0], tuple):  # local results of the only replica of a rank
        found = PerReplica(found)
    if isinstance(expected, tuple) and len(expected) == len(own) == 1:  # of what is plain in TensorFlow
        values = list(expected)
    given = found.values if isinstance(found, PerReplica) else [found] * len(own)
    if len(given) != len(values):
        return f"{len(given)} values for {len(values)} replicas"
    texts = [value_difference(*both, own, is_exact) for both in zip(given, values, strict=True)]
    return next((f"replica {own[i]}: {text}" for i, text in enumerate(texts) if text), "")


def nest_difference(found: Any, expected: Any, own: range, is_exact: bool) -> str:
    if type(found) is not type(expected) or len(found) != len(expected):
        return f"{kind_of(found)}; TensorFlow: {kind_of(expected)}"
    if isinstance(expected, dict) and set(found) != set(expected):
        return f"keys {sorted(found)}; TensorFlow: {sorted(expected)}"
    keys = list(expected) if isinstance(expected, dict) else range(len(expected))
    texts = {key: value_difference(found[key], expected[key], own, is_exact) for key in keys}
    return next((f"[{key!r}] {text}" for key, text in texts.items() if text), "")


def kind_of(value: Any) -> str:
    return f"{type(value).__name__} of {len(value)}" if isinstance(value, (list, tuple, dict)) else repr(value)


def array_difference(found: Any, expected: Any, is_exact: bool) -> str:
    one = np.asarray(found)
    other = np.asarray(expected)
    text = f"{one.dtype} {one.tolist()}; TensorFlow: {other.dtype} {other.tolist()}"
    if one.shape != other.shape:
        return f"shape {one.shape}, {other.shape}: {text}"
    if isinstance(expected, np.ndarray) and isinstance(found, np.ndarray) and one.dtype != other.dtype:
        return f"dtype: {text}"
    if other.dtype.kind not in "fc" or one.dtype.kind not in "fc":
        return "" if np.array_equal(one, other) else text
    if is_exact:
        return "" if np.array_equal(one, other, equal_nan=True) else f"bits: {text}"
    tolerance = TOLERANCE[str(other.dtype)]
    scale = tolerance * max(1.0, float(np.abs(other[np.isfinite(other)]).max(initial=0)))
    return "" if np.allclose(one, other, rtol=tolerance, atol=scale, equal_nan=True) else text

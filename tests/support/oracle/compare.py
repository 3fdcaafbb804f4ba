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


def difference(answer: Any, expected: Any, local_replicas: range, is_exact: bool) -> str:
    """Return how an answer differs from TensorFlow's on the replicas `local_replicas`; empty text when it does not."""
    if (answer is None) != (expected is None):
        return f"skipped: {answer is None}; TensorFlow: {expected is None}"
    if answer is None:
        return ""
    if answer["error"] or expected["error"]:
        text = error_difference(answer.get("raised"), answer["error"], expected["error"])
    else:
        text = value_difference(answer["result"], expected["result"], local_replicas, is_exact)
    for name, copies in (expected["copies"] or {}).items():
        if not text and (wrong := value_difference(answer["copies"].get(name), copies, local_replicas, False)):
            text = f"copies of {name}: {wrong}"
    return text


def error_difference(raised: Exception | None, actual_error: Error | None, expected: Error | None) -> str:
    """Return how an error differs from TensorFlow's; empty text when it is of the class that stands for it."""
    if expected is None or actual_error is None:
        return f"{actual_error or 'no error'}; TensorFlow: {expected or 'no error'}"
    is_of_dtypes = expected.type == "TypeError" and "that don't all match" in expected.message
    if is_of_dtypes:
        allowed = (UsageError,)
    else:
        allowed = ERRORS.get(expected.type, ())
    if type(raised) in allowed:
        return ""
    return f"{actual_error}; TensorFlow: {expected}"


def value_difference(actual: Any, expected: Any, local_replicas: range, is_exact: bool) -> str:
    if isinstance(expected, PerReplica) or isinstance(actual, PerReplica):
        return replicas_difference(actual, expected, local_replicas, is_exact)
    if isinstance(expected, (list, tuple, dict)) or isinstance(actual, (list, tuple, dict)):
        return nest_difference(actual, expected, local_replicas, is_exact)
    if expected is None or actual is None or isinstance(expected, str):
        is_same = type(actual) is type(expected) and actual == expected
        if is_same:
            return ""
        return f"{actual!r}; TensorFlow: {expected!r}"
    return array_difference(actual, expected, is_exact)


def replicas_difference(actual: Any, expected: Any, local_replicas: range, is_exact: bool) -> str:
    """Compare what each replica has; a plain value stands for that of every one."""
    if isinstance(expected, PerReplica):
        values = [expected.values[replica] for replica in local_replicas]
    else:
        values = [expected] * len(local_replicas)
    if isinstance(actual, tuple) and not isinstance(values[0], tuple):  # local results of the only replica of a rank
        actual = PerReplica(actual)
    if isinstance(expected, tuple) and len(expected) == len(local_replicas) == 1:  # of what is plain in TensorFlow
        values = list(expected)
    if isinstance(actual, PerReplica):
        actual_values = actual.values
    else:
        actual_values = [actual] * len(local_replicas)
    if len(actual_values) != len(values):
        return f"{len(actual_values)} values for {len(values)} replicas"
    texts = [value_difference(*pair, local_replicas, is_exact) for pair in zip(actual_values, values, strict=True)]
    return next((f"replica {local_replicas[i]}: {text}" for i, text in enumerate(texts) if text), "")


def nest_difference(actual: Any, expected: Any, local_replicas: range, is_exact: bool) -> str:
    if type(actual) is not type(expected) or len(actual) != len(expected):
        return f"{kind_of(actual)}; TensorFlow: {kind_of(expected)}"
    if isinstance(expected, dict) and set(actual) != set(expected):
        return f"keys {sorted(actual)}; TensorFlow: {sorted(expected)}"
    if isinstance(expected, dict):
        keys = list(expected)
    else:
        keys = range(len(expected))
    texts = {key: value_difference(actual[key], expected[key], local_replicas, is_exact) for key in keys}
    return next((f"[{key!r}] {text}" for key, text in texts.items() if text), "")


def kind_of(value: Any) -> str:
    if isinstance(value, (list, tuple, dict)):
        return f"{type(value).__name__} of {len(value)}"
    return repr(value)


def array_difference(actual: Any, expected: Any, is_exact: bool) -> str:
    actual_array = np.asarray(actual)
    expected_array = np.asarray(expected)
    text = f"{actual_array.dtype} {actual_array.tolist()}; TensorFlow: {expected_array.dtype} {expected_array.tolist()}"
    if actual_array.shape != expected_array.shape:
        return f"shape {actual_array.shape}, {expected_array.shape}: {text}"
    if (
        isinstance(expected, np.ndarray)
        and isinstance(actual, np.ndarray)
        and actual_array.dtype != expected_array.dtype
    ):
        return f"dtype: {text}"
    if expected_array.dtype.kind not in "fc" or actual_array.dtype.kind not in "fc":
        if np.array_equal(actual_array, expected_array):
            return ""
        return text
    if is_exact:
        if np.array_equal(actual_array, expected_array, equal_nan=True):
            return ""
        return f"bits: {text}"
    tolerance = TOLERANCE[str(expected_array.dtype)]
    scale = tolerance * max(1.0, float(np.abs(expected_array[np.isfinite(expected_array)]).max(initial=0)))
    if np.allclose(actual_array, expected_array, rtol=tolerance, atol=scale, equal_nan=True):
        return ""
    return text

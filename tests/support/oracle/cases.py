"""Cases that TensorFlow has answered: what tf.distribute returns or raises for given inputs on N replicas.

`make_cases.py` records them in `cases.json.gz` with `tf.distribute.MirroredStrategy` over N logical CPUs; `cases()`
reads them back. No TensorFlow is needed here.

A value inside `arguments` and `expected` is one of: None, bool, int, float, str; a numpy array, which stands for a
tensor (shape () for a scalar); a list, tuple or dict of values; `PerReplica(values)`, one value per replica in the
order of the replica ids, for what is distributed; `Error(type, message)`. What is not PerReplica is the same for all.

Case.kind and its `arguments` -> `expected` (None where `error` is set). Every reduce_op is "ReduceOp.SUM" or
"ReduceOp.MEAN" for the member of the enumeration; any other text is passed as that string.

reduce: strategy.reduce(reduce_op, value, axis). value: PerReplica of tensors, or a plain tensor or Python number.
    in_function: the call was made inside tf.function; with False it was eager, where TensorFlow refuses a list as
    axis because it is unhashable. -> array.
gather: strategy.gather(value, axis) -> array.
all_reduce: ReplicaContext.all_reduce(reduce_op, value) inside strategy.run. value: a nest whose leaves are
    PerReplica, each replica's part. -> the same nest with what each replica got.
all_gather: ReplicaContext.all_gather(value, axis) inside strategy.run; value and result as for all_reduce.
    one_device (also in gather and all_reduce): the strategy had cross_device_ops=ReductionToOneDevice(), because
    TensorFlow's default, collectives, hangs or fails for good on such values. ReductionToOneDevice takes a negative
    axis, which collectives refuse, and with one replica it looks at neither axis nor rank.
split: what a dataset of row ids 0..rows-1 becomes: Dataset.range(rows).repeat(repeat_rows).batch(batch_size,
    drop_remainder).repeat(repeat_batches), distributed by experimental_distribute_dataset. -> list over the steps of
    a list over the replicas of a list of row ids.
per_replica_batch_size: InputContext.get_per_replica_batch_size(global_batch_size) -> int.
average_loss: tf.nn.compute_average_loss(per_example_loss, sample_weight, global_batch_size). context: "replica" (inside
    strategy.run), "cross" (inside strategy.scope) or "default" (no strategy). -> PerReplica of scalars in "replica",
    otherwise one scalar.
regularization_loss: tf.nn.scale_regularization_loss(regularization_loss); context and result as for average_loss.
variable: tf.Variable(initial_value, trainable=trainable, synchronization=..., aggregation=...) made in the strategy's
    scope, synchronization and aggregation by the names of the enumerations' members, trainable None, True or False;
    then `actions`, a list of dicts:
        method: "read_value", "assign", "assign_add", "assign_sub", or "scatter_add", "scatter_update" whose value is
            an IndexedSlices(value, indices).
        context: "replica", "cross" (inside the scope) or "default" (after the scope).
        value: PerReplica of tensors, a plain tensor or a Python number; None for read_value.
        indices: a plain tensor for the scatter methods, otherwise None.
    -> a list with one dict per action. All actions run, also after one that failed:
        result: of read_value, PerReplica in replica context, otherwise an array; None for other methods.
        error: Error or None.
        copies: list of arrays, each replica's copy after the action.
    Case.error is set when the construction of the variable failed.
"""

import base64
import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

PATH = Path(__file__).with_name("cases.json.gz")


@dataclass(frozen=True)
class PerReplica:
    """One value for each replica, by replica id."""

    values: tuple


@dataclass(frozen=True)
class Error:
    """An exception: the name of its class and the start of its message, at most 200 characters on one line.

    A message that came through several layers is the innermost one, without the names of graph nodes.
    """

    type: str
    message: str


@dataclass(frozen=True)
class Case:
    """One call and its outcome: see the module's docstring for the fields of each kind.

    number: position in the file, a stable name for a test.
    n_replicas: the strategy's num_replicas_in_sync.
    expected: what TensorFlow returned, bit for bit and with its dtype.
    error: what it raised instead, or None.
    exact: whoever sums in any order and then divides once gets the same bits: integers, or floats that are small
        multiples of 1/8. Where it is False, results may differ by rounding.
    """

    number: int
    kind: str
    n_replicas: int
    arguments: dict[str, Any]
    expected: Any
    error: Error | None
    exact: bool


def cases(kind: str | None = None) -> Iterator[Case]:
    """Yield the recorded cases, all or those of one kind."""
    for number, record in enumerate(read_file()["cases"]):
        if kind in (None, record["kind"]):
            yield Case(number, **{name: decode(value) for name, value in record.items()})


def read_file() -> dict[str, Any]:
    """Return the file's content: tensorflow (its version), seed, and cases, which are encoded."""
    with gzip.open(PATH, "rt") as file:
        return json.load(file)


def write_file(tensorflow: str, seed: int, records: list[dict[str, Any]]) -> None:
    """Write encoded cases; the same cases always give the same bytes."""
    text = json.dumps({"tensorflow": tensorflow, "seed": seed, "cases": records}, separators=(",", ":"))
    PATH.write_bytes(gzip.compress(text.encode(), 9, mtime=0))


def encode(value: Any) -> Any:
    """Return what JSON can hold: an object with one key, the tag, for each type that JSON does not have."""
    match value:
        case np.ndarray():
            return {"array": [value.dtype.str, list(value.shape), base64.b64encode(value.tobytes()).decode()]}
        case None | bool() | int() | str():
            return value
        case float():
            return {"float": value.hex()}
        case PerReplica():
            return {"per_replica": encode(list(value.values))}
        case Error():
            return {"error": [value.type, value.message]}
        case tuple():
            return {"tuple": encode(list(value))}
        case list():
            return list(map(encode, value))
        case dict():
            return {"dict": {name: encode(item) for name, item in value.items()}}
    raise TypeError(f"encode: expected a value of the kinds listed in cases.py, got {type(value).__name__}")


def decode(value: Any) -> Any:
    """Undo `encode`."""
    if isinstance(value, list):
        return list(map(decode, value))
    if not isinstance(value, dict):
        return value
    ((tag, content),) = value.items()
    return _DECODERS[tag](content)


def _decode_array(content: list[Any]) -> np.ndarray:
    dtype, shape, data = content
    return np.frombuffer(base64.b64decode(data), dtype).reshape(shape).copy()


_DECODERS = {
    "float": float.fromhex,
    "array": _decode_array,
    "per_replica": lambda content: PerReplica(tuple(decode(content))),
    "error": lambda content: Error(*content),
    "tuple": lambda content: tuple(decode(content)),
    "dict": lambda content: {name: decode(item) for name, item in content.items()},
}

"""Programs: sequences of calls of tf.distribute that are pure data, so that TensorFlow and hpcdist run the same ones.

A program is {"number", "n_replicas", "one_device", "ranks", "steps"}. `one_device`: TensorFlow's strategy has
ReductionToOneDevice, as its collectives hang on a step of the program. `ranks`: None, or the only number of ranks on
which hpcdist's answer is comparable. A step is {"call": ..., "out": register or None, ...}; values are those of
cases.py. A reference is the text of a register, with the path into its nest: "r3", "r4.x.0". A nest of references is a
tuple, list or dict of them. `exact`: floats are compared bit for bit.

Steps of the main program, in cross-replica context unless they say otherwise:

values: experimental_distribute_values_from_function, `value` is a nest of PerReplica. constant: a plain `value`.
reduce: `op`, `value` (a nest of references), `axis`. gather: `value`, `axis`. local_results: `value`.
variable: `options` of tf.Variable, made in the scope. write: `method`, `variable`, `value` (reference or plain value),
    `indices`, `context` "cross" or "default". read: `variable`, `context`. state: what the contexts know.
distribute: `source`, `stages`, `policy`, `as_function` (None, "PER_WORKER", "PER_REPLICA"), `batches_of` with
    get_per_replica_batch_size. element_spec, iter, and next of an iterator, `optional` by get_next_as_optional;
    iterate: one pass over `value`, of at most `steps` steps.
batch_size: get_per_replica_batch_size(`size`).
average_loss, regularization_loss: of plain values, `context` "cross" or "default".
run: `args` (tuple) and `kwargs` (dict) of nests of references, or a plain `args`; `body`, a list of steps of a replica,
    whose arguments are "x0", "x1", ... in the order of leaves; `returns`, a nest of references.
update: extended.update of `variable`, an assign_add of `value`.

Steps of a replica: constant, literal (a Python value as it is), scale (`value` x `by`, x (replica id + 1) where
    `by_replica`), add (`value`, `other`), sum (over `axis`), replica_id, all_reduce (`op`, nest), all_gather (nest,
    `axis`), read, write (of a reference, or of a plain value x (replica id + 1)), average_loss, regularization_loss,
    state, merge (as run; its arguments are "x0", ... and its body has steps of the main program), misplaced (`method`
    of the strategy that belongs outside).

An answer has one entry for each step: None where a reference is missing, as its step failed, or a dict with "result",
"error" (Error or None) and "copies", the copies of each variable that exists after a step that may change one.
"""

import gzip
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cases import decode, encode

SAMPLE = Path(__file__).with_name("programs.json.gz")
#: The calls after which the copies of variables are part of the answer.
CHANGING = {"write", "run", "update"}


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a file of encoded lines; one that was cut short is left out."""
    if not path.exists():
        return
    for line in path.read_text().splitlines():
        try:
            yield decode(json.loads(line))
        except json.JSONDecodeError:
            return


def line_of(record: dict[str, Any]) -> str:
    return json.dumps(encode(record), separators=(",", ":")) + "\n"


def read_sample() -> list[dict[str, Any]]:
    """Return the recorded programs of the repository, each with its `answer`."""
    with gzip.open(SAMPLE, "rt") as file:
        return list(map(decode, json.load(file)["programs"]))


def write_sample(tensorflow: str, records: list[dict[str, Any]]) -> None:
    """Write programs with answers; the same ones always give the same bytes."""
    content = {"tensorflow": tensorflow, "programs": list(map(encode, records))}
    SAMPLE.write_bytes(gzip.compress(json.dumps(content, separators=(",", ":")).encode(), 9, mtime=0))


def map_leaves(function: Callable[[Any], Any], nest: Any) -> Any:
    """Return a nest with function(leaf) for each leaf; dicts in the order of their sorted keys."""
    if isinstance(nest, (list, tuple)):
        return type(nest)([map_leaves(function, child) for child in nest])
    if isinstance(nest, dict):
        done = {key: map_leaves(function, nest[key]) for key in sorted(nest)}
        return {key: done[key] for key in nest}
    return function(nest)


def leaves_of(nest: Any) -> list[Any]:
    leaves: list[Any] = []
    map_leaves(leaves.append, nest)
    return leaves


def references(step: dict[str, Any]) -> set[str]:
    """Return the registers that a step of the main program needs."""
    fields = []
    for name in ("value", "variable", "args", "kwargs"):
        if name in step:
            fields.append(step.get(name))
    names = {leaf.split(".")[0] for leaf in leaves_of(fields) if is_reference(leaf)}
    return names | set(step.get("variables", ()))


def is_reference(leaf: Any) -> bool:
    return isinstance(leaf, str) and leaf[:1] in ("r", "x", "v", "d", "i") and leaf[1:2].isdigit()


def with_stages(dataset: Any, stages: list[Any], context: Any, maps: dict[str, Any]) -> Any:
    """Return a dataset, of either library, with the stages of a step.

    Args:
        dataset: with the methods of tf.data.
        stages: (method, *arguments); a map by its name, and what depends on the input context.
        context: of the input pipeline, where one is needed.
        maps: functions by name.
    """
    for name, *arguments in stages:
        if name == "map":
            dataset = dataset.map(maps[arguments[0]])
        elif name == "shard_by_context":
            dataset = dataset.shard(context.num_input_pipelines, context.input_pipeline_id)
        elif name == "batch_by_context":
            dataset = dataset.batch(context.get_per_replica_batch_size(arguments[0]), arguments[1])
        else:
            dataset = getattr(dataset, name)(*arguments)
    return dataset

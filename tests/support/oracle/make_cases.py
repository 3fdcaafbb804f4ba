"""Record what tf.distribute does: random calls with fixed seeds, and TensorFlow's answers, for tests to compare with.

Run by hand, not by CI, where TensorFlow 2.21 (and nothing else) is installed; some ten minutes on two cores:

    python -m venv tfvenv && tfvenv/bin/pip install tensorflow-cpu==2.21.0
    tfvenv/bin/python tests/support/oracle/make_cases.py

It writes cases.json.gz beside itself; cases.py says what is in it, draws.py where the arguments come from. The strategy
is MirroredStrategy over N logical CPUs with its default cross-device operations, which are collectives. Where shapes do
not fit, no replica has an element or a nest mixes dtypes, it is ReductionToOneDevice: there a collective hangs, or it
fails and so do all later ones in the process. Each N has a process of its own, since strategies of different sizes
would mistake each other's collectives.
"""

import itertools
import multiprocessing
import os
import re
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

os.environ.update(TF_CPP_MIN_LOG_LEVEL="3", CUDA_VISIBLE_DEVICES="", TF_ENABLE_ONEDNN_OPTS="0")

import draws
import numpy as np
import tensorflow as tf
from cases import PATH, Error, PerReplica, cases, encode, write_file

SIZES = (1, 2, 3, 4, 5, 8)
MESSAGE_LENGTH = 200


class Setting:
    """The strategies of one process, and ways to call something under them."""

    def __init__(self, n_replicas: int) -> None:
        self.devices = [f"CPU:{i}" for i in range(n_replicas)]
        self.strategy = tf.distribute.MirroredStrategy(self.devices)
        self.one_device = tf.distribute.MirroredStrategy(self.devices, tf.distribute.ReductionToOneDevice())

    def distribute(self, value: Any) -> Any:
        """Return TensorFlow's form of one value."""
        if not isinstance(value, PerReplica):
            return tensor(value)

        def of_replica(context):
            number = context.replica_id_in_sync_group
            with tf.device(self.devices[number]):
                return tensor(value.values[number])

        return self.strategy.experimental_distribute_values_from_function(of_replica)

    def local(self, value: Any) -> tuple[Any, ...]:
        return self.strategy.experimental_local_results(value)

    def run(self, function: Callable[[Any, Any], Any], value: Any, one_device: bool = False) -> Any:
        """Return what `function(replica context, nest of own values)` gives on the replicas, a nest of PerReplica."""

        @tf.autograph.experimental.do_not_convert
        def replica():
            context = tf.distribute.get_replica_context()
            number = int(context.replica_id_in_sync_group)
            results[number] = map_nest(
                as_array, function(context, map_nest(lambda leaf: replica_leaf(leaf, number), value))
            )

        def replica_leaf(leaf: Any, number: int) -> Any:
            return tensor(leaf.values[number] if isinstance(leaf, PerReplica) else leaf)

        results: dict[int, Any] = {}
        (self.one_device if one_device else self.strategy).run(replica)
        return transpose([results[number] for number in sorted(results)])

    def run_in(self, context: str, function: Callable[[Any, Any], Any], value: Any) -> Any:
        """As `run` for the replica context; otherwise call the function there once and return its result."""
        if context == "replica":
            return self.run(function, value)
        if context == "default":
            return map_nest(as_array, function(None, map_nest(tensor, value)))
        with self.strategy.scope():
            return map_nest(as_array, function(None, map_nest(tensor, value)))


def reduce_op(arguments: dict[str, Any]) -> Any:
    text = arguments["reduce_op"]
    if text.startswith("ReduceOp."):
        return tf.distribute.ReduceOp[text.removeprefix("ReduceOp.")]
    return text


def tensor(value: Any) -> Any:
    """Return a tensor on the current device for an array, anything else as it is."""
    if isinstance(value, np.ndarray):
        return tf.identity(tf.constant(value))
    return value


def as_array(value: Any) -> Any:
    if value is None:
        return None
    return np.asarray(value)


def map_nest(function: Callable[[Any], Any], nest: Any) -> Any:
    if isinstance(nest, list | tuple):
        return type(nest)(map_nest(function, item) for item in nest)
    if isinstance(nest, dict):
        return {name: map_nest(function, item) for name, item in nest.items()}
    return function(nest)


def transpose(nests: list[Any]) -> Any:
    """Turn one nest per replica into a nest of PerReplica."""
    first = nests[0]
    if isinstance(first, list | tuple):
        return type(first)(transpose(list(items)) for items in zip(*nests, strict=True))
    if isinstance(first, dict):
        transposed = {}
        for name in first:
            transposed[name] = transpose([nest[name] for nest in nests])
        return transposed
    return PerReplica(tuple(nests))


def attempt(call: Callable[[], Any]) -> tuple[Any, Error | None]:
    try:
        return call(), None
    except Exception as error:
        return None, Error(type(error).__name__, short_message(str(error)))


def short_message(text: str) -> str:
    """Return the innermost message on one line, without graph nodes and paths."""
    text = re.split(r"^\s*(?:[\w.]+\.)?\w+(?:Error|Exception): ", text, flags=re.MULTILINE)[-1]
    lines = [line for line in text.splitlines() if not _FRAME.match(line)]
    text = _NODE.sub("", " ".join(" ".join(lines).split()))
    return _ROOTS.sub(r"\1", text)[:MESSAGE_LENGTH].strip()


#: Lines about where a graph was made, and what names its nodes.
_FRAME = re.compile(r"Graph execution error:|Detected at node |\s+File |\s*\[\[")
_NODE = re.compile(r" for '\{\{node .*|\{\{\w+ [^}]*\}\} ?|\[\[.*?\]\]|\s*\[Op:\w+\](?: name:\s*\S*)?| See http.*")
_ROOTS = re.compile(r"\d+ root error\(s\) found\. \(0\) \w+: (.*?) \(1\) .*")


class Kind(NamedTuple):
    """How to draw and to run the cases of one kind, and how many there are for each number of replicas."""

    draw: Callable[[draws.Draw], dict[str, Any]]
    run: Callable[[Setting, dict[str, Any]], Any]
    count: int


def run_reduce(setting: Setting, arguments: dict[str, Any]) -> Any:
    value = setting.distribute(arguments["value"])

    def reduce():
        return setting.strategy.reduce(reduce_op(arguments), value, arguments["axis"])

    return as_array(tf.function(reduce, autograph=False)() if arguments["in_function"] else reduce())


def run_gather(setting: Setting, arguments: dict[str, Any]) -> Any:
    if arguments["one_device"]:
        strategy = setting.one_device
    else:
        strategy = setting.strategy
    return as_array(strategy.gather(setting.distribute(arguments["value"]), arguments["axis"]))


def run_all_gather(setting: Setting, arguments: dict[str, Any]) -> Any:
    def gather(context, value):
        return context.all_gather(value, arguments["axis"])

    return setting.run(gather, arguments["value"], one_device=arguments["one_device"])


def run_all_reduce(setting: Setting, arguments: dict[str, Any]) -> Any:
    def reduce(context, value):
        return context.all_reduce(reduce_op(arguments), value)

    return setting.run(reduce, arguments["value"], one_device=arguments["one_device"])


def run_split(setting: Setting, arguments: dict[str, Any]) -> Any:
    rows = tf.data.Dataset.range(arguments["rows"]).repeat(arguments["repeat_rows"])
    batches = rows.batch(arguments["batch_size"], arguments["drop_remainder"]).repeat(arguments["repeat_batches"])
    distributed = setting.strategy.experimental_distribute_dataset(batches)
    steps = []
    for step in distributed:
        steps.append([part.numpy().tolist() for part in setting.local(step)])
    return steps


def run_per_replica_batch_size(setting: Setting, arguments: dict[str, Any]) -> Any:
    sizes = []

    def dataset(context):
        sizes.append(context.get_per_replica_batch_size(arguments["global_batch_size"]))
        return tf.data.Dataset.range(1)

    setting.strategy.distribute_datasets_from_function(dataset)
    return int(sizes[0])


def run_average_loss(setting: Setting, arguments: dict[str, Any]) -> Any:
    size = tensor(arguments["global_batch_size"])

    def loss(_context, values):
        return tf.nn.compute_average_loss(values[0], sample_weight=values[1], global_batch_size=size)

    return setting.run_in(arguments["context"], loss, [arguments["per_example_loss"], arguments["sample_weight"]])


def run_regularization_loss(setting: Setting, arguments: dict[str, Any]) -> Any:
    def loss(_context, value):
        return tf.nn.scale_regularization_loss(value)

    return setting.run_in(arguments["context"], loss, arguments["regularization_loss"])


def run_variable(setting: Setting, arguments: dict[str, Any]) -> Any:
    with setting.strategy.scope():
        variable = tf.Variable(
            arguments["initial_value"],
            trainable=arguments["trainable"],
            synchronization=tf.VariableSynchronization[arguments["synchronization"]],
            aggregation=tf.VariableAggregation[arguments["aggregation"]],
        )
    return [outcome(setting, variable, action) for action in arguments["actions"]]


def outcome(setting: Setting, variable: Any, action: dict[str, Any]) -> dict[str, Any]:
    def act(_context, value):
        if action["method"] == "read_value":
            return variable.read_value()
        if action["indices"] is not None:
            value = tf.IndexedSlices(value, tf.constant(action["indices"]))
        getattr(variable, action["method"])(value)
        return None

    result, error = attempt(lambda: setting.run_in(action["context"], act, action["value"]))
    copies = [as_array(copy.read_value()) for copy in setting.local(variable)]
    return {"result": result if action["method"] == "read_value" else None, "error": error, "copies": copies}


KINDS = {
    "reduce": Kind(draws.draw_reduce, run_reduce, 140),
    "gather": Kind(draws.draw_gather, run_gather, 54),
    "all_reduce": Kind(draws.draw_all_reduce, run_all_reduce, 36),
    "all_gather": Kind(draws.draw_all_gather, run_all_gather, 22),
    "split": Kind(draws.draw_split, run_split, 70),
    "per_replica_batch_size": Kind(draws.draw_per_replica_batch_size, run_per_replica_batch_size, 6),
    "average_loss": Kind(draws.draw_average_loss, run_average_loss, 40),
    "regularization_loss": Kind(draws.draw_regularization_loss, run_regularization_loss, 16),
    "variable": Kind(draws.draw_variable, run_variable, 40),
}


def record_size(n_replicas: int) -> list[dict[str, Any]]:
    """Draw and answer all cases for one number of replicas, in a process that has not used TensorFlow before."""
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * n_replicas)
    # Each replica's part of a collective occupies a thread until the last one has come.
    tf.config.threading.set_inter_op_parallelism_threads(2 * max(SIZES))
    tf.config.threading.set_intra_op_parallelism_threads(1)
    setting = Setting(n_replicas)
    records = []
    for stream, kind in enumerate(KINDS):
        records += record_kind(setting, n_replicas, stream, kind)
    return records


def record_kind(setting: Setting, n_replicas: int, stream: int, kind: str) -> list[dict[str, Any]]:
    draw = draws.Draw(n_replicas, stream)
    records = []
    for _ in range(KINDS[kind].count):
        arguments = KINDS[kind].draw(draw)
        expected, error = attempt(lambda: KINDS[kind].run(setting, arguments))  # noqa: B023 - called at once
        case = {"kind": kind, "n_replicas": n_replicas, "arguments": arguments, "expected": expected}
        case.update(error=error, exact=draw.exact)
        records.append({name: encode(value) for name, value in case.items()})
    print(f"{n_replicas} replicas: {kind}, {len(records)} cases", file=sys.stderr, flush=True)
    return records


def main() -> None:
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        records = list(itertools.chain.from_iterable(pool.map(record_size, SIZES, chunksize=1)))
    write_file(tf.__version__, draws.SEED, records)
    outcomes = Counter((case.kind, case.error is None) for case in cases())
    for kind in KINDS:
        print(f"{kind:24} {outcomes[kind, True]:5} answers {outcomes[kind, False]:5} errors")
    print(f"{len(records)} cases, {PATH.stat().st_size} bytes")


if __name__ == "__main__":
    main()

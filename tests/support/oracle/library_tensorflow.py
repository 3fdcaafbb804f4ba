"""What the interpreter needs of TensorFlow: MirroredStrategy over N logical CPUs of one process."""

import os
from typing import Any

os.environ.update(TF_CPP_MIN_LOG_LEVEL="3", CUDA_VISIBLE_DEVICES="", TF_ENABLE_ONEDNN_OPTS="0")

import numpy as np
import tensorflow as tf
from cases import PerReplica
from make_cases import short_message
from program import map_leaves, with_stages

MAPS = {
    "add 1": lambda *row: map_leaves(lambda x: x + 1, row[0] if len(row) == 1 else row),
    "pair": lambda *row: (row[0], row[0] * 2) if len(row) == 1 else {"x": row[0], "y": row[1]},
    "row": lambda *row: {"x": tf.stack([row[0], row[0]], axis=-1)} if len(row) == 1 else row,
}
MAPS = {name: tf.autograph.experimental.do_not_convert(function) for name, function in MAPS.items()}


def start(n_replicas: int) -> None:
    """Give this process logical CPUs and threads; before anything else of TensorFlow is used."""
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * n_replicas)
    tf.config.threading.set_inter_op_parallelism_threads(16)  # a part of a collective occupies a thread
    tf.config.threading.set_intra_op_parallelism_threads(1)


class TensorFlow:
    """Calls of TensorFlow under one strategy.

    Args:
        n_replicas: as given to `start`.
        one_device: whether values are reduced on one device, not by collectives.
    """

    average_loss = staticmethod(tf.nn.compute_average_loss)
    regularization_loss = staticmethod(tf.nn.scale_regularization_loss)
    replica_context = staticmethod(tf.distribute.get_replica_context)
    has_strategy = staticmethod(tf.distribute.has_strategy)
    in_cross_replica_context = staticmethod(tf.distribute.in_cross_replica_context)
    plain_function = staticmethod(tf.autograph.experimental.do_not_convert)

    def __init__(self, n_replicas: int, one_device: bool) -> None:
        self.devices = [f"CPU:{number}" for number in range(n_replicas)]
        if one_device:
            operations = tf.distribute.ReductionToOneDevice()
        else:
            operations = None
        self.strategy = tf.distribute.MirroredStrategy(self.devices, operations)

    def variable(self, **options: Any) -> Any:
        synchronization = tf.VariableSynchronization[options.pop("synchronization")]
        aggregation = tf.VariableAggregation[options.pop("aggregation")]
        return tf.Variable(synchronization=synchronization, aggregation=aggregation, **options)

    def add_to(self, copy: Any, value: Any) -> None:
        copy.assign_add(value)

    def tensor(self, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return tf.identity(tf.constant(value))
        return value

    def number(self, value: int) -> Any:
        return tf.constant(value, tf.int64)

    def sum(self, value: Any, axis: Any) -> Any:
        return tf.reduce_sum(value, axis)

    def values(self, nest: Any) -> Any:
        def of_replica(context: Any) -> Any:
            number = context.replica_id_in_sync_group
            with tf.device(self.devices[number]):
                return map_leaves(lambda leaf: self.tensor(leaf.values[number]), nest)

        return self.strategy.experimental_distribute_values_from_function(of_replica)

    def reduce_op(self, text: str) -> Any:
        if text.startswith("ReduceOp."):
            return tf.distribute.ReduceOp[text.removeprefix("ReduceOp.")]
        return text

    def reduce(self, op: str, value: Any, axis: Any) -> Any:
        """Reduce a value; a list of axes takes a tf.function, as it is no key of a cache."""

        def reduce() -> Any:
            return self.strategy.reduce(self.reduce_op(op), value, axis)

        if isinstance(axis, list):
            return tf.function(reduce, autograph=False)()
        return reduce()

    def slices(self, value: Any, indices: Any) -> Any:
        return tf.IndexedSlices(value, tf.constant(indices))

    def local_results(self, value: Any) -> Any:
        replica_values = self.strategy.experimental_local_results(value)
        replica_values = tuple(
            replica_value.read_value() if isinstance(replica_value, tf.Variable) else replica_value
            for replica_value in replica_values
        )
        is_distributed = self._is_distributed(value) or self.strategy.num_replicas_in_sync == 1
        if is_distributed:
            return PerReplica(replica_values)
        return replica_values

    def _is_distributed(self, value: Any) -> bool:
        return isinstance(value, (tf.distribute.DistributedValues, tf.Variable)) and hasattr(value, "values")

    def copies(self, variable: Any) -> PerReplica:
        return PerReplica(
            tuple(
                np.asarray(replica_copy.read_value())
                for replica_copy in self.strategy.experimental_local_results(variable)
            )
        )

    def dataset(self, step: dict[str, Any], context: Any) -> Any:
        """Return the dataset that a step describes."""
        source = step["source"]
        if isinstance(source, int):
            dataset = tf.data.Dataset.range(source)
        else:
            dataset = tf.data.Dataset.from_tensor_slices(source)
        dataset = with_stages(dataset, step["stages"], context, MAPS)
        if step["policy"] is None:
            return dataset
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy[step["policy"]]
        return dataset.with_options(options)

    def input_options(self, mode: str) -> Any:
        mode = tf.distribute.InputReplicationMode[mode]
        return tf.distribute.InputOptions(experimental_replication_mode=mode)

    def per_replica_batch_size(self, size: int) -> int:
        return tf.distribute.InputContext(1, 0, self.strategy.num_replicas_in_sync).get_per_replica_batch_size(size)

    def spec(self, nest: Any) -> Any:
        """Return (shape, dtype) for every leaf, that of the first replica where they are apart."""

        def of_leaf(leaf: Any) -> Any:
            while hasattr(leaf, "_value_specs"):
                leaf = leaf._value_specs[0]
            return f"{tuple(leaf.shape)} {leaf.dtype.name}"

        return map_leaves(of_leaf, nest)

    def recorded(self, value: Any) -> Any:
        """Return a value as cases.py encodes it."""
        if isinstance(value, PerReplica):
            return PerReplica(tuple(map(self.recorded, value.values)))
        if isinstance(value, (list, tuple, dict)):
            return map_leaves(self.recorded, value)
        if isinstance(value, tf.Variable):
            return None
        if isinstance(value, tf.distribute.DistributedValues):
            return PerReplica(tuple(map(self.recorded, self.strategy.experimental_local_results(value))))
        if isinstance(value, (tf.Tensor, np.generic)):
            return np.asarray(value)
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        return None

    def message(self, error: Exception) -> str:
        return short_message(str(error))

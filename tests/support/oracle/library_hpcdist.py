"""What the interpreter needs of hpcdist: as library_tensorflow.py, on the ranks of this job."""

from typing import Any

import numpy as np
import torch
from cases import PerReplica
from program import map_leaves, with_stages

import hpcdist

MAPS = {
    "add 1": lambda *row: map_leaves(lambda x: x + 1, row[0] if len(row) == 1 else row),
    "pair": lambda *row: (row[0], row[0] * 2) if len(row) == 1 else {"x": row[0], "y": row[1]},
    "row": lambda *row: {"x": np.stack([row[0], row[0]], axis=-1)} if len(row) == 1 else row,
}


class Hpcdist:
    """Calls of hpcdist under one strategy.

    Args:
        n_replicas: of the strategy.
        is_default: whether each rank is a replica by default, without num_replicas.
    """

    variable = staticmethod(hpcdist.Variable)
    average_loss = staticmethod(hpcdist.compute_average_loss)
    regularization_loss = staticmethod(hpcdist.scale_regularization_loss)
    replica_context = staticmethod(hpcdist.get_replica_context)
    has_strategy = staticmethod(hpcdist.has_strategy)
    in_cross_replica_context = staticmethod(hpcdist.in_cross_replica_context)

    def __init__(self, n_replicas: int, is_default: bool = False) -> None:
        number = None if is_default else n_replicas
        self.strategy = hpcdist.MultiWorkerMirroredStrategy(num_replicas=number, gradient_op="sum")

    def plain_function(self, function: Any) -> Any:
        return function

    def add_to(self, copy: Any, value: Any) -> None:
        copy.assign_add(value)

    def tensor(self, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return torch.tensor(value)
        return value

    def number(self, value: int) -> Any:
        return torch.tensor(value)

    def sum(self, value: Any, axis: Any) -> Any:
        """Return a sum of the dtype of the value, as in TensorFlow."""
        if axis is None:
            return value.sum(dtype=value.dtype)
        return value.sum(axis, dtype=value.dtype)

    def values(self, nest: Any) -> Any:
        def of_replica(context: Any) -> Any:
            number = context.replica_id_in_sync_group
            return map_leaves(lambda leaf: self.tensor(leaf.values[number]), nest)

        return self.strategy.experimental_distribute_values_from_function(of_replica)

    def reduce_op(self, text: str) -> Any:
        if text.startswith("ReduceOp."):
            return hpcdist.ReduceOp[text.removeprefix("ReduceOp.")]
        return text

    def reduce(self, op: str, value: Any, axis: Any) -> Any:
        return self.strategy.reduce(self.reduce_op(op), value, axis)

    def slices(self, value: Any, indices: Any) -> Any:
        return torch.tensor(indices), value

    def local_results(self, value: Any) -> Any:
        local_values = self.strategy.experimental_local_results(value)
        is_distributed = isinstance(value, (hpcdist.DistributedValues, hpcdist.Variable))
        if is_distributed or self.strategy.num_replicas_in_sync == 1:
            return PerReplica(local_values)
        return local_values

    def copies(self, variable: Any) -> PerReplica:
        return PerReplica(tuple(copy.detach().numpy().copy() for copy in variable.local_copies))

    def dataset(self, step: dict[str, Any], context: Any) -> Any:
        """Return the dataset that a step describes."""
        source = step["source"]
        dataset = hpcdist.Dataset.from_tensor_slices(np.arange(source) if isinstance(source, int) else source)
        dataset = with_stages(dataset, step["stages"], context, MAPS)
        if step["policy"] is None:
            return dataset
        options = hpcdist.Options()
        options.experimental_distribute.auto_shard_policy = hpcdist.AutoShardPolicy[step["policy"]]
        return dataset.with_options(options)

    def input_options(self, mode: str) -> Any:
        return hpcdist.InputOptions(experimental_replication_mode=hpcdist.InputReplicationMode[mode])

    def per_replica_batch_size(self, size: int) -> int:
        return hpcdist.InputContext(1, 0, self.strategy.num_replicas_in_sync).get_per_replica_batch_size(size)

    def spec(self, nest: Any) -> Any:
        """Return (shape, dtype) for every leaf."""
        return map_leaves(lambda leaf: f"{tuple(leaf.shape)} {str(leaf.dtype).removeprefix('torch.')}", nest)

    def recorded(self, value: Any) -> Any:
        """Return a value as cases.py encodes it; PerReplica of the local replicas."""
        if isinstance(value, (PerReplica, hpcdist.DistributedValues)):
            return PerReplica(tuple(map(self.recorded, value.values)))
        if isinstance(value, (list, tuple, dict)):
            return map_leaves(self.recorded, value)
        if isinstance(value, torch.Tensor):
            return value.detach().cpu().numpy().copy()
        if isinstance(value, (np.ndarray, np.generic)):
            return np.asarray(value).copy()
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        return None

    def message(self, error: Exception) -> str:
        return " ".join(str(error).split())[:200]

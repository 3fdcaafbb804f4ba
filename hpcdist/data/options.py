"""Options of inputs: sharding policies, options of datasets, and the input pipeline for which a dataset is made."""

import enum
from dataclasses import dataclass, field

from hpcdist.errors import DataError, UsageError


class AutoShardPolicy(enum.Enum):
    """How a dataset is divided among input pipelines (ranks).

    `Dataset.shard` obeys it in full. `experimental_distribute_dataset`, which divides each global batch, reads the rows
    of all files in one global order for AUTO and DATA, so that a restart on other ranks is exact.

    Attributes:
        OFF: every pipeline gets all elements; with a distributed dataset each replica reads all rows, ceil(batch / N)
            rows a step.
        AUTO: FILE when the rows come from files, else DATA. Too few files are an error, not a reason for DATA.
        FILE: every n-th file; an error when there are fewer files than pipelines.
        DATA: every n-th element.
        HINT: `shard(SHARD_HINT, SHARD_HINT)` in the dataset marks where each replica takes every n-th row; for
            `experimental_distribute_dataset` alone.
    """

    OFF = -1
    AUTO = 0
    FILE = 1
    DATA = 2
    HINT = 3


class ShardHint(int):
    """The number -1, for both arguments of `Dataset.shard`: AutoShardPolicy.HINT replaces them by the real ones."""


SHARD_HINT = ShardHint(-1)


class InputReplicationMode(enum.Enum):
    """How often `distribute_datasets_from_function` calls its function.

    Attributes:
        PER_WORKER: once per rank; the rank's replicas take turns at its batches.
        PER_REPLICA: once per replica; each replica has a dataset for itself.
    """

    PER_WORKER = "PER_WORKER"
    PER_REPLICA = "PER_REPLICA"


@dataclass
class DistributeOptions:
    """Options of how a dataset is distributed; see `Options.experimental_distribute`."""

    auto_shard_policy: AutoShardPolicy = AutoShardPolicy.AUTO


@dataclass
class Options:
    """Options of a dataset, for `Dataset.with_options`.

    Example:
        options = hpcdist.Options()
        options.experimental_distribute.auto_shard_policy = hpcdist.AutoShardPolicy.FILE
    """

    experimental_distribute: DistributeOptions = field(default_factory=DistributeOptions)


@dataclass(frozen=True)
class InputOptions:
    """Options of a distributed dataset.

    Attributes:
        experimental_fetch_to_device: whether parts go to a device. True moves them to the strategy's devices, or
            without any to the current GPU, if there is one; False leaves them on the host. By default they go to the
            devices that were passed to the strategy. Copies start one batch ahead; numbers become tensors, and text
            stays an array on the host.
        experimental_replication_mode: how often `distribute_datasets_from_function` calls its function.
        experimental_place_dataset_on_device: flag that is accepted as in tf.distribute, under the same conditions, and
            without effect: datasets are read on the host, and parts stay there.
        experimental_per_replica_buffer_size: number of parts that are fetched ahead per replica, with
            `experimental_fetch_to_device`.

    Raises:
        UsageError: for a buffer size below 1, or `experimental_place_dataset_on_device` without PER_REPLICA or with
            `experimental_fetch_to_device`.
    """

    experimental_fetch_to_device: bool | None = None
    experimental_replication_mode: InputReplicationMode = InputReplicationMode.PER_WORKER
    experimental_place_dataset_on_device: bool = False
    experimental_per_replica_buffer_size: int = 1

    def __post_init__(self) -> None:
        if self.experimental_per_replica_buffer_size < 1:
            raise UsageError(
                f"InputOptions: expected experimental_per_replica_buffer_size of at least 1, got "
                f"{self.experimental_per_replica_buffer_size}; leave it out for 1."
            )
        is_per_replica = self.experimental_replication_mode is InputReplicationMode.PER_REPLICA
        may_be_placed = is_per_replica and not self.experimental_fetch_to_device
        if self.experimental_place_dataset_on_device and not may_be_placed:
            raise UsageError(
                f"InputOptions: expected experimental_place_dataset_on_device with PER_REPLICA and without "
                f"experimental_fetch_to_device, got {self}; correct one of the three."
            )


@dataclass(frozen=True)
class InputContext:
    """The input pipeline for which a dataset function is called.

    Attributes:
        num_input_pipelines: number of pipelines in the job: of ranks, or of replicas with PER_REPLICA.
        input_pipeline_id: number of this pipeline, from 0.
        num_replicas_in_sync: number of replicas whose gradients are summed.
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Return the global batch size divided by the number of replicas.

        Raises:
            DataError: a ValueError; when it is not divisible.
        """
        if global_batch_size % self.num_replicas_in_sync:
            raise DataError(
                f"get_per_replica_batch_size: expected a global batch divisible by {self.num_replicas_in_sync} "
                f"replicas, got {global_batch_size}; use a multiple, or experimental_distribute_dataset."
            )
        return global_batch_size // self.num_replicas_in_sync

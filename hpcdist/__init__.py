"""tf.distribute for batch clusters: roles, strategies and exact restarts on MPI.

Public names are resolved at first use, so that `import hpcdist` starts neither MPI nor torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpcdist import cluster_resolver as cluster_resolver
    from hpcdist import experimental as experimental
    from hpcdist.checkpoint.reader import latest_checkpoint as latest_checkpoint
    from hpcdist.cluster.mpi import MPIClusterResolver as MPIClusterResolver
    from hpcdist.cluster.resolver import ClusterResolver as ClusterResolver
    from hpcdist.cluster.resolver import SimpleClusterResolver as SimpleClusterResolver
    from hpcdist.cluster.slurm import SlurmClusterResolver as SlurmClusterResolver
    from hpcdist.cluster.spec import ClusterSpec as ClusterSpec
    from hpcdist.cluster.spec import Task as Task
    from hpcdist.cluster.tf_config import TFConfigClusterResolver as TFConfigClusterResolver
    from hpcdist.cluster.tpu import TPUClusterResolver as TPUClusterResolver
    from hpcdist.cluster.union import UnionResolver as UnionResolver
    from hpcdist.collectives.all_gather import all_gather as all_gather
    from hpcdist.collectives.all_gather import gather_objects as gather_objects
    from hpcdist.collectives.all_reduce import all_reduce as all_reduce
    from hpcdist.collectives.all_reduce import all_reduce_async as all_reduce_async
    from hpcdist.collectives.broadcast import broadcast as broadcast
    from hpcdist.collectives.cross_device_ops import CrossDeviceOps as CrossDeviceOps
    from hpcdist.collectives.cross_device_ops import HierarchicalCopyAllReduce as HierarchicalCopyAllReduce
    from hpcdist.collectives.cross_device_ops import NcclAllReduce as NcclAllReduce
    from hpcdist.collectives.cross_device_ops import ReductionToOneDevice as ReductionToOneDevice
    from hpcdist.collectives.options import CollectiveCommunication as CollectiveCommunication
    from hpcdist.collectives.options import CommunicationImplementation as CommunicationImplementation
    from hpcdist.collectives.options import CommunicationOptions as CommunicationOptions
    from hpcdist.collectives.reduce_scatter import reduce_scatter as reduce_scatter
    from hpcdist.data.dataset import Dataset as Dataset
    from hpcdist.data.options import SHARD_HINT as SHARD_HINT
    from hpcdist.data.options import AutoShardPolicy as AutoShardPolicy
    from hpcdist.data.options import InputContext as InputContext
    from hpcdist.data.options import InputOptions as InputOptions
    from hpcdist.data.options import InputReplicationMode as InputReplicationMode
    from hpcdist.data.options import Options as Options
    from hpcdist.data.sources import RowSource as RowSource
    from hpcdist.resilience.checkpoint import Checkpoint as Checkpoint
    from hpcdist.resilience.manager import CheckpointManager as CheckpointManager
    from hpcdist.resilience.metrics_file import MetricsFile as MetricsFile
    from hpcdist.resilience.preemption import PreemptionCheckpointHandler as PreemptionCheckpointHandler
    from hpcdist.resilience.schedule import SaveSchedule as SaveSchedule
    from hpcdist.resilience.termination import TerminationConfig as TerminationConfig
    from hpcdist.strategy import metrics as metrics
    from hpcdist.strategy.base import Strategy as Strategy
    from hpcdist.strategy.base import ValueContext as ValueContext
    from hpcdist.strategy.base import get_replica_context as get_replica_context
    from hpcdist.strategy.base import get_strategy as get_strategy
    from hpcdist.strategy.base import has_strategy as has_strategy
    from hpcdist.strategy.base import in_cross_replica_context as in_cross_replica_context
    from hpcdist.strategy.central_storage import CentralStorageStrategy as CentralStorageStrategy
    from hpcdist.strategy.extended import StrategyExtended as StrategyExtended
    from hpcdist.strategy.losses import compute_average_loss as compute_average_loss
    from hpcdist.strategy.losses import scale_regularization_loss as scale_regularization_loss
    from hpcdist.strategy.mirrored import MirroredStrategy as MirroredStrategy
    from hpcdist.strategy.multi_worker import MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy
    from hpcdist.strategy.one_device import OneDeviceStrategy as OneDeviceStrategy
    from hpcdist.strategy.reduce_op import ReduceOp as ReduceOp
    from hpcdist.strategy.replica_context import ReplicaContext as ReplicaContext
    from hpcdist.strategy.set_strategy import experimental_set_strategy as experimental_set_strategy
    from hpcdist.strategy.sync_batch_norm import SyncBatchNorm as SyncBatchNorm
    from hpcdist.strategy.sync_batch_norm import convert_sync_batchnorm as convert_sync_batchnorm
    from hpcdist.strategy.tpu import TPUStrategy as TPUStrategy
    from hpcdist.strategy.tpu import experimental_connect_to_cluster as experimental_connect_to_cluster
    from hpcdist.strategy.tpu import initialize_tpu_system as initialize_tpu_system
    from hpcdist.strategy.values import DistributedValues as DistributedValues
    from hpcdist.strategy.values import Mirrored as Mirrored
    from hpcdist.strategy.values import PerReplica as PerReplica
    from hpcdist.strategy.variable_kinds import VariableAggregation as VariableAggregation
    from hpcdist.strategy.variable_kinds import VariableSynchronization as VariableSynchronization
    from hpcdist.strategy.variables import Variable as Variable

__version__ = "0.1.0"

_MODULES = {
    "AutoShardPolicy": "data.options",
    "CentralStorageStrategy": "strategy.central_storage",
    "Checkpoint": "resilience.checkpoint",
    "CheckpointManager": "resilience.manager",
    "ClusterResolver": "cluster.resolver",
    "ClusterSpec": "cluster.spec",
    "CollectiveCommunication": "collectives.options",
    "CommunicationImplementation": "collectives.options",
    "CommunicationOptions": "collectives.options",
    "CrossDeviceOps": "collectives.cross_device_ops",
    "Dataset": "data.dataset",
    "DistributedValues": "strategy.values",
    "HierarchicalCopyAllReduce": "collectives.cross_device_ops",
    "InputContext": "data.options",
    "InputOptions": "data.options",
    "InputReplicationMode": "data.options",
    "MPIClusterResolver": "cluster.mpi",
    "MetricsFile": "resilience.metrics_file",
    "Mirrored": "strategy.values",
    "MirroredStrategy": "strategy.mirrored",
    "MultiWorkerMirroredStrategy": "strategy.multi_worker",
    "NcclAllReduce": "collectives.cross_device_ops",
    "OneDeviceStrategy": "strategy.one_device",
    "Options": "data.options",
    "PerReplica": "strategy.values",
    "PreemptionCheckpointHandler": "resilience.preemption",
    "ReduceOp": "strategy.reduce_op",
    "ReductionToOneDevice": "collectives.cross_device_ops",
    "ReplicaContext": "strategy.replica_context",
    "RowSource": "data.sources",
    "SHARD_HINT": "data.options",
    "SimpleClusterResolver": "cluster.resolver",
    "SlurmClusterResolver": "cluster.slurm",
    "Strategy": "strategy.base",
    "StrategyExtended": "strategy.extended",
    "SyncBatchNorm": "strategy.sync_batch_norm",
    "TFConfigClusterResolver": "cluster.tf_config",
    "TPUClusterResolver": "cluster.tpu",
    "TPUStrategy": "strategy.tpu",
    "Task": "cluster.spec",
    "SaveSchedule": "resilience.schedule",
    "TerminationConfig": "resilience.termination",
    "UnionResolver": "cluster.union",
    "ValueContext": "strategy.base",
    "Variable": "strategy.variables",
    "VariableAggregation": "strategy.variable_kinds",
    "VariableSynchronization": "strategy.variable_kinds",
    "all_gather": "collectives.all_gather",
    "all_reduce": "collectives.all_reduce",
    "all_reduce_async": "collectives.all_reduce",
    "broadcast": "collectives.broadcast",
    "compute_average_loss": "strategy.losses",
    "convert_sync_batchnorm": "strategy.sync_batch_norm",
    "experimental_connect_to_cluster": "strategy.tpu",
    "experimental_set_strategy": "strategy.set_strategy",
    "gather_objects": "collectives.all_gather",
    "get_replica_context": "strategy.base",
    "get_strategy": "strategy.base",
    "has_strategy": "strategy.base",
    "in_cross_replica_context": "strategy.base",
    "initialize_tpu_system": "strategy.tpu",
    "latest_checkpoint": "checkpoint.reader",
    "reduce_scatter": "collectives.reduce_scatter",
    "scale_regularization_loss": "strategy.losses",
}
#: Modules that are public as a whole: paths of tf.distribute, which are aliases, and the metrics.
_WHOLE_MODULES = {
    "cluster_resolver": "cluster_resolver",
    "experimental": "experimental",
    "metrics": "strategy.metrics",
}

__all__ = sorted({**_MODULES, **_WHOLE_MODULES})


def __getattr__(name: str) -> Any:
    if name in _WHOLE_MODULES:
        return import_module(f"hpcdist.{_WHOLE_MODULES[name]}")
    if name not in _MODULES:
        raise AttributeError(f"module 'hpcdist' has no attribute {name!r}; it has {', '.join(__all__)}")
    found = globals()[name] = getattr(import_module(f"hpcdist.{_MODULES[name]}"), name)
    return found


def __dir__() -> list[str]:
    return [*globals(), *__all__]

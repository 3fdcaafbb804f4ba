"""Every public name of hpcdist, and the module that defines it: the one table from which all else follows.

`hpcdist/__init__.py` resolves these names at first use, so that `import hpcdist` starts neither MPI nor torch. The
paths `hpcdist.experimental`, `hpcdist.cluster_resolver` and `hpcdist.coordinator` of tf.distribute are aliases. The
`.pyi` files are for editors and type checkers; `make stubs` writes them anew.
"""

import difflib
from collections.abc import Collection
from importlib import import_module
from pathlib import Path
from typing import Any

#: Names of TensorFlow and Keras that people look for -> what stands for them.
_ELSEWHERE = {
    "GradientTape": "loss.backward() stands for it",
    "data": "hpcdist.Dataset stands for tf.data.Dataset",
    "keras": "hpcdist.Model, .callbacks, .losses and .metrics stand for Keras'",
    "layers": "layers are those of torch.nn",
    "optimizers": 'compile(optimizer="adam"), then model.learning_rate = 0.01, stands for them',
}
#: Module -> the names that it defines.
_DEFINED_IN = {
    "checkpoint.store": ["latest_checkpoint"],
    "cluster.resolvers": [
        "ClusterResolver",
        "MPIClusterResolver",
        "SimpleClusterResolver",
        "TPUClusterResolver",
        "UnionResolver",
    ],
    "cluster.slurm": ["SlurmClusterResolver"],
    "cluster.spec": ["ClusterSpec", "Task"],
    "cluster.tf_config": ["TFConfigClusterResolver"],
    "collectives.barriers": ["barrier", "barrier_async", "monitored_barrier", "rank_zero_first"],
    "collectives.calls": [
        "all_reduce",
        "all_reduce_async",
        "grouped_all_reduce",
        "grouped_all_reduce_async",
    ],
    "collectives.cross_device_ops": [
        "CrossDeviceOps",
        "HierarchicalCopyAllReduce",
        "NcclAllReduce",
        "ReductionToOneDevice",
    ],
    "collectives.moves": [
        "all_gather_async",
        "alltoall",
        "alltoall_async",
        "broadcast",
        "broadcast_async",
        "reduce_scatter",
        "reduce_scatter_async",
        "scatter",
        "scatter_async",
    ],
    "collectives.objects": [
        "all_gather_objects",
        "alltoall_objects",
        "broadcast_object",
        "create_multi_node_evaluator",
        "gather_objects",
        "scatter_dataset",
        "scatter_objects",
    ],
    "collectives.ops": ["ReduceOp"],
    "collectives.options": [
        "AllReduceAlgorithm",
        "CollectiveCommunication",
        "CommunicationImplementation",
        "CommunicationOptions",
    ],
    "data.dataset": ["Dataset"],
    "data.options": [
        "SHARD_HINT",
        "AutoShardPolicy",
        "InputContext",
        "InputOptions",
        "InputReplicationMode",
        "Options",
    ],
    "data.sampler": ["DistributedSampler"],
    "data.sources": ["RowSource"],
    "diagnostics.logs": ["log_to"],
    "diagnostics.summary": ["communication_summary"],
    "strategy.gathered": ["all_gather"],
    "gradients.comm_hook": ["GradBucket"],
    "strategy.compression": ["PowerSGDState", "TopKState", "power_sgd_hook", "top_k_hook"],
    "notebook": ["notebook_launcher"],
    "plan.partitioners": [
        "FixedShardsPartitioner",
        "MaxSizePartitioner",
        "MinSizePartitioner",
        "Partitioner",
    ],
    "saving.checkpoint": ["Checkpoint", "load_checkpoint"],
    "saving.manager": ["CheckpointManager"],
    "run.metrics_file": ["MetricsFile"],
    "stopping.preemption": ["PreemptionCheckpointHandler"],
    "saving.schedule": ["SaveSchedule"],
    "stopping.termination": ["TerminationConfig"],
    "strategy.base": [
        "Strategy",
        "ValueContext",
        "experimental_set_strategy",
        "get_strategy",
        "has_strategy",
        "in_cross_replica_context",
    ],
    "strategy.central_storage": ["CentralStorageStrategy"],
    "strategy.coordination.coordinator": ["ClusterCoordinator"],
    "strategy.coordination.server": ["Server"],
    "strategy.coordination.values": ["PerWorkerValues", "RemoteValue"],
    "strategy.coordination.worker": ["current_worker_index"],
    "strategy.extended": ["StrategyExtended"],
    "strategy.losses": ["compute_average_loss", "scale_regularization_loss"],
    "strategy.mirrored": ["MirroredStrategy"],
    "strategy.multi_worker": ["MultiWorkerMirroredStrategy"],
    "strategy.one_device": ["OneDeviceStrategy"],
    "strategy.parameter_server": ["ParameterServerStrategy"],
    "strategy.replica_context": ["ReplicaContext", "get_replica_context"],
    "strategy.values": ["DistributedValues", "Mirrored", "PerReplica"],
    "tf_compat.determinism": ["enable_op_determinism", "set_random_seed"],
    "tf_compat.function": ["function"],
    "tf_compat.sync_batch_norm": ["SyncBatchNorm", "convert_sync_batchnorm"],
    "tf_compat.tpu": ["TPUStrategy", "experimental_connect_to_cluster", "initialize_tpu_system"],
    "training.load_model": ["load_model"],
    "training.model": ["Model"],
    "training.sidecar": ["SidecarEvaluator"],
    "tf_compat.variables": ["Variable", "VariableAggregation", "VariableSynchronization"],
}


def _modules_by_name() -> dict[str, str]:
    """Return public name -> the module that defines it."""
    modules = {}
    for module, names in _DEFINED_IN.items():
        for name in names:
            modules[name] = module
    return modules


#: Public name -> the module that defines it.
NAMES = _modules_by_name()
#: Modules that are public as a whole.
MODULES = {
    "callbacks": "callbacks",
    "cluster_resolver": "cluster_resolver",
    "compat": "compat",
    "coordinator": "coordinator",
    "datasets": "datasets",
    "estimator": "estimator",
    "experimental": "experimental",
    "losses": "losses",
    "metrics": "metrics",
    "optim": "optim",
    "partitioners": "plan.partitioners",
    "regularizers": "regularizers",
    "summary": "summary",
    "testing": "testing",
    "torch_backend": "torch_backend",
}
#: Paths of tf.distribute: each name there -> its name in hpcdist.
ALIASES = {
    "cluster_resolver": {
        "ClusterResolver": "ClusterResolver",
        "MPIClusterResolver": "MPIClusterResolver",
        "SimpleClusterResolver": "SimpleClusterResolver",
        "SlurmClusterResolver": "SlurmClusterResolver",
        "TFConfigClusterResolver": "TFConfigClusterResolver",
        "TPUClusterResolver": "TPUClusterResolver",
        "UnionResolver": "UnionResolver",
    },
    "coordinator": {
        "ClusterCoordinator": "ClusterCoordinator",
        "PerWorkerValue": "PerWorkerValues",
        "PerWorkerValues": "PerWorkerValues",
        "RemoteValue": "RemoteValue",
        "experimental_get_current_worker_index": "current_worker_index",
    },
    "experimental": {
        "CentralStorageStrategy": "CentralStorageStrategy",
        "CollectiveCommunication": "CollectiveCommunication",
        "CollectiveHints": "CommunicationOptions",
        "CommunicationImplementation": "CommunicationImplementation",
        "CommunicationOptions": "CommunicationOptions",
        "MultiWorkerMirroredStrategy": "MultiWorkerMirroredStrategy",
        "ParameterServerStrategy": "ParameterServerStrategy",
        "PreemptionCheckpointHandler": "PreemptionCheckpointHandler",
        "coordinator": "coordinator",
        "partitioners": "partitioners",
        "TPUStrategy": "TPUStrategy",
        "TerminationConfig": "TerminationConfig",
        "ValueContext": "ValueContext",
    },
}


def resolve(name: str) -> Any:
    """Return the object `hpcdist.NAME`; imports its module.

    Raises:
        AttributeError: for a name that hpcdist does not have; the message says what is near it.
    """
    if name in MODULES:
        return import_module(f"hpcdist.{MODULES[name]}")
    if name not in NAMES:
        raise AttributeError(_missing("hpcdist", name, {**NAMES, **MODULES}))
    return getattr(import_module(f"hpcdist.{NAMES[name]}"), name)


def resolve_alias(path: str, name: str) -> Any:
    """Return the object `hpcdist.PATH.NAME`; raises as `resolve`."""
    aliases = ALIASES[path]
    if name not in aliases:
        raise AttributeError(_missing(f"hpcdist.{path}", name, aliases))
    return resolve(aliases[name])


def _missing(module: str, name: str, names: Collection[str]) -> str:
    """Return the message about a name that a module does not have."""
    advice = _ELSEWHERE.get(name, "")
    near = difflib.get_close_matches(name, names, cutoff=0.6)
    if near and not advice:
        advice = f"near it are {', '.join(near)}"
    if not advice:
        advice = "all names are in docs/reference/api.md"
    return f"module {module!r} has no attribute {name!r}; {advice}"


def stubs() -> dict[str, str]:
    """Return the text of every .pyi file by its name."""
    lines = [_import_of_module(module, name) for name, module in MODULES.items()]
    for name, module in NAMES.items():
        lines.append(f"from hpcdist.{module} import {name} as {name}")
    texts = {"__init__.pyi": "\n".join([*sorted(lines), "", "__version__: str", ""])}
    for path, aliases in ALIASES.items():
        lines = [f"from hpcdist import {target} as {name}" for name, target in aliases.items()]
        texts[f"{path}.pyi"] = "\n".join([*sorted(lines), ""])
    return texts


def _import_of_module(module: str, name: str) -> str:
    """Return the line that imports a module under its public name."""
    parent, _, leaf = module.rpartition(".")
    if not parent:
        return f"from hpcdist import {leaf} as {name}"
    return f"from hpcdist.{parent} import {leaf} as {name}"


def write_stubs() -> None:
    """Write the .pyi files beside this one."""
    for file_name, text in stubs().items():
        Path(__file__).with_name(file_name).write_text(text)

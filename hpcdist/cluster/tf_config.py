"""TFConfigClusterResolver: the cluster described by TF_CONFIG."""

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

from hpcdist.cluster.environment import read_environment
from hpcdist.cluster.resolvers import SimpleClusterResolver
from hpcdist.cluster.spec import ClusterSpec, Task
from hpcdist.errors import ConfigurationError

#: Valid keys of TF_CONFIG; the last two are TensorFlow's and are ignored.
KEYS = ("cluster", "task", "rpc_layer", "environment")


def parse_tf_config(text: str) -> tuple[ClusterSpec, Task | None]:
    """Parse TF_CONFIG. Empty text and `{}` mean no cluster, as in TensorFlow.

    Returns:
        The cluster, and the task or None if TF_CONFIG has no "task".

    Raises:
        ConfigurationError: on anything that is not a valid TF_CONFIG; the message states what was expected.
    """
    config = _parse_object(text)
    if not config:
        return ClusterSpec({}), None
    _check_keys(config, KEYS, "TF_CONFIG")
    cluster = config.get("cluster")
    if not isinstance(cluster, dict) or not any(cluster.values()):
        raise ConfigurationError(
            f'TF_CONFIG: expected "cluster" as an object of task types, got {cluster!r}; '
            'write {"cluster": {"worker": ["host:port", ...]}}.'
        )
    spec = ClusterSpec(cluster)
    return spec, _parse_task(config["task"], spec) if "task" in config else None


def _parse_object(text: str) -> dict[str, Any]:
    try:
        config = json.loads(text or "{}", object_pairs_hook=_object_without_repeats)
    except json.JSONDecodeError as error:
        raise ConfigurationError(
            f"TF_CONFIG: expected a JSON object, got {text[:60]!r} ({error}); check quotes and commas."
        ) from None
    if not isinstance(config, dict):
        raise ConfigurationError(f"TF_CONFIG: expected a JSON object, got {text[:60]!r}; write {{...}}.")
    return config


def _object_without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for key in keys if keys.count(key) > 1)
        raise ConfigurationError(f"TF_CONFIG: expected every key once, got {repeated!r} twice; keep one.")
    return found


def _check_keys(found: dict[str, Any], valid: tuple[str, ...], where: str) -> None:
    for key in found:
        if key not in valid:
            raise ConfigurationError(f"{where}: expected keys of {', '.join(valid)}, got {key!r}; remove it.")


def _parse_task(task: Any, spec: ClusterSpec) -> Task:
    if not isinstance(task, dict):
        raise ConfigurationError(
            f'TF_CONFIG: expected "task" as an object, got {task!r}; write {{"type": "worker", "index": 0}}.'
        )
    _check_keys(task, ("type", "index"), "TF_CONFIG.task")
    type_: Any = task.get("type")
    index: Any = task.get("index")
    if type(index) is str and index.isdecimal():  # as scripts write it, and TensorFlow takes it
        index = int(index)
    for key, value, kind in (("type", type_, str), ("index", index, int)):
        if type(value) is not kind:
            raise ConfigurationError(
                f"TF_CONFIG.task: expected {key!r} as {'text' if kind is str else 'a whole number'}, "
                f'got {value!r}; write {{"type": "worker", "index": 0}}.'
            )
    found = Task(type_, index)
    spec.check_task(found)
    return found


class TFConfigClusterResolver(SimpleClusterResolver):
    """The cluster described by TF_CONFIG. The environment is read once, when the resolver is created.

    Args:
        task_type, task_id: override the task in TF_CONFIG.
        rpc_layer, environment: accepted for compatibility and ignored.
        environ: a mapping to read instead of the process environment.

    Raises:
        ConfigurationError: if TF_CONFIG is not valid; on this rank only. A strategy raises it on all ranks.
    """

    def __init__(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        environment: str | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        source = read_environment() if environ is None else environ
        spec, task = parse_tf_config(source.get("TF_CONFIG", ""))
        if task_type is None and task is not None:
            task_type = task.type
        if task_id is None and task is not None:
            task_id = task.index
        super().__init__(spec, task_type if task_id is None else task_type or "worker", task_id)

    @property
    def host_names(self) -> Mapping[str, Task]:
        """Host part -> task, for each host that exactly one address names."""
        addresses = {task: self._spec.task_address(task.type, task.index) for task in self._spec.tasks()}
        hosts = {task: host.rpartition(":")[0] if ":" in host else host for task, host in addresses.items()}
        times = Counter(hosts.values())
        return {host: task for task, host in hosts.items() if times[host] == 1}

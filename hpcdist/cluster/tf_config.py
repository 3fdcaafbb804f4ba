"""TFConfigClusterResolver: the cluster described by TF_CONFIG."""

import difflib
import json
import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any

from hpcdist.cluster.environment import read_environment
from hpcdist.cluster.resolvers import ClusterResolver
from hpcdist.cluster.spec import ClusterSpec, Task
from hpcdist.errors import ConfigurationError

logger = logging.getLogger("hpcdist")

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
    except (json.JSONDecodeError, RecursionError) as error:
        why = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ConfigurationError(
            f"TF_CONFIG: expected a JSON object, got {text[:60]!r} ({why}); check quotes and commas."
        ) from None
    if not isinstance(config, dict):
        raise ConfigurationError(
            f"TF_CONFIG: expected a JSON object, got {text[:60]!r}; write {{...}}."
        )
    return config


def _object_without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    json_object = dict(pairs)
    if len(json_object) < len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for key in keys if keys.count(key) > 1)
        raise ConfigurationError(
            f"TF_CONFIG: expected every key once, got {repeated!r} twice; keep one."
        )
    return json_object


def _check_keys(section: dict[str, Any], valid: tuple[str, ...], where: str) -> None:
    """Raise ConfigurationError for a key that is a misspelt one; warn of others, which TensorFlow ignores, too."""
    missing = [key for key in valid if key not in section]
    for key in section:
        if key in valid:
            continue
        meant = difflib.get_close_matches(key, missing, 1, 0.7)
        if meant:
            raise ConfigurationError(
                f"{where}: expected keys of {', '.join(valid)}, got {key!r}; write {meant[0]!r}."
            )
        logger.warning(
            "%s: expected keys of %s, got %r, which is ignored.", where, ", ".join(valid), key
        )


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
    parsed_task = Task(type_, index)
    _check_task(parsed_task, spec)
    return parsed_task


def _check_task(task: Task, spec: ClusterSpec) -> None:
    """Raise ConfigurationError unless the cluster has the task; evaluator 0 need not be listed, and usually is not."""
    if task != Task("evaluator", 0) or spec.has_tasks("evaluator"):
        spec.check_task(task)


class TFConfigClusterResolver(ClusterResolver):
    """The cluster described by TF_CONFIG, which is read whenever a property is asked for, as in TensorFlow.

    Args:
        task_type, task_id: override the task in TF_CONFIG.
        rpc_layer: comes before addresses in `master`, with "://".
        environment: accepted for compatibility and ignored.
        environ: a mapping to read instead of the process environment.

    Raises:
        ConfigurationError: when a property is asked for, if TF_CONFIG is not valid; on this rank only. A strategy
            raises it on all ranks.
    """

    def __init__(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        environment: str | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self._explicit_task = (task_type, task_id)
        self._environ = environ
        self.rpc_layer = rpc_layer

    def _read(self) -> tuple[ClusterSpec, Task | None]:
        source = read_environment() if self._environ is None else self._environ
        spec, task = parse_tf_config(source.get("TF_CONFIG", ""))
        type_, index = self._explicit_task
        if type_ is None and index is None:
            return spec, task
        effective_task = Task(
            type_ or (task.type if task else "worker"),
            index if index is not None else task.index if task else 0,
        )
        if spec:
            _check_task(effective_task, spec)
        return spec, effective_task

    def resolve(self, rank: int, size: int) -> tuple[ClusterSpec, Task | None]:
        """Return the cluster and the task of TF_CONFIG."""
        return self._read()

    def cluster_spec(self) -> ClusterSpec:
        """Return the cluster."""
        return self._read()[0]

    @property
    def task_type(self) -> str | None:
        """This process's task type."""
        task = self._read()[1]
        return None if task is None else task.type

    @property
    def task_id(self) -> int | None:
        """This process's task index."""
        task = self._read()[1]
        return None if task is None else task.index

    @property
    def host_names(self) -> Mapping[str, Task]:
        """Host part -> task, for each host that exactly one address names."""
        spec = self.cluster_spec()
        addresses = {task: spec.task_address(task.type, task.index) for task in spec.tasks()}
        hosts = {
            task: host.rpartition(":")[0] if ":" in host else host
            for task, host in addresses.items()
        }
        times = Counter(hosts.values())
        return {host: task for task, host in hosts.items() if times[host] == 1}

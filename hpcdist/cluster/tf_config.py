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
from hpcdist.cluster.whole_numbers import whole_number
from hpcdist.errors import ConfigurationError

logger = logging.getLogger("hpcdist")

#: Valid keys of TF_CONFIG; the last two matter to TensorFlow alone, and are ignored.
KEYS = ("cluster", "task", "rpc_layer", "environment")


def parse_tf_config(text: str) -> tuple[ClusterSpec, Task | None]:
    """Parse TF_CONFIG. Empty text and `{}` mean no cluster, as in TensorFlow.

    Returns:
        The cluster, and the task or None if TF_CONFIG has no "task".

    Raises:
        ConfigurationError: if the text is not a valid TF_CONFIG; the message states what was expected.
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
    if "task" not in config:
        return spec, None
    return spec, _parse_task(config["task"], spec)


def _parse_object(text: str) -> dict[str, Any]:
    """Return the JSON object in a text, which is empty for an empty text.

    Raises:
        ConfigurationError: if the text is no JSON object.
    """
    try:
        config = json.loads(text or "{}", object_pairs_hook=_object_without_repeats)
    except ConfigurationError:  # a ValueError, too
        raise
    except (ValueError, RecursionError) as error:  # ValueError: also for thousands of digits
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
    """Return a JSON object from its keys and values.

    Raises:
        ConfigurationError: if it has a key twice.
    """
    n_values_of = Counter(key for key, _ in pairs)
    for key, n_values in n_values_of.items():
        if n_values > 1:
            raise ConfigurationError(
                f"TF_CONFIG: expected every key once, got {key!r} twice; keep one."
            )
    return dict(pairs)


def _check_keys(section: dict[str, Any], valid: tuple[str, ...], where: str) -> None:
    """Raise ConfigurationError for a misspelt key; warn of any other unknown key, which TensorFlow ignores, too."""
    valid_keys = ", ".join(valid)
    missing = set(valid).difference(section)
    for key in section:
        if key in valid:
            continue
        near = difflib.get_close_matches(key, missing, 1, 0.7)
        if near:
            raise ConfigurationError(
                f"{where}: expected only the keys {valid_keys}, got {key!r}; write {near[0]!r}."
            )
        logger.warning(
            "%s: expected only the keys %s, got %r, which is ignored.", where, valid_keys, key
        )


def _parse_task(task: Any, spec: ClusterSpec) -> Task:
    """Return the task that "task" of TF_CONFIG describes.

    Raises:
        ConfigurationError: if it describes no task of the cluster.
    """
    if not isinstance(task, dict):
        raise ConfigurationError(
            f'TF_CONFIG: expected "task" as an object, got {task!r}; write {{"type": "worker", "index": 0}}.'
        )
    _check_keys(task, ("type", "index"), "TF_CONFIG.task")
    type_: Any = task.get("type")
    index: Any = task.get("index")
    if type(index) is str:
        # scripts write an index as text, and TensorFlow accepts that
        number = whole_number(index)
        if number is not None:
            index = number
    expected_types = (("type", type_, str, "text"), ("index", index, int, "a whole number"))
    for key, value, expected_type, type_name in expected_types:
        if type(value) is not expected_type:
            raise ConfigurationError(
                f"TF_CONFIG.task: expected {key!r} as {type_name}, "
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
    """The cluster described by TF_CONFIG. As in TensorFlow, each use of a property reads TF_CONFIG again.

    Args:
        task_type, task_id: this process's task, in place of the one in TF_CONFIG.
        rpc_layer: protocol that comes before addresses in `master`, with "://".
        environment: accepted for compatibility and ignored.
        environ: a mapping to read instead of the process environment.

    Raises:
        ConfigurationError: when a property is used, if TF_CONFIG is not valid; on this rank only. A strategy raises it
            on all ranks.
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
        """Return the cluster and this process's task, which is None if it follows from the rank."""
        source = read_environment() if self._environ is None else self._environ
        spec, task = parse_tf_config(source.get("TF_CONFIG", ""))
        type_, index = self._explicit_task
        if type_ is None and index is None:
            return spec, task
        if task is None:
            task = Task("worker", 0)
        if index is None:
            index = task.index
        effective_task = Task(type_ or task.type, index)
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
        _, task = self._read()
        if task is None:
            return None
        return task.type

    @property
    def task_id(self) -> int | None:
        """This process's task index."""
        _, task = self._read()
        if task is None:
            return None
        return task.index

    @property
    def host_names(self) -> Mapping[str, Task]:
        """Host part -> task, for each host that exactly one address names."""
        spec = self.cluster_spec()
        host_of = {}
        for task in spec.tasks():
            address = spec.task_address(task.type, task.index)
            host, colon, _ = address.rpartition(":")
            host_of[task] = host if colon else address
        n_tasks_on = Counter(host_of.values())
        return {host: task for task, host in host_of.items() if n_tasks_on[host] == 1}

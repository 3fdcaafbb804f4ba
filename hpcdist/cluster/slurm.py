"""SlurmClusterResolver: hosts, ports and tasks from a Slurm step, for programs that need TF_CONFIG-like addresses.

It follows TensorFlow's resolver (tensorflow/python/distribute/cluster_resolver/slurm_cluster_resolver.py), with three
differences: it keeps the zero padding of host names and Slurm's order of hosts, and never writes the environment.
"""

import re
import subprocess
import time
from collections.abc import Mapping

from hpcdist.cluster.environment import read_environment
from hpcdist.cluster.resolvers import ClusterResolver
from hpcdist.cluster.spec import ClusterSpec, Task
from hpcdist.cluster.whole_numbers import whole_number
from hpcdist.errors import ConfigurationError

#: Longest wait for an answer of Slurm's controller.
_ANSWER_S = 10.0
_PART = re.compile(r"((?:[^,\[]|\[[^\]]*\])+)(?:,|$)")


def parse_hostlist(text: str) -> list[str]:
    """Expand Slurm's host list, such as `n[01-03,7],login` or `r[1-2]n[1-2]`, in Slurm's order.

    Raises:
        ConfigurationError: on brackets that do not match or ranges that run backwards.
    """
    if not re.fullmatch(r"(?:[\w.,\-]|\[[\d,\-]+\])+", text):
        raise ConfigurationError(
            f"slurm: expected a host list such as n[01-03], got {text!r}; check SLURM_STEP_NODELIST."
        )
    hosts: list[str] = []
    for part in _PART.findall(text):
        hosts += _expand(part)
    return hosts


def node_names(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the nodes of this Slurm step, or of its job; empty outside Slurm."""
    text = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
    if not text:
        return ()
    try:
        return tuple(parse_hostlist(text))
    except ConfigurationError:
        # even unexpanded, the text tells these nodes from others
        return (text,)


def time_left_s(environ: Mapping[str, str]) -> float | None:
    """Return how long Slurm lets this job run, in seconds; None outside Slurm, without a limit, or without an answer.

    Cost: a request to Slurm's controller, of at most 10 s.
    """
    job = environ.get("SLURM_JOB_ID")
    if not job:
        return None
    command = ["scontrol", "--oneliner", "show", "job", job]
    try:
        answer = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_ANSWER_S,
            env={**environ, "SLURM_TIME_FORMAT": "%s"},
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    end = re.search(r"\bEndTime=(\d{1,11})\b", answer.stdout)
    if end is None:
        return None
    return float(end[1]) - time.time()


def _expand(part: str) -> list[str]:
    """Return the hosts of one part of a host list, such as `n[01-03,7]`."""
    head, bracket, after_bracket = part.partition("[")
    if not bracket:
        return [part]
    inside, _, tail = after_bracket.partition("]")
    hosts = []
    for piece in inside.split(","):
        for number in _range(piece):
            for ending in _expand(tail):
                hosts.append(head + number + ending)
    return hosts


def _range(piece: str) -> list[str]:
    """Return the numbers of a range such as `01-03`, or a single number, with their leading zeros."""
    first, dash, last = piece.partition("-")
    if not dash:
        last = first
    first_number = whole_number(first)
    last_number = whole_number(last)
    if first_number is None or last_number is None or first_number > last_number:
        raise ConfigurationError(
            f"slurm: expected a range such as 01-03, got {piece!r}; check SLURM_STEP_NODELIST."
        )
    n_digits = len(first)
    numbers = range(first_number, last_number + 1)
    return [str(number).zfill(n_digits) for number in numbers]


def parse_tasks_per_node(text: str) -> list[int]:
    """Expand Slurm's `3(x2),2` into [3, 3, 2].

    Raises:
        ConfigurationError: if the text has another form.
    """
    counts: list[int] = []
    for piece in text.split(","):
        match = re.fullmatch(r"(\d{1,9})(?:\(x(\d{1,9})\))?", piece)
        if not match:
            raise ConfigurationError(
                f"slurm: expected counts such as 3(x2),2, got {text!r}; check SLURM_STEP_TASKS_PER_NODE."
            )
        n_tasks = int(match[1])
        n_nodes = int(match[2] or 1)
        counts += [n_tasks] * n_nodes
    return counts


class SlurmClusterResolver(ClusterResolver):
    """The cluster of this Slurm step: one task per rank; types are assigned to ranks in alphabetical order.

    Args:
        jobs: task type -> number of tasks; default: every rank a worker.
        port_base: port of the first task on each host; the next task on the host gets the next port.
        gpus_per_node, gpus_per_task: number of GPUs that `num_accelerators` returns for a task: `gpus_per_task`, else
            the GPUs of a node divided by its tasks; by default the GPUs that the process may use.
        tasks_per_node: number of tasks on each node, or a list with the number for every node; overrides
            SLURM_STEP_TASKS_PER_NODE.
        auto_set_gpu: accepted for compatibility: ranks take the GPUs of a host in their order, and no variable is set.
        rpc_layer: protocol that comes before addresses in `master`, with "://".
        environ: a mapping to read instead of the process environment.

    Raises:
        ConfigurationError: outside a Slurm step, or if the number of tasks differs from the step's.
    """

    def __init__(  # noqa: PLR0913  TensorFlow has the same parameters
        self,
        jobs: Mapping[str, int] | None = None,
        port_base: int = 8888,
        gpus_per_node: int | None = None,
        gpus_per_task: int | None = None,
        tasks_per_node: int | list[int] | None = None,
        auto_set_gpu: bool = True,
        rpc_layer: str | None = "grpc",
        *,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.rpc_layer = rpc_layer
        source = read_environment() if environ is None else environ
        hosts = parse_hostlist(_variable(source, "SLURM_STEP_NODELIST"))
        size = _whole_number(source, "SLURM_STEP_NUM_TASKS")
        counts = _counts_per_node(tasks_per_node, source, len(hosts))
        addresses = []
        for host, count in zip(hosts, counts, strict=True):
            for index in range(count):
                addresses.append(f"{host}:{port_base + index}")
        self._gpus_per_task = gpus_per_task
        if gpus_per_task is None and gpus_per_node is not None:
            self._gpus_per_task = gpus_per_node // max(counts)
        jobs = {"worker": size} if jobs is None else dict(jobs)
        n_jobs = sum(jobs.values())
        n_addresses = len(addresses)
        if not n_addresses == n_jobs == size:
            raise ConfigurationError(
                f"slurm: expected {size} tasks as in SLURM_STEP_NUM_TASKS, got {n_jobs} in jobs and {n_addresses} on "
                f"the nodes; make jobs and --ntasks agree."
            )
        self._tasks: list[Task] = []
        for type_ in sorted(jobs):
            for index in range(jobs[type_]):
                self._tasks.append(Task(type_, index))
        spec: dict[str, list[str]] = {}
        for task, address in zip(self._tasks, addresses, strict=True):
            spec.setdefault(task.type, []).append(address)
        self._spec = ClusterSpec(spec)
        self._rank = _whole_number(source, "SLURM_PROCID")
        if self._rank >= size:
            raise ConfigurationError(
                f"slurm: expected SLURM_PROCID below {size}, got {self._rank}; start by srun."
            )

    def resolve(self, rank: int, size: int) -> tuple[ClusterSpec, Task | None]:
        """Return the step's cluster and the task of SLURM_PROCID."""
        return self._spec, self._tasks[self._rank]

    def cluster_spec(self) -> ClusterSpec:
        """Return the step's cluster."""
        return self._spec

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: object = None,
    ) -> dict[str, int]:
        """Return {"GPU": n} for the GPUs of a task, or {} without any."""
        n_gpus = self._gpus_per_task
        if n_gpus is None:
            return super().num_accelerators()
        if n_gpus == 0:
            return {}
        return {"GPU": n_gpus}

    def get_task_info(self) -> tuple[str, int]:
        """Return (task type, task index) of this rank."""
        return self.task_type, self.task_id

    @property
    def task_type(self) -> str:
        """This rank's task type."""
        return self._tasks[self._rank].type

    @property
    def task_id(self) -> int:
        """This rank's task index."""
        return self._tasks[self._rank].index


def _variable(environ: Mapping[str, str], name: str) -> str:
    """Return the value of a variable that Slurm sets in a step.

    Raises:
        ConfigurationError: if it is not set.
    """
    if not environ.get(name):
        raise ConfigurationError(
            f"slurm: expected {name} in the environment, got nothing; start the program by srun."
        )
    return environ[name]


def _whole_number(environ: Mapping[str, str], name: str) -> int:
    """Return the value of a variable that Slurm sets to a whole number.

    Raises:
        ConfigurationError: if it is not set, or no whole number.
    """
    text = _variable(environ, name)
    number = whole_number(text)
    if number is None:
        raise ConfigurationError(
            f"slurm: expected {name} as a whole number, got {text!r}; start the program by srun."
        )
    return number


def _counts_per_node(
    tasks_per_node: int | list[int] | None,
    environ: Mapping[str, str],
    n_hosts: int,
) -> list[int]:
    """Return the number of tasks on each host.

    Raises:
        ConfigurationError: if there is not one number for each host.
    """
    if isinstance(tasks_per_node, int):
        return [tasks_per_node] * n_hosts
    counts = tasks_per_node or parse_tasks_per_node(_variable(environ, "SLURM_STEP_TASKS_PER_NODE"))
    if len(counts) != n_hosts:
        raise ConfigurationError(
            f"slurm: expected task counts for {n_hosts} hosts, got {len(counts)}; check SLURM_STEP_TASKS_PER_NODE."
        )
    return list(counts)

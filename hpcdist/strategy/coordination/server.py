"""Server: the call by which workers and parameter servers serve a coordinator, in place of running a program."""

import sys
from typing import Any, NoReturn

from hpcdist.cluster.resolvers import ClusterResolver, SimpleClusterResolver
from hpcdist.cluster.spec import ClusterSpec
from hpcdist.errors import UsageError
from hpcdist.runtime.process import make_world
from hpcdist.runtime.world import World
from hpcdist.strategy.coordination.worker import serve_closures
from hpcdist.strategy.parameter_server import ParameterServerStrategy


class Server:
    """Serves a coordinator, as tf.distribute.Server: a worker runs functions, a ps holds variables.

    >>> resolver = hpcdist.cluster_resolver.TFConfigClusterResolver()
    >>> if resolver.task_type in ("worker", "ps"):
    ...     hpcdist.Server(resolver).join()              # never returns
    >>> strategy = hpcdist.ParameterServerStrategy(resolver)

    Not collective.

    Args:
        resolver: says which tasks there are, and which one this rank is; or a ClusterSpec, or a dict as in TF_CONFIG's
            "cluster". Default: TF_CONFIG, else HPCDIST_ROLES.
        job_name: type of this rank's task, where the first argument does not say it.
        task_index: number of this rank's task, where the first argument does not say it.
        protocol, config, start: accepted for compatibility with tf.distribute; MPI carries everything.

    Raises:
        UsageError: for a cluster without this rank's task.
    """

    def __init__(
        self,
        resolver: ClusterResolver | ClusterSpec | dict[str, Any] | None = None,
        job_name: str | None = None,
        task_index: int | None = None,
        protocol: str | None = None,
        config: Any = None,
        start: bool = True,
    ) -> None:
        if resolver is not None and not isinstance(resolver, ClusterResolver):
            spec = resolver if isinstance(resolver, ClusterSpec) else ClusterSpec(resolver)
            if job_name is None or task_index is None:
                raise UsageError(
                    f"Server: expected job_name and task_index beside a cluster, got {job_name!r} and {task_index!r}; "
                    f"pass resolver.task_type and resolver.task_id, or the resolver itself."
                )
            resolver = SimpleClusterResolver(spec, job_name, task_index)
        self._resolver = resolver

    @property
    def target(self) -> str:
        """Address of this server, for compatibility: in MPI ranks find each other without one."""
        return "mpi://"

    def join(self) -> NoReturn:
        """Serve until the coordinator has left, and exit with its code. Call it before anything else that communicates.

        A ps serves workers that run the program themselves as well.

        Collective over all ranks; the coordinator, or every worker, makes a ParameterServerStrategy meanwhile.

        Raises:
            ConfigurationError: when roles do not fit; on all ranks alike.
            SystemExit: when the job has ended, with the code of the chief.
        """
        strategy = _Serving(self._resolver)  # a ps serves in there
        sys.exit(serve_closures(strategy))


class _Serving(ParameterServerStrategy):
    """The strategy of a rank that serves, in which functions run."""

    def _make_world(self, resolver: ClusterResolver | None) -> World:
        return make_world(resolver, serves=True)

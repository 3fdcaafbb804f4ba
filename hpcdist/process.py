"""This process as one of the job's: the world that its parts share, and the end of the whole job.

The only state that lives in a module. It is made at first use, behind hooks that end every rank when one fails, and
freed at exit.
"""

from collections.abc import Callable
from typing import NoReturn

from hpcdist import abort
from hpcdist.abort import AbortHooks
from hpcdist.cluster.environment import launcher_of, read_environment
from hpcdist.cluster.resolver import ClusterResolver
from hpcdist.errors import CollectiveTimeoutError
from hpcdist.mpi import MPI, start_timeout_s
from hpcdist.world import World, wait_for_ranks

_process_world: World | None = None
_hooks: AbortHooks | None = None


def make_world(resolver: ClusterResolver | None = None) -> World:
    """Return the process-wide world, making it at first use.

    A later explicit resolver, or one of fewer ranks than were started, makes a world of its own.

    Collective where a world is made: at the first call in a program all ranks, later those of the resolver.

    Raises:
        ConfigurationError: as `World`; on every rank alike.
    """
    global _process_world
    _install_hooks()
    comm = getattr(resolver, "comm", None)
    if _process_world is None and (comm is None or comm.size == MPI.COMM_WORLD.size):
        _process_world = World(resolver)
        return _process_world
    return _process_world if resolver is None and _process_world is not None else World(resolver)


def end_job(report: str, code: int) -> NoReturn:
    """Write `report` to standard error and end every rank of the job with `code`. Not collective; from any thread."""
    abort.end_job(MPI.COMM_WORLD, report, code)


def has_left() -> bool:
    """Return whether this rank has left its program and waits for others to leave. Not collective; from any thread."""
    return _hooks is not None and _hooks.is_leaving


def tell_busy() -> None:
    """Let ranks that have left their programs wait for this one, for some seconds more. Not collective; main thread."""
    if _hooks is not None:
        _hooks.tell_busy()


def call_when_done(act: Callable[[], None] | None) -> None:
    """Have `act` called, in place of what was given before, once all ranks have left their programs with code 0.

    It may write to disks, and must not communicate: whether others have one is not known. Not collective.
    """
    if _hooks is not None:
        _hooks.on_done = act


def _install_hooks() -> None:
    """Install the abort hooks before anything else, so that a failing set-up ends all ranks too."""
    global _hooks
    if _hooks is None:
        launcher = launcher_of(read_environment())
        _wait_for_world()
        comm = MPI.COMM_WORLD.Dup()
        is_speaker = comm.rank == 0 and (launcher is None or comm.size > 1 or launcher.rank == 0)
        _hooks = AbortHooks(comm, _describe_process, is_speaker, _free_process_world)
        _hooks.install()


def _wait_for_world() -> None:
    """Return when all ranks are here. There are no hooks yet that would end the job if one does not come."""
    try:
        wait_for_ranks(MPI.COMM_WORLD.Ibarrier(), start_timeout_s(), _describe_process())
    except CollectiveTimeoutError as error:
        end_job(f"hpcdist: {error}\n", int(error.exit_code))


def _describe_process() -> str:
    return _process_world.describe() if _process_world else f"rank {MPI.COMM_WORLD.rank}"


def _free_process_world() -> None:
    if _process_world is not None:
        _process_world.free()

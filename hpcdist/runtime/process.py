"""This process as one rank of the job: the world that its parts share, and the end of the whole job.

The world is made at first use, behind hooks that end every rank when one fails, and freed at exit.
"""

import atexit
import os
from collections.abc import Callable
from typing import NoReturn

from hpcdist.cluster.environment import launcher_of, read_environment
from hpcdist.cluster.resolvers import ClusterResolver
from hpcdist.errors import UsageError
from hpcdist.runtime import job_end
from hpcdist.runtime.job_end import ExitHooks
from hpcdist.runtime.mpi import MPI, start, start_timeout_s
from hpcdist.runtime.waiting import late, wait_until
from hpcdist.runtime.world import World

#: World that all parts of this process share, as MPI gives a process one set of ranks.
_process_world: World | None = None
#: Hooks of this process, as it exits once.
_hooks: ExitHooks | None = None


def make_world(resolver: ClusterResolver | None = None, serves: bool = False) -> World:
    """Return the process-wide world, making it at first use.

    An explicit resolver after the first call, or one of fewer ranks than were started, makes a separate world; so does
    a rank that serves.

    Collective where a world is made: over all ranks at the first call in a program, later over the resolver's ranks.

    Raises:
        ConfigurationError: as `World`; on every rank alike.
        UsageError: in a process that was forked from a rank, such as a worker of a DataLoader.
    """
    global _process_world
    if _hooks is not None and _hooks.is_forked:
        raise UsageError(
            f"world: expected the process of a rank, got process {os.getpid()}, which was forked from it and must not "
            f"use MPI; call hpcdist in the rank, or from a program that is started by subprocess.run."
        )
    _install_hooks()
    comm = getattr(resolver, "comm", None)
    if _process_world is None and (comm is None or comm.size == MPI.COMM_WORLD.size):
        _process_world = World(resolver, serves=serves)
        return _process_world
    if _process_world is not None and resolver is None and not serves:
        return _process_world
    return World(resolver, serves=serves)


def end_job(report: str, code: int) -> NoReturn:
    """Write `report` to standard error and end every rank of the job with `code`. Not collective; from any thread."""
    if _hooks is not None:
        _hooks.announce_failure()
    job_end.end_job(MPI.COMM_WORLD, report, code)


def has_left() -> bool:
    """Return whether this rank has left its program, or has finalized MPI: others may leave too.

    Not collective; from any thread.
    """
    return MPI.Is_finalized() or (_hooks is not None and _hooks.is_leaving)


def send_heartbeat() -> None:
    """Let ranks that have left wait some seconds more for this one, which is at work. Not collective; main thread."""
    if _hooks is not None:
        _hooks.send_heartbeat()


def call_on_failure(act: Callable[[], None]) -> None:
    """Have `act` called, too, right before this rank ends the job. It must take no lock. Not collective."""
    if _hooks is not None:
        _hooks.call_on_failure(act)


def call_on_uncaught(act: Callable[[str, str], None]) -> None:
    """Have act(what, traceback) called, in place of an earlier one, for each uncaught exception of this rank.

    `act` must return within a bounded time. Not collective.
    """
    if _hooks is not None:
        _hooks.call_on_uncaught(act)


def call_when_done(act: Callable[[], None] | None) -> None:
    """Have `act` called, in place of an earlier one, once all ranks have left their programs with code 0.

    It may write to disks, and communicate with ranks that are known to have registered it too, such as the ranks that
    have made a handler together. Not collective.
    """
    if _hooks is not None:
        _hooks.call_when_done(act)


def _install_hooks() -> None:
    """Install the exit hooks before anything else, so that a failing set-up ends all ranks too."""
    global _hooks
    start()
    if _hooks is not None:
        return
    # no hooks would end the job yet if a rank does not come
    if not wait_until(MPI.COMM_WORLD.Ibarrier().Test, start_timeout_s()):
        error = late("world", start_timeout_s(), "some ranks", _describe_process())
        end_job(f"hpcdist: {error}\n", int(error.exit_code))
    launcher = launcher_of(read_environment())
    comm = MPI.COMM_WORLD.Dup()
    is_reporter = comm.rank == 0 and (launcher is None or comm.size > 1 or launcher.rank == 0)
    _hooks = ExitHooks(
        comm, _describe_process, is_reporter, _free_process_world, _is_beside_training
    )
    _hooks.install()
    atexit.register(_announce_end)  # runs before the hooks wait for the others


def _announce_end() -> None:
    """Notify evaluators and parameter servers that the chief leaves: their loops would otherwise run for ever."""
    if _hooks is not None and _process_world is not None and _process_world.is_chief:
        _hooks.announce_end(_process_world.side_ranks)


def end_of_training() -> int | None:
    """Return, on an evaluator or a parameter server, the chief's exit code once it has left its program; else None.

    Not collective. Cost: about a microsecond.
    """
    return None if _hooks is None else _hooks.announced_end()


def _describe_process() -> str:
    if _process_world is None:
        return f"rank {MPI.COMM_WORLD.rank}"
    return _process_world.describe()


def _is_beside_training() -> bool:
    """Return whether this rank is an evaluator beside ranks that train."""
    return (
        _process_world is not None
        and _process_world.task.type == "evaluator"
        and MPI.COMM_WORLD.size > 1
    )


def _free_process_world() -> None:
    if _process_world is not None:
        _process_world.free()

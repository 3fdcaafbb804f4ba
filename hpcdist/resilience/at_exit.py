"""Wait for the last save when the program ends, and fail if it cannot be written."""

import atexit
import logging
import os
import weakref

from hpcdist.errors import AttemptReplaced, CheckpointError
from hpcdist.resilience.progress import DiskProgress
from hpcdist.runtime.process import end_job, send_heartbeat

logger = logging.getLogger("hpcdist")


def finish_at_exit(owner: object, progress: DiskProgress) -> None:
    """Make the interpreter wait for the owner's saves at exit, even if the owner has been collected by then.

    Not collective. Dropping the owner never blocks: the background thread itself may drop the last reference.
    """
    atexit.register(_finish_held, weakref.ref(owner), weakref.ref(progress), os.getpid())
    weakref.finalize(owner, _finish_later, progress, os.getpid()).atexit = False


def _finish_held(owner: "weakref.ref[object]", progress: "weakref.ref[DiskProgress]", pid: int) -> None:
    held = progress()
    if owner() is not None and held is not None:
        _finish(held, pid, is_held=True)


def _finish_later(progress: DiskProgress, pid: int) -> None:
    if not progress.is_settled:
        atexit.register(_finish, progress, pid, is_held=False)


def _finish(progress: DiskProgress, pid: int, is_held: bool) -> None:
    if os.getpid() != pid:  # a forked child does not inherit the background thread
        return
    try:
        progress.finish_alone(send_heartbeat)
    except CheckpointError as error:
        if isinstance(error, AttemptReplaced) and not is_held:  # possibly replaced by the program's next manager
            logger.warning("%s", error)
        else:  # raising here would make Python print the error and exit with 0
            end_job(f"hpcdist: {error}\n", int(error.exit_code))

"""The last save of a process, when its program ends: waited for, and told of if it cannot be written."""

import atexit
import logging
import os
import weakref

from hpcdist.errors import AttemptReplaced, CheckpointError
from hpcdist.resilience.progress import DiskProgress
from hpcdist.runtime.process import end_job, send_heartbeat

logger = logging.getLogger("hpcdist")


def finish_at_exit(owner: object, progress: DiskProgress) -> None:
    """Let the end of the program wait for the saves of an owner, also if nobody holds that any more by then.

    Not collective. Who lets go of the owner waits for nothing: it may be the thread that writes.
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
    if os.getpid() != pid:  # a forked child has no such thread
        return
    try:
        progress.finish_alone(send_heartbeat)
    except CheckpointError as error:
        if isinstance(error, AttemptReplaced) and not is_held:  # by the program's next manager, maybe
            logger.warning("%s", error)
        else:  # Python would print it and leave with 0
            end_job(f"hpcdist: {error}\n", int(error.exit_code))

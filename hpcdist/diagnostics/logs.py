"""A log file for each rank, and the chief's records on the screen."""

import logging
import os
from pathlib import Path

from hpcdist.errors import CheckpointError
from hpcdist.runtime.process import make_world


def log_to(directory: str | os.PathLike[str], level: int = logging.INFO) -> Path:
    """Write this rank's log records to a file of its own; on the screen those of the chief alone are left.

    That concerns the root logger of Python's logging, whose handlers are replaced; what a program prints goes where the
    launcher sends it. A restart appends.

    Collective: all ranks.

    Args:
        directory: made if it is not there. The files are `rank-00003.log`.
        level: records below it are left out, in the files too.

    Returns:
        This rank's file.

    Raises:
        CheckpointError: if a file cannot be written; on all ranks.
    """
    world = make_world()
    path = Path(directory) / f"rank-{world.comm.rank:05d}.log"
    rank = str(world)  # without the step, which goes on
    with world.agreed(world.comm):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handlers: list[logging.Handler] = [logging.FileHandler(path)]
        except OSError as error:
            raise CheckpointError(
                f"log_to: expected to write {path}, got {error.strerror} on {rank}; choose a folder that every rank "
                f"can write."
            ) from None
    if world.is_chief:
        handlers.append(logging.StreamHandler())
    logging.basicConfig(
        handlers=handlers,
        level=level,
        format=f"%(asctime)s %(levelname)s {rank.replace('%', '%%')} %(name)s: %(message)s",
        force=True,
    )
    return path

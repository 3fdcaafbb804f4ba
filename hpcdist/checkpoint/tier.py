"""One place where a process keeps checkpoints: a folder, the room for a file, and the thread that writes it."""

import functools
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

from hpcdist.background import BackgroundThread
from hpcdist.checkpoint.folder import CheckpointFolder
from hpcdist.checkpoint.image import FileImage
from hpcdist.checkpoint.layout import lay_out
from hpcdist.checkpoint.manifest import Manifest
from hpcdist.checkpoint.reader import Found
from hpcdist.checkpoint.retention import Retention
from hpcdist.checkpoint.tree import NamedArray


class Tier:
    """Saves into one folder, one save at a time, in the background.

    Args:
        folder: where to.
        retention: what stays.

    Attributes:
        folder: see above.
        verified_step: of the last checkpoint that is durable and was read back; -1 before.
        last_save_s: how long that took, from the copy on; None before.
        last: what was committed last, or restored since; None before.
    """

    def __init__(self, folder: CheckpointFolder, retention: Retention) -> None:
        self.folder = folder
        self.verified_step = -1
        self.last_save_s: float | None = None
        self.last: Manifest | None = None
        self._retention = retention
        self._image = FileImage()
        self._thread = BackgroundThread("hpcdist-saver")
        self._committing: Future[Manifest] | None = None
        self._tidying: Future[None] | None = None
        self._reading: Future[Found | None] | None = None

    def save(
        self,
        step: int,
        state: Any,
        arrays: list[NamedArray],
        written: dict[str, Any],
        metrics: Mapping[str, float] | None,
        is_changed: bool = True,
    ) -> Path | None:
        """Copy a state, have it written and what is older pruned; return the path that its file will have.

        Args:
            step: optimizer steps taken.
            state: as JSON.
            arrays: its arrays.
            written: by whom.
            metrics: for the manifest; None: those of the last one, if it is of the same step.
            is_changed: whether it is known to differ from what was saved or restored last; else that is looked at, and
                None returned where it does not.

        Raises:
            CheckpointError: when the save before cannot be written, or this one cannot begin.
        """
        self.finish()
        started = time.monotonic()
        path = self.folder.new_data_path(step)
        lay_out(self._image, state, arrays)
        if not is_changed and self.last is not None and self._image.digest() == self.last.xxh3_128:
            return None
        if metrics is None:
            metrics = self.last.metrics if self.last is not None and self.last.step == step else {}
        facts = {"time_s": time.time(), "metrics": {name: float(value) for name, value in metrics.items()}}
        commit = functools.partial(self.folder.commit, step, path, self._image, written, **facts)
        self._committing = self._thread.submit(commit)
        self._tidying = self._thread.submit(functools.partial(self._tidy, self._committing, started))
        return path

    def _tidy(self, committing: "Future[Manifest]", started: float) -> None:
        if committing.exception() is None:
            self.folder.prune(committing.result(), self._retention)
            self.verified_step, self.last_save_s = committing.result().step, time.monotonic() - started
            self.last = committing.result()

    def is_committing(self, for_s: float) -> bool:
        """Return whether the last save is not durable yet, after waiting for it for some seconds."""
        return _is_under_way(self._committing, for_s)

    def is_busy(self, for_s: float) -> bool:
        """Return whether the last save is not durable and read back yet, after waiting for it for some seconds."""
        return _is_under_way(self._tidying, for_s)

    def read(self, read: Callable[[], Found | None]) -> None:
        """Begin to read a checkpoint: `read` looks for it."""
        self._reading = self._thread.submit(read)

    def is_reading(self, for_s: float) -> bool:
        """Return whether what was begun to be read is not read yet, after waiting for it for some seconds."""
        return _is_under_way(self._reading, for_s)

    def finish_reading(self) -> Found | None:
        """Return what was read.

        Raises:
            CheckpointError: when it could not be.
        """
        assert self._reading is not None, "read comes first"
        reading, self._reading = self._reading, None
        return reading.result()

    @property
    def n_blocks(self) -> int:
        """Blocks written and read so far: as long as it goes up, a save or restore that takes long is not stuck."""
        return self._image.n_blocks + self.folder.n_blocks_read

    @property
    def is_settled(self) -> bool:
        """Whether no save is under way, and none has failed that nobody was told of."""
        saves = [future for future in (self._committing, self._tidying) if future is not None]
        return all(future.done() and future.exception() is None for future in saves)

    def finish_commit(self) -> None:
        """Return when the last save is durable.

        Raises:
            CheckpointError: when it could not be written; told once.
        """
        committing, self._committing = self._committing, None
        if committing is not None:
            committing.result()

    def finish(self) -> None:
        """Return when the last save is durable, was read back, and older ones are pruned.

        Raises:
            CheckpointError: when it could not be written; told once.
        """
        self.finish_commit()
        tidying, self._tidying = self._tidying, None
        if tidying is not None:
            tidying.result()


def _is_under_way(future: "Future[Any] | None", for_s: float) -> bool:
    return future is not None and future not in wait([future], for_s).done

"""One place where a process keeps checkpoints: a folder, the room for a file, and the thread that writes it."""

import functools
import time
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from hpcdist.checkpoint.folder import CheckpointFolder
from hpcdist.checkpoint.image import FileImage
from hpcdist.checkpoint.layout import lay_out
from hpcdist.checkpoint.manifest import Manifest
from hpcdist.checkpoint.retention import Retention
from hpcdist.checkpoint.tree import NamedArray
from hpcdist.checkpoint.writer import BackgroundWriter


class Tier:
    """Saves into one folder, one save at a time, in the background.

    Args:
        folder: where to.
        retention: what stays.

    Attributes:
        folder: see above.
        n_committed: checkpoints that are durable.
    """

    def __init__(self, folder: CheckpointFolder, retention: Retention) -> None:
        self.folder = folder
        self.n_committed = 0
        self._retention = retention
        self._image = FileImage()
        self._writer = BackgroundWriter()
        self._saving: list[Future[Any]] = []

    def save(
        self,
        step: int,
        state: Any,
        arrays: list[NamedArray],
        written: dict[str, Any],
        metrics: Mapping[str, float],
        blocking: bool,
    ) -> Path:
        """Copy a state, have it written and what is older pruned; return the file's path.

        Args:
            step: optimizer steps taken.
            state: as JSON.
            arrays: its arrays.
            written: by whom.
            metrics: for the manifest.
            blocking: whether to return when the file is durable.

        Raises:
            CheckpointError: when this save or the one before cannot be written.
        """
        self.finish()
        path = self.folder.new_data_path(step)
        lay_out(self._image, state, arrays)
        facts = {"time_s": time.time(), "metrics": {name: float(value) for name, value in metrics.items()}}
        commit = functools.partial(self.folder.commit, step, path, self._image, written, **facts)
        committing = self._writer.submit(commit)
        tidying = self._writer.submit(functools.partial(self._tidy, committing))
        self._saving = [tidying] if blocking else [committing, tidying]
        if blocking:
            committing.result()
        return path

    def _tidy(self, committing: "Future[Manifest]") -> None:
        if committing.exception() is None:
            self.n_committed += 1
            self.folder.prune(committing.result(), self._retention)

    def finish(self) -> None:
        """Return when the last save is durable, was read back, and older ones are pruned.

        Raises:
            CheckpointError: when it could not be written.
        """
        saving, self._saving = self._saving, []
        for part in saving:
            part.result()

"""A folder of checkpoints: commit, the latest that verifies, and keep the last few."""

import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hpcdist.checkpoint import durable
from hpcdist.checkpoint.format import digest_file, read_file, write_file
from hpcdist.checkpoint.manifest import Manifest, read_manifest
from hpcdist.checkpoint.tree import NamedArray
from hpcdist.errors import CheckpointDamaged, CheckpointError

logger = logging.getLogger("hpcdist")

_MANIFEST = re.compile(r"step-(\d{8,})\.json$")
_DATA = re.compile(r"step-(\d{8,})\.h5$")


class CheckpointFolder:
    """Committed checkpoints `step-00001200.h5`, each with its manifest `step-00001200.json`.

    One process writes; any may read.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.path = Path(folder)

    def create(self) -> None:
        """Make the folder ready for writing and sweep what killed writers left.

        Raises:
            CheckpointError: when it cannot be written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            durable.sweep_temporary(self.path)
            if not os.access(self.path, os.W_OK | os.X_OK):
                raise PermissionError(13, "Permission denied", str(self.path))
        except OSError as error:
            raise CheckpointError(
                f"save: expected a folder that can be written at {self.path}, got {error.strerror}; choose another."
            ) from None

    def data_path(self, step: int) -> Path:
        """Return the path of a step's HDF5 file."""
        return self.path / f"step-{step:08d}.h5"

    def manifest_path(self, step: int) -> Path:
        """Return the path of a step's manifest."""
        return self.path / f"step-{step:08d}.json"

    def steps(self) -> list[int]:
        """Return the steps that have a manifest, oldest first; not verified."""
        return self._steps(_MANIFEST)

    def _steps(self, pattern: re.Pattern[str]) -> list[int]:
        names = os.listdir(self.path) if self.path.is_dir() else []
        return sorted(int(match[1]) for name in names if (match := pattern.match(name)))

    def commit(self, step: int, state: Any, arrays: list[NamedArray], written: dict[str, Any]) -> Path:
        """Write a checkpoint and return its path once it is durable.

        The HDF5 file is complete and on the disk before its manifest names it; a crash at any point leaves the earlier
        checkpoints as they were.

        Raises:
            CheckpointError: when the file system refuses; earlier checkpoints are untouched.
        """
        path = self.data_path(step)
        digests: list[tuple[int, str]] = []

        def write_data(temporary: Path) -> None:
            write_file(temporary, state, arrays)
            digests.append(digest_file(temporary))

        try:
            durable.remove(self.manifest_path(step))
            durable.replace_file(path, write_data)
            manifest = Manifest(step, *digests[0], written)
            durable.replace_file(self.manifest_path(step), lambda to: _write_text(to, manifest.to_text()))
        except (OSError, RuntimeError) as error:
            if isinstance(error, CheckpointError):
                raise
            reason = getattr(error, "strerror", None) or " ".join(str(error).split())[:200]
            nbytes = sum(array.values.nbytes for array in arrays)
            raise CheckpointError(
                f"save: expected to write {nbytes} bytes to {path}, got {reason}; free space or choose another folder. "
                f"Earlier checkpoints are untouched."
            ) from None
        return path

    def read_latest(self) -> tuple[Manifest, Any, list[NamedArray]] | None:
        """Return (manifest, state, arrays) of the latest checkpoint that verifies; None when there is no checkpoint.

        Damaged ones are stepped over, with the reason in the log.

        Raises:
            CheckpointError: when there are checkpoints and none verifies, or one is of a newer format.
        """
        found = self._first_sound(lambda manifest, path: (manifest, *read_file(path)))
        return found if found is None else (found[0], found[1], found[2])

    def latest(self) -> Path | None:
        """Return the path of the latest checkpoint that verifies, else as `read_latest`."""
        found: Path | None = self._first_sound(lambda manifest, path: path)
        return found

    def _first_sound(self, use: Callable[[Manifest, Path], Any]) -> Any:
        steps = self.steps()
        for step in reversed(steps):
            try:
                manifest = read_manifest(self.manifest_path(step))
                manifest.verify(self.data_path(step))
                return use(manifest, self.data_path(step))
            except CheckpointDamaged as error:
                logger.warning("step %d is skipped: %s", step, error)
        if steps:
            raise CheckpointError(
                f"restore: expected a checkpoint that verifies in {self.path}, got {len(steps)} damaged; restore one "
                f"from a backup, or start with a new run folder."
            )
        return None

    def set_aside_after(self, step: int) -> None:
        """Rename checkpoints later than `step` to *.bad: they were found damaged, and must not count as newer."""
        for later in (one for one in self.steps() if one > step):
            for path in (self.manifest_path(later), self.data_path(later)):
                if path.exists():
                    os.replace(path, path.with_name(path.name + ".bad"))

    def prune(self, max_to_keep: int) -> None:
        """Keep the last `max_to_keep` checkpoints, and no files of older ones. Manifests go first."""
        kept = self.steps()[-max_to_keep:]
        for pattern, path_of in ((_MANIFEST, self.manifest_path), (_DATA, self.data_path)):
            for step in self._steps(pattern):
                if kept and step < kept[0]:
                    durable.remove(path_of(step))


def _write_text(path: Path, text: str) -> None:
    path.write_text(text)


def latest_checkpoint(directory: str | os.PathLike[str]) -> str | None:
    """Return the path of the latest checkpoint in `directory` that verifies; None when there is none.

    Not collective. Checkpoints that are damaged are skipped, and the log says why.

    Raises:
        CheckpointError: when there are checkpoints and none verifies, or one was written by a newer hpcdist.
    """
    found = CheckpointFolder(directory).latest()
    return None if found is None else str(found)

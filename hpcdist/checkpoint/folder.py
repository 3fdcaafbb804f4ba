"""A folder of checkpoints: commit, the latest that verifies, and keep the last few."""

import logging
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hpcdist.checkpoint import durable
from hpcdist.checkpoint.format import digest_file, read_file, write_file
from hpcdist.checkpoint.manifest import Manifest, read_manifest
from hpcdist.checkpoint.tree import NamedArray
from hpcdist.errors import CheckpointDamaged, CheckpointError

logger = logging.getLogger("hpcdist")

_MANIFEST = re.compile(r"step-(\d{8,})\.json$")
_DATA = re.compile(r"step-(\d{8,})(-\d+)?\.h5$")


class CheckpointFolder:
    """Committed checkpoints: a manifest `step-00001200.json`, and the file it names, `step-00001200.h5`.

    One process writes; any may read. A step that is saved again gets a file of another name, `step-00001200-1.h5`, so
    that its manifest names one whole file at any time.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.path = Path(folder)

    def create(self) -> None:
        """Make the folder ready for writing: lock it, and sweep what killed writers left.

        Raises:
            CheckpointError: when it cannot be written, or another process writes there.
        """
        with self._explained("save", "a folder that can be written"):
            durable.make_folder(self.path)
            durable.lock_file(self.path / ".lock")
            durable.sweep_temporary(self.path)

    def manifest_path(self, step: int) -> Path:
        """Return the path of a step's manifest."""
        return self.path / f"step-{step:08d}.json"

    def steps(self) -> list[int]:
        """Return the steps that have a manifest, oldest first; not verified.

        Raises:
            CheckpointError: when the folder is there and cannot be read.
        """
        return sorted(int(match[1]) for name in self._names() if (match := _MANIFEST.match(name)))

    def _names(self) -> list[str]:
        with self._explained("restore", "a folder that can be read"):
            return os.listdir(self.path) if self.path.is_dir() else []

    def commit(self, step: int, state: Any, arrays: list[NamedArray], written: dict[str, Any]) -> Path:
        """Write a checkpoint and return its path once it is durable and verified.

        The HDF5 file is complete and on the disk before a manifest names it; a crash at any point leaves what was
        committed before as it was, also an earlier save of the same step.

        Raises:
            CheckpointError: when the file system refuses, or the folder has a later step.
        """
        self._check_last(step)
        path = self._new_data_path(step)
        digests: list[tuple[int, str]] = []

        def write_data(temporary: Path) -> None:
            write_file(temporary, state, arrays)
            digests.append(digest_file(temporary))

        nbytes = sum(array.values.nbytes for array in arrays)
        with self._explained("save", f"to write {nbytes} bytes to {path.name}"):
            durable.replace_file(path, write_data)
            manifest = Manifest(step, path.name, *digests[0], written)
            durable.replace_file(self.manifest_path(step), lambda to: _write_text(to, manifest.to_text()))
        manifest.verify(path)
        return path

    def _check_last(self, step: int) -> None:
        last = max(self.steps(), default=-1)
        if step < last:
            raise CheckpointError(
                f"save: expected a step after {last}, the last one in {self.path}, got {step}; restore first, or "
                f"choose another folder."
            )

    def _new_data_path(self, step: int) -> Path:
        names, name, number = set(self._names()), f"step-{step:08d}.h5", 0
        while name in names and self.manifest_path(step).name in names:
            number += 1
            name = f"step-{step:08d}-{number}.h5"
        return self.path / name

    def read_latest(self) -> tuple[Manifest, Any, list[NamedArray]] | None:
        """Return (manifest, state, arrays) of the latest checkpoint that verifies; None when there is no checkpoint.

        Damaged ones are stepped over, with the reason in the log.

        Raises:
            CheckpointError: when there are checkpoints and none verifies, or one is of a newer format.
        """
        found = self._first_sound(lambda manifest, path: (manifest, *read_file(path)))
        return None if found is None else (found[0], found[1], found[2])

    def latest(self) -> Path | None:
        """Return the path of the latest checkpoint that verifies, else as `read_latest`."""
        found: Path | None = self._first_sound(lambda manifest, path: path)
        return found

    def _first_sound(self, use: Callable[[Manifest, Path], Any]) -> Any:
        steps = self.steps()
        for step in reversed(steps):
            try:
                manifest = self._manifest(step)
                manifest.verify(self.path / manifest.file)
                return use(manifest, self.path / manifest.file)
            except CheckpointDamaged as error:
                logger.warning("step %d is skipped: %s", step, error)
        if steps:
            raise CheckpointError(
                f"restore: expected a checkpoint that verifies in {self.path}, got {len(steps)} damaged; restore one "
                f"from a backup, or start with a new run folder."
            )
        return None

    def _manifest(self, step: int) -> Manifest:
        path = self.manifest_path(step)
        manifest = read_manifest(path)
        match = _DATA.fullmatch(manifest.file)
        if manifest.step != step or match is None or int(match[1]) != step:
            raise CheckpointDamaged(
                f"restore: expected the manifest of step {step} in {path}, got that of step {manifest.step} and "
                f"{manifest.file!r}; give the file its own name again."
            )
        return manifest

    def set_aside_after(self, step: int) -> None:
        """Rename checkpoints later than `step` to *.bad: they were found damaged, and must not count as newer.

        Raises:
            CheckpointError: when the folder cannot be written.
        """
        with self._explained("restore", "to set damaged checkpoints aside"):
            for name in self._names():
                match = _MANIFEST.match(name) or _DATA.match(name)
                if match and int(match[1]) > step:
                    os.replace(self.path / name, self.path / f"{name}.bad")

    def prune(self, max_to_keep: int) -> None:
        """Keep the last `max_to_keep` checkpoints, and no other HDF5 files. Manifests go first.

        What cannot be removed stays, with the reason in the log: the newer checkpoint is safe.
        """
        try:
            steps = self.steps()
            kept = {self._manifest(step).file for step in steps[-max_to_keep:]}
            for step in steps[:-max_to_keep]:
                durable.remove(self.manifest_path(step))
            for name in self._names():
                if _DATA.match(name) and name not in kept:
                    durable.remove(self.path / name)
        except (OSError, CheckpointError) as error:
            logger.warning("old checkpoints stay in %s: %s", self.path, error)

    @contextmanager
    def _explained(self, operation: str, expected: str) -> Iterator[None]:
        """Turn what the file system or HDF5 says in the block into a CheckpointError."""
        try:
            yield
        except (OSError, RuntimeError) as error:
            if isinstance(error, CheckpointError):
                raise
            reason = getattr(error, "strerror", None) or " ".join(str(error).split())[:200]
            raise CheckpointError(
                f"{operation}: expected {expected} in {self.path}, got {reason}; free space or choose another folder. "
                f"Earlier checkpoints are untouched."
            ) from None


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

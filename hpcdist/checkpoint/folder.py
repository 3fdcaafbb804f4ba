"""A folder of checkpoints, for the attempt that writes into it: commit and prune."""

import logging
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import xxhash

from hpcdist.checkpoint import durable, generations
from hpcdist.checkpoint.durable import Disk
from hpcdist.checkpoint.generations import AttemptNote, Place
from hpcdist.checkpoint.image import FileImage
from hpcdist.checkpoint.manifest import Manifest
from hpcdist.checkpoint.reader import CheckpointReader, step_of
from hpcdist.checkpoint.retention import Retention
from hpcdist.checkpoint.safe_open import read_text
from hpcdist.errors import AttemptReplaced, CheckpointError

logger = logging.getLogger("hpcdist")

#: Allowance for names and manifests in the check of free space.
_OVERHEAD_BYTES = 1 << 16
#: Largest valid run-id file.
_MAX_RUN_ID_BYTES = 1 << 10


class CheckpointFolder(CheckpointReader):
    """Reads and writes checkpoints.

    One attempt of a job writes, in its own generation; any process may read. A step that is saved again gets a new file
    name, `step-00001200-1.h5`, so that its manifest names a complete file at any time.

    Args:
        folder: path of the folder, which need not exist yet.
        disk: file system calls, which tests replace.

    Attributes:
        path: path of the folder.
        generation: number of this attempt; 0 before `begin`.
    """

    def __init__(self, folder: str | os.PathLike[str], disk: Disk | None = None) -> None:
        super().__init__(folder)
        self.generation = 0
        self._disk = disk or Disk()
        self._last_before = -1

    def begin(self, generation: int | None = None) -> None:
        """Start to write: make a new generation, which replaces earlier writers.

        Also removes their incomplete files: on a nearly full disk the first save may need the space.

        Args:
            generation: number of the attempt, if it has one; default: the next.

        Raises:
            CheckpointError: if the folder cannot be written.
        """
        with self.explained("save", "a folder that can be written"):
            self.generation = generations.make_generation(self._disk, self.path, generation)
            self._last_before = max((place.step for place in self.places()), default=-1)
        with self._tolerated("incomplete files stay"):
            self._remove_orphans()

    def run_id(self) -> str:
        """Return the random identifier of this folder's run, created by its first attempt.

        Raises:
            CheckpointError: if it cannot be read or written, or is invalid.
        """
        path = self.path / "run-id"
        try:
            with self.explained("save", "to name the run"):
                if not path.exists():
                    durable.replace_text(self._disk, path, secrets.token_hex(8))
                name = read_text(path, _MAX_RUN_ID_BYTES)
            if not re.fullmatch(r"\w+", name):
                raise ValueError(repr(name[:40]))
        except ValueError as error:
            raise CheckpointError(
                f"restore: expected the name of the run in {path}, got {error}; remove the file (copies in memory "
                f"are then no longer found)."
            ) from None
        return name

    # -- attempts -------------------------------------------------------------------------------------------------

    def fruitless_attempts(self, first_step: int | None = None) -> list[AttemptNote]:
        """Return the consecutive attempts right before this one that died without progress, newest first.

        Args:
            first_step: the step that this attempt resumes from, if known.

        Raises:
            CheckpointError: if the folder cannot be read.
        """
        with self.explained("restore", "a folder that can be read"):
            return generations.fruitless_attempts(self.path, self.generation, first_step)

    def note_attempt(self, restored: str | None, has_ended: bool = False, has_trained: bool = False) -> None:
        """Record what this attempt resumed from, whether it has reached a save, and whether it ended in order.

        Raises:
            AttemptReplaced: if a later attempt has begun.
            CheckpointError: if the record cannot be written.
        """
        self.check_current()
        with self.explained("save", "to note the attempt"):
            generations.write_attempt(self._disk, self.path, self.generation, restored, has_ended, has_trained)

    @property
    def _own(self) -> Path:
        return self.path / generations.folder_name(self.generation)

    def check_current(self) -> None:
        """Raise AttemptReplaced if a later attempt of the job has begun, so that two never write."""
        with self.explained("save", "a folder that can be read"):
            newest = max(generations.generations(self.path), default=0)
        if newest > self.generation:
            raise AttemptReplaced(
                f"save: expected generation {self.generation} to be the newest in {self.path}, got {newest}: another "
                f"attempt of this job has begun; this one ends. Its last checkpoint is untouched."
            )

    # -- writing --------------------------------------------------------------------------------------------------

    def new_data_path(self, step: int) -> Path:
        """Return the path of the file that the next commit of a step writes.

        Raises:
            CheckpointError: if the folder has a later step, or cannot be read.
        """
        own = [place.step for place in self.places() if place.generation == self.generation]
        last = max([*own, self._last_before])
        if step < last:
            raise CheckpointError(
                f"save: expected a step after {last}, the last one in {self.path}, got {step}; restore first, or "
                f"choose another folder."
            )
        with self.explained("save", "a folder that can be read"):
            names = set(generations.names_in(self._own))
        name, number = f"step-{step:08d}.h5", 0
        while name in names and f"step-{step:08d}.json" in names:
            number += 1
            name = f"step-{step:08d}-{number}.h5"
        return self._own / name

    def commit(self, step: int, path: Path, image: FileImage, written: dict[str, Any], **more: Any) -> Manifest:
        """Write a checkpoint; it is durable on return.

        The HDF5 file is complete and durable before a manifest names it. A crash at any point leaves all committed
        checkpoints intact, even an earlier save of the same step.

        Args:
            step: optimizer steps taken.
            path: result of `new_data_path`.
            image: content of the file.
            written: its provenance.
            more: time_s and metrics of the manifest.

        Raises:
            AttemptReplaced: if a later attempt has begun.
            CheckpointError: if the file system refuses.
        """
        digest = xxhash.xxh3_128()
        self.check_current()
        with self.explained("save", f"to write {image.nbytes} bytes to {path.name}"):
            self._check_space(image.nbytes)
            with self._as_newest():
                durable.replace_file(self._disk, path, image.blocks(digest), image.nbytes)
            manifest = Manifest(step, path.name, image.nbytes, digest.hexdigest(), written, **more)
            with self._as_newest():
                durable.replace_text(self._disk, self._own / f"step-{step:08d}.json", manifest.to_text())
        return manifest

    @contextmanager
    def _as_newest(self) -> Iterator[None]:
        """Raise AttemptReplaced if a later attempt begins in the block: it removes uncommitted files."""
        try:
            yield
        except FileNotFoundError:  # possibly removed by a later attempt
            self.check_current()
            raise
        self.check_current()

    def _check_space(self, nbytes: int) -> None:
        status = os.statvfs(self.path)
        free = status.f_bavail * status.f_frsize
        if status.f_blocks and free < nbytes + _OVERHEAD_BYTES:  # 0 blocks: a file system without a size, such as ramfs
            raise CheckpointError(
                f"save: expected {nbytes + _OVERHEAD_BYTES} bytes free in {self.path}, got {free}; free some space. "
                f"Earlier checkpoints are untouched."
            )

    def prune(self, newest: Manifest, retention: Retention) -> None:
        """Verify the newest checkpoint, then remove those that are not kept, manifests before data files.

        A failed removal is only logged, as the newest checkpoint is safe.

        Raises:
            CheckpointDamaged: if the newest checkpoint differs from what was written; nothing is removed then.
            CheckpointError: if it cannot be read; likewise.
        """
        newest.verify(self._own / newest.file, self._count_block)
        with self._tolerated("old checkpoints stay"):
            self.check_current()
            manifests = {place: manifest for place in self.places() if (manifest := self._readable(place))}
            kept = retention.kept(list(manifests.values()))
            for place, manifest in manifests.items():
                if not any(manifest is one for one in kept):
                    self._disk.remove(place.manifest(self.path))
            self._remove_orphans()
            if newest.step > self._last_before:
                self._remove_empty_generations()

    @contextmanager
    def _tolerated(self, what_stays: str) -> Iterator[None]:
        """Log why something cannot be removed, and continue."""
        try:
            yield
        except (OSError, CheckpointError) as error:
            logger.warning("%s in %s: %s", what_stays, self.path, error)

    def _readable(self, place: Place) -> Manifest | None:
        """Return a manifest, or None if it cannot be read: such a checkpoint is neither counted nor removed."""
        try:
            return self.manifest(place)
        except CheckpointError:
            return None

    def _remove_orphans(self) -> None:
        """Remove data files without a manifest, and temporary files of killed writers."""
        durable.sweep_temporary(self._disk, self.path)
        for generation in self._generations():
            durable.sweep_temporary(self._disk, self.path / generations.folder_name(generation))
            self._remove_unnamed(generation)

    def _remove_empty_generations(self) -> None:
        """Remove the records of dead attempts, which no longer count once this attempt has made progress."""
        for generation in self._generations():
            if generation < self.generation:
                generations.remove_generation(self._disk, self.path, generation)

    def _generations(self) -> list[int]:
        """Return the generations up to this one."""
        return [generation for generation in generations.generations(self.path) if generation <= self.generation]

    def _remove_unnamed(self, generation: int) -> None:
        """Remove data files that no manifest names, after a sync: else a crash could restore such a manifest."""
        folder = self.path / generations.folder_name(generation)
        unnamed = self._unnamed(folder, generation)
        if unnamed:
            self._disk.sync_folder(folder)
        for name in unnamed:
            self._disk.remove(folder / name)

    def _unnamed(self, folder: Path, generation: int) -> list[str]:
        """Return the data files that no manifest names; an unreadable manifest may name any file of its step."""
        names, unnamed = generations.names_in(folder), []
        for name in names:
            place = Place(generation, step_of(name))
            if place.step < 0:
                continue
            is_there = place.manifest(self.path).name in names
            manifest = self._readable(place) if is_there else None
            if not is_there or (manifest is not None and manifest.file != name):
                unnamed.append(name)
        return unnamed

    def resume_from(self, used: Place) -> None:
        """Expect steps after the restored checkpoint; rename those that `read_latest` found damaged to *.bad.

        Raises:
            CheckpointError: if the folder cannot be written.
        """
        with self.explained("restore", "to set damaged checkpoints aside"):
            for place in self.damaged:
                path = place.manifest(self.path)
                data = [name for name in generations.names_in(path.parent) if step_of(name) == place.step]
                for name in [*data, path.name]:
                    self._disk.rename(path.with_name(name), path.with_name(f"{name}.bad"))
                self._disk.sync_folder(path.parent)
        self.damaged, self._last_before = [], used.step

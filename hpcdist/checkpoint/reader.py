"""Read-only access to a folder of checkpoints, for any process: the latest one that verifies."""

import logging
import os
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcdist.checkpoint import generations
from hpcdist.checkpoint.generations import Place
from hpcdist.checkpoint.manifest import Manifest, read_manifest
from hpcdist.checkpoint.safe_open import read_file
from hpcdist.checkpoint.tree import NamedArray
from hpcdist.errors import CheckpointDamaged, CheckpointError, CheckpointMissing

logger = logging.getLogger("hpcdist")

#: Most listings of a folder while its writer prunes files faster than they are read.
_MAX_LOOKS = 10
_DATA = re.compile(r"step-(\d{8,})(-\d+)?\.h5$")


@dataclass(frozen=True)
class Found:
    """A checkpoint that was read.

    Attributes:
        place: its place.
        path: path of its file.
        manifest: its manifest.
        state: its state, as JSON.
        arrays: its arrays.
    """

    place: Place
    path: Path
    manifest: Manifest
    state: Any
    arrays: list[NamedArray]


class CheckpointReader:
    """Reads committed checkpoints: a manifest `gen-0001/step-00001200.json`, and the file beside it that it names.

    Args:
        folder: path of the folder, which need not exist.

    Attributes:
        path: path of the folder.
        damaged: places of the checkpoints that did not verify in the last search.
        n_blocks_read: blocks read so far: while it grows, a slow read is not stuck.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.path = Path(folder)
        self.damaged: list[Place] = []
        self.n_blocks_read = 0

    def _count_block(self) -> None:
        self.n_blocks_read += 1

    def places(self) -> list[Place]:
        """Return the places of all checkpoints, unverified, oldest first.

        Raises:
            CheckpointError: if the folder exists and cannot be read.
        """
        with self.explained("restore", "a folder that can be read"):
            return generations.places(self.path)

    def read_latest(
        self, but: Collection[int] = (), before_reading: Callable[[Place], None] = lambda place: None
    ) -> Found | None:
        """Return the latest checkpoint that verifies; None for an empty folder.

        Skips damaged checkpoints and logs why.

        Args:
            but: steps to skip too, unless there is no other.
            before_reading: called with the place of a checkpoint that verifies, before it is read.

        Raises:
            CheckpointError: if checkpoints exist but none verifies; or if one has a newer format or cannot be read,
                as the newest is then unknown.
        """

        def read(place: Place, manifest: Manifest, path: Path) -> Found:
            before_reading(place)
            return Found(place, path, manifest, *read_file(path, self._count_block))

        found: Found | None = self._first_sound(read, but)
        return found

    def latest(self) -> Path | None:
        """Return the path of the latest checkpoint that verifies; otherwise like `read_latest`."""
        found: Path | None = self._first_sound(lambda place, manifest, path: path)
        return found

    def _first_sound(
        self, use: Callable[[Place, Manifest, Path], Any], but: Collection[int] = (), n_looks: int = 1
    ) -> Any:
        found, self.damaged = self.places()[::-1], []
        wanted = [place for place in found if place.step not in but]
        for place in [*wanted, *(place for place in found if place not in wanted)]:
            try:
                manifest = self.manifest(place)
                path = place.manifest(self.path).with_name(manifest.file)
                manifest.verify(path, self._count_block)
                return use(place, manifest, path)
            except CheckpointDamaged as error:
                listed = self.places()[::-1]  # without those pruned in the meantime
                may_be_well = listed != found or (isinstance(error, CheckpointMissing) and n_looks == 1)
                if may_be_well and n_looks < _MAX_LOOKS:
                    return self._first_sound(use, but, n_looks + 1)
                if place in listed:
                    self.damaged.append(place)
                    logger.warning("skipped damaged step %d: %s", place.step, error)
        if found:
            raise self._none_sound() from None
        return None

    def _none_sound(self) -> CheckpointError:
        if not self.damaged:
            return CheckpointError(
                f"restore: expected a checkpoint in {self.path} that stays until it is read, got each one pruned "
                f"before that, in {_MAX_LOOKS} listings; keep more checkpoints, or save less often."
            )
        return CheckpointError(
            f"restore: expected a checkpoint that verifies in {self.path}, got {len(self.damaged)} damaged; restore "
            f"one from a backup, or start with a new run folder."
        )

    def manifest(self, place: Place) -> Manifest:
        """Return the manifest at a place.

        Raises:
            CheckpointDamaged: if it is not the one that was committed there.
            CheckpointError: if it cannot be read.
        """
        path = place.manifest(self.path)
        manifest = read_manifest(path)
        if manifest.step != place.step or step_of(manifest.file) != place.step:
            raise CheckpointDamaged(
                f"restore: expected the manifest of step {place.step} in {path}, got that of step {manifest.step} and "
                f"{manifest.file!r}; rename the file back."
            )
        return manifest

    @contextmanager
    def explained(self, operation: str, expected: str) -> Iterator[None]:
        """Turn errors of the file system or HDF5 in the block into a CheckpointError."""
        try:
            yield
        except (OSError, RuntimeError) as error:
            if isinstance(error, CheckpointError):
                raise
            reason = getattr(error, "strerror", None) or " ".join(str(error).split())[:200]
            advice = "free space or choose another folder" if operation == "save" else "fix this and run again"
            raise CheckpointError(
                f"{operation}: expected {expected} in {self.path}, got {reason}; {advice}. Earlier checkpoints are "
                f"untouched."
            ) from None


def step_of(name: str) -> int:
    """Return the step of a data file; -1 for other files."""
    match = _DATA.fullmatch(name)
    return int(match[1]) if match else -1


def latest_checkpoint(directory: str | os.PathLike[str]) -> str | None:
    """Return the path of the latest checkpoint in `directory` that verifies; None for an empty folder.

    Not collective. Skips damaged checkpoints and logs why.

    Raises:
        CheckpointError: if checkpoints exist but none verifies, a newer hpcdist wrote one, one cannot be read, or each
            was pruned before it was read.
    """
    found = CheckpointReader(directory).latest()
    return None if found is None else str(found)

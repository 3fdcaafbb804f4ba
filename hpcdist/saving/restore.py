"""Restore: one rank reads a checkpoint once, and all ranks put it into their objects as it comes.

Nothing is held twice: a block is read, hashed, broadcast, and copied to where it belongs, into tensors that exist or
into new ones. Shapes are compared first, from the index. The digest is known at the end: if it differs, an older
checkpoint overwrites what was loaded.
"""

import functools
import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from hpcdist.checkpoint.header import HEADER_BYTES
from hpcdist.checkpoint.read import BLOCK_BYTES, ArrayWriter, CheckpointFile, Index
from hpcdist.checkpoint.store import Saved, Store, use_one
from hpcdist.collectives import library as mpi
from hpcdist.collectives.group import group_of
from hpcdist.errors import CheckpointDamaged, CheckpointError, HpcdistError
from hpcdist.runtime.mpi import MPI
from hpcdist.runtime.world import World

logger = logging.getLogger("hpcdist")


@dataclass(frozen=True)
class Prepared:
    """The memory that a checkpoint is loaded into.

    Attributes:
        arrays: C-contiguous arrays in the order of the index: memory of tensors that exist, or new memory.
        loaded: the state of each object, made of these arrays.
        source: name of the checkpoint, for messages.
    """

    arrays: list[npt.NDArray[Any]]
    loaded: dict[str, Any]
    source: str


class Objects(Protocol):
    """Objects that are restored: a Checkpoint."""

    def prepare(self, index: Index, source: str) -> Prepared:
        """Return where the arrays go. Raises CheckpointMismatch if objects or shapes differ."""

    def load(self, index: Index, prepared: Prepared, is_own_run: bool) -> None:
        """Load the state, once the arrays are filled; metrics files only if this run resumes from it."""


@dataclass(frozen=True)
class Restored:
    """A checkpoint that was restored: which one, its path, its index, and whether it was a copy in memory."""

    saved: Saved
    path: str
    index: Index
    is_in_memory: bool


class Restore:
    """A restore by all ranks of a role.

    Args:
        world: chief and workers, or an evaluator.
        objects: objects that are restored on this rank.
    """

    def __init__(self, world: World, objects: Objects) -> None:
        self._world = world
        self._comm = world.role_comm
        self._objects = objects
        self._prepared: tuple[Index, Prepared] | None = None

    def restore_file(self, path: Path) -> Index:
        """Restore the checkpoint at `path`, which rank 0 reads; return its index.

        Collective over the ranks of the role.

        Raises:
            CheckpointError: if it does not exist, is damaged, holds other objects or has a newer format, or cannot be
                read; on all ranks.
        """
        self._lead(0, functools.partial(self._send_file, path))
        return self._load(is_own_run=False)

    def newest(
        self,
        store: Store,
        copy: tuple[Saved, Path] | None,
        skipped: set[int],
        before_reading: Callable[[Saved], None],
    ) -> Restored | None:
        """Restore the newest checkpoint that verifies, on the chief's disk or in a node's memory; None without one.

        Collective over the ranks of the role.

        Args:
            store: the chief's folder; unused on other ranks.
            copy: the newest copy in this node's memory, if this rank keeps copies; it verifies.
            skipped: steps to use only if the disk has no other step.
            before_reading: called on the chief with each checkpoint before its arrays are read.

        Raises:
            CheckpointError: if checkpoints exist and none verifies, or one is of other objects; on all ranks.
        """
        candidate = None
        if copy is not None and copy[0].step not in skipped:
            candidate = copy
        in_memory, root = self._newest(candidate)
        disk_checkpoints: list[tuple[Saved, Path]] = []

        def use(saved: Saved, file: CheckpointFile) -> None:
            if in_memory is None or saved >= in_memory:  # the disk has metrics, too
                before_reading(saved)
                self._send(file)
                disk_checkpoints.append((saved, file.path))

        self._lead(0, lambda: self._search(store, in_memory, skipped, use))
        if self._comm.rank == 0 and disk_checkpoints:
            candidate = disk_checkpoints[0]
        n_on_disk = self._world.all_reduce_int(len(disk_checkpoints), MPI.MAX, self._comm)
        is_in_memory = n_on_disk == 0
        if is_in_memory and in_memory is None:
            return None
        reader = 0
        if is_in_memory:
            reader = root
            with self._world.agreed(self._comm):
                if self._comm.rank == 0 and in_memory is not None:
                    before_reading(in_memory)
            self._lead(root, functools.partial(self._send_copy, candidate))
        text = ""
        if candidate is not None and self._comm.rank == reader:
            saved, path = candidate
            text = f"{saved.attempt} {saved.step} {path}"
        text = self._world.broadcast_text(text, reader, self._comm)
        attempt, step, restored_path = text.split(" ", 2)
        restored = Saved(int(attempt), int(step))
        index = self._load(is_own_run=True)
        return Restored(restored, restored_path, index, is_in_memory)

    def _search(
        self,
        store: Store,
        in_memory: Saved | None,
        skipped: set[int],
        use: Callable[[Saved, CheckpointFile], None],
    ) -> None:
        """Send the newest checkpoint on disk, unless the copy in memory is newer. On the chief."""
        on_disk = store.saved()
        if in_memory is None or (on_disk and on_disk[-1] >= in_memory):
            try:
                store.use_latest(use, skipped)
            except CheckpointError as error:
                if in_memory is None or error.is_agreed:
                    raise
                logger.warning("restore: resuming from memory: %s", error)

    def _newest(self, local_copy: tuple[Saved, Path] | None) -> tuple[Saved | None, int]:
        """Return the newest copy on any rank, and the lowest rank that has it."""
        saved = Saved(-1, -1)
        if local_copy is not None:
            saved, _ = local_copy
        attempt = self._world.all_reduce_int(saved.attempt, MPI.MAX, self._comm)
        step_of_attempt = saved.step if saved.attempt == attempt else -1
        step = self._world.all_reduce_int(step_of_attempt, MPI.MAX, self._comm)
        newest = Saved(attempt, step)
        candidate_rank = self._comm.rank if saved == newest else self._comm.size
        root = self._world.all_reduce_int(candidate_rank, MPI.MIN, self._comm)
        if attempt < 0:
            return None, root
        return newest, root

    # -- the stream -----------------------------------------------------------------------------------------------

    def _lead(self, root: int, search: Callable[[], object]) -> None:
        """Let `search` on `root` send checkpoints, one after the other, to all ranks. An error is raised on all."""
        with self._world.agreed(self._comm):
            if self._comm.rank != root:
                while text := self._world.broadcast_text("", root, self._comm):
                    self._take(*_parse(text), root, None)
                return
            try:
                search()
            except HpcdistError as error:
                if not error.is_agreed:  # else the other ranks have left the loop
                    self._world.broadcast_text("", root, self._comm)
                raise
            self._world.broadcast_text("", root, self._comm)

    def _send(self, file: CheckpointFile) -> None:
        """Send an open checkpoint to all ranks.

        Raises:
            CheckpointDamaged: if it is not what was committed.
            CheckpointMismatch: if it is of other objects; on all ranks.
            OSError: if it cannot be read.
        """
        text = json.dumps([file.path.name, file.index.to_text()])
        self._world.broadcast_text(text, self._comm.rank, self._comm)
        self._take(file.path.name, file.index, self._comm.rank, file.blocks())

    def _send_copy(self, copy: tuple[Saved, Path] | None) -> None:
        """Send the copy in this node's memory to all ranks, if there is one. Raises the errors of `_send`."""
        if copy is not None:
            _, path = copy
            self._send_file(path)

    def _send_file(self, path: Path) -> None:
        """Send the checkpoint at a path to all ranks. Raises the errors of `_send`."""
        use_one(path, lambda saved, file: self._send(file))

    def _take(
        self, source: str, index: Index, root: int, blocks: Iterator[memoryview] | None
    ) -> None:
        """Put the blocks of a checkpoint, which root reads, into the objects of this rank."""
        try:
            with self._world.agreed(self._comm):
                prepared = self._objects.prepare(index, source)
        except CheckpointDamaged as damage:
            # on all ranks: ranks that do not read wait for the next checkpoint of root
            if blocks is None:
                return
            raise CheckpointDamaged(str(damage)) from None
        writer = ArrayWriter(index.arrays, prepared.arrays)
        group = group_of(self._comm, world=self._world)
        buffer = np.empty(BLOCK_BYTES, np.uint8)
        error = None
        end = index.header.index_offset
        for start in range(HEADER_BYTES, end, BLOCK_BYTES):
            block = buffer[: min(BLOCK_BYTES, end - start)]
            if blocks is not None and error is None:
                try:
                    block[:] = next(blocks)
                except (CheckpointError, OSError) as caught:
                    error = caught  # raised later: the other ranks wait for all blocks
            with group.recorded("broadcast", block):
                mpi.broadcast(block, group.comm, root)
            writer.take(start, block.data)
        if error is not None:
            raise error
        if blocks is not None:
            next(blocks, None)  # verifies the digest
        self._prepared = index, prepared

    def _load(self, is_own_run: bool) -> Index:
        assert self._prepared is not None, "a checkpoint was sent"
        index, prepared = self._prepared
        with self._world.agreed(self._comm):
            self._objects.load(index, prepared, is_own_run)
        return index


def _parse(text: str) -> tuple[str, Index]:
    source, index = json.loads(text)
    return source, Index.from_text(index)

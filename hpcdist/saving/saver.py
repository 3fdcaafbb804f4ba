"""The saver: lays a state out as a file, and writes it in one background thread, on the disk or in a node's memory.

A copy of the state is made once, in one buffer, so there is one file in progress at a time. A wait for it lasts as long
as blocks are written or read: a slow disk is waited for, a stuck one is an error.
"""

import atexit
import functools
import json
import logging
import os
import time
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

from hpcdist.background import BackgroundThread
from hpcdist.checkpoint.image import BLOCK_BYTES, FileImage
from hpcdist.checkpoint.layout import lay_out
from hpcdist.checkpoint.read import Index
from hpcdist.checkpoint.retention import Retention
from hpcdist.checkpoint.store import Saved, Store
from hpcdist.checkpoint.tree import NamedArray
from hpcdist.errors import AttemptReplaced, CheckpointError, DesyncError, ExitCode
from hpcdist.runtime.mpi import MPI
from hpcdist.runtime.process import end_job, send_heartbeat
from hpcdist.runtime.waiting import AWAKE_S
from hpcdist.runtime.world import World
from hpcdist.saving.desync import Comparison
from hpcdist.saving.fast_tier import FastTier

logger = logging.getLogger("hpcdist")

#: A state as JSON, and its arrays.
Collected = tuple[Any, list[NamedArray]]
#: Seconds between two agreements of ranks that wait on whether a file is still in progress.
BEAT_S = 5.0
#: Longest wait of the training thread for the last copy in memory before the next one.
_PATIENCE_S = 5.0
#: Longest wait for a copy in memory before all copies are removed.
_LIMIT_S = 60.0


class Saver:
    """Saves in the background: on the disk of the chief, and in memory on ranks that have a fast tier.

    A program that ends waits for the file in progress, even if it has dropped this object, and fails if the file cannot
    be written.

    Not collective, but for `wait`.

    Args:
        world: chief and workers, or an evaluator, which only reads.
        store: the folder on the disk of the chief; unused on other ranks.
        retention: rule of which checkpoints to keep.
        prepare: called in the thread before each file is written; the save fails with its CheckpointError. It must
            not hold models: a save that is not done keeps this object to the end of the program.

    Attributes:
        store: the folder on the disk of the chief.
        fast_tier: the copies of this rank's node, if it keeps them.
        last: index of the last checkpoint on disk that was committed or restored; None before the first.
        last_save_s: duration of the last save on disk, from its start to the read-back; None before the first.
    """

    def __init__(
        self,
        world: World,
        store: Store,
        retention: Retention,
        prepare: Callable[[], None] = lambda: None,
    ) -> None:
        self.store = store
        self.last: Index | None = None
        self.last_save_s: float | None = None
        self._world = world
        self._retention = retention
        self._prepare = prepare
        self._note_commit: weakref.WeakMethod[Callable[[int], None]] | None = None
        self._image = FileImage()
        self._thread = BackgroundThread("hpcdist-saver")
        self._durable: Future[Any] | None = None
        self._done: Future[None] | None = None
        self._copied: Future[None] | None = None
        self.fast_tier: FastTier | None = None
        self._pid = os.getpid()
        self._is_released = False
        self._is_stuck = False
        self._is_behind = False
        self._has_warned = False
        self._n_blocks = self._n_blocks_so_far
        self._waited_s = 0.0
        self._looked_s = time.monotonic()

    def call_after_commit(self, note: Callable[[int], None]) -> None:
        """Have the background thread call note(step), a method, after each commit, in place of an earlier one.

        The method is held weakly. The next `wait` raises its errors.
        """
        self._note_commit = weakref.WeakMethod(note)

    # -- save -----------------------------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        collected: Collected,
        written: dict[str, Any],
        metrics: Mapping[str, float] | None,
        *,
        if_changed: bool = False,
        in_memory: bool = False,
        comparison: Comparison | None = None,
    ) -> Path | None:
        """Copy a state; write it, read it back and prune older checkpoints in the background. Return its file's path.

        The previous file is complete: call `wait` first.

        Args:
            step: optimizer steps taken.
            collected: the state.
            written: provenance of the state.
            metrics: metrics for the index. None for the metrics of the last checkpoint, if it has the same step.
            if_changed: whether to compare the state with the last saved or restored one first, and to return None if
                they are equal.
            in_memory: whether to make the file the copy of this rank's node too, first, and from the same buffer.
            comparison: compares the state with the other ranks before the file is written; None for no comparison.

        Raises:
            CheckpointError: if this save cannot start.
        """
        since = time.monotonic()
        path = self.store.path_of(step)
        if metrics is None and self.last is not None and self.last.step == step:
            metrics = self.last.metrics
        contents = self._lay_out(step, dict(metrics or {}), written, collected)
        check: Callable[[], None] | None = None
        if comparison is not None:
            check = functools.partial(comparison.require, contents, self._world.timeout_s)
        atexit.register(self._wait_at_exit)
        if if_changed and self._is_last(collected[0]):
            if check is not None:  # the next wait raises its error
                self._durable = self._thread.submit(check)
            return None
        if in_memory:
            self._start_copy(step)
        commit = functools.partial(self._commit, step, check)
        self._durable = self._thread.submit(commit)
        complete = functools.partial(self._complete, self._durable, since)
        self._done = self._thread.submit(complete)
        return path

    def _lay_out(
        self, step: int, metrics: dict[str, float], written: dict[str, Any], collected: Collected
    ) -> list[memoryview]:
        facts = {"step": step, "time_s": time.time(), "metrics": metrics, "written": written}
        return lay_out(self._image, facts, *collected)

    def _is_last(self, state: Any) -> bool:
        """Return whether a state, with the arrays in the image, equals the state of the last checkpoint."""
        return (
            self.last is not None
            and json.dumps(state) == json.dumps(self.last.state)
            and self._image.digest_of_arrays() == self.last.header.arrays_digest
        )

    def _commit(self, step: int, check: Callable[[], None] | None) -> Index:
        if check is not None:
            check()
        self._prepare()
        return self.store.commit(step, self._image)

    def _complete(self, durable: "Future[Index]", since: float) -> None:
        """Read the committed file back, remove the checkpoints that it replaces, and note it in the ledger."""
        if durable.exception() is None:
            last = durable.result()
            saved = Saved(self.store.attempt, last.step)
            self.store.verify_and_prune(saved, self._retention)
            self.last = (
                last  # only now: a save of an equal state would take a damaged file for its own
            )
            facts = {
                "nbytes": self._image.nbytes,
                "took_s": round(time.monotonic() - since, 6),
                "time_s": time.time(),
            }
            self.store.note("commit", step=last.step, **facts)
            if self._note_commit is not None:
                note = self._note_commit()
                if note is not None:
                    note(last.step)
            self.last_save_s = time.monotonic() - since
            # nothing is left to wait for, and nothing to report
            atexit.unregister(self._wait_at_exit)

    def start(self) -> None:
        """Start the thread in which files are written: a program that saves only when it exits could not do so."""
        self._thread.start()

    def reserve(self, collected: Collected) -> None:
        """Lay out a state as for a save, but write nothing: the memory of the saves that follow is taken now.

        The previous file is complete: call `wait` first. Without enough memory a node makes no copies.

        Raises:
            CheckpointError: if memory is insufficient, on the chief.
        """
        tier = self.fast_tier
        if self._world.is_chief or tier is None:
            self._lay_out(0, {}, {}, collected)
        else:
            with tier.tolerated():
                self._lay_out(0, {}, {}, collected)
        if tier is not None and tier.is_kept:
            with tier.tolerated():
                tier.require_memory(self._image.nbytes)

    # -- copies in memory -----------------------------------------------------------------------------------------

    def keep_copies(self, fast_tier: FastTier | None) -> None:
        """Make copies in a fast tier from now on; None for no more copies."""
        self.fast_tier = fast_tier

    @property
    def keeps_copies(self) -> bool:
        """Whether this rank makes copies in memory: False after the first failure."""
        return self.fast_tier is not None and self.fast_tier.is_kept

    def can_copy(self) -> bool:
        """Return whether the buffer is free for a copy; wait a little for the last copy, but not for the disk."""
        for_s = 0.0 if self._is_behind else _PATIENCE_S
        is_free = not self.is_busy and not self._is_under_way(for_s, self._copied)
        self._is_behind = not is_free
        if not is_free and not self._has_warned:
            logger.warning(
                "fast tier: on this node no copies are made while the last file is being written (logged once)"
            )
            self._has_warned = True
        return is_free

    def copy(self, step: int, collected: Collected, written: dict[str, Any]) -> None:
        """Copy a state, and write it into this node's memory in the background, if `can_copy`. A failure is logged."""
        if self.keeps_copies and self.can_copy() and self.fast_tier is not None:
            with self.fast_tier.tolerated():
                self._lay_out(step, {}, written, collected)
                self._start_copy(step)

    def _start_copy(self, step: int) -> None:
        if self.fast_tier is not None and self.fast_tier.is_kept:
            self._copied = self._thread.submit(
                functools.partial(self._commit_copy, self.fast_tier, step)
            )

    def _commit_copy(self, tier: FastTier, step: int) -> None:
        with tier.tolerated():
            self._prepare()
            tier.commit(step, self._image)

    def forget_copies(self) -> None:
        """Free the memory: remove this node's copies, also of earlier attempts, and make none from now on."""
        tier = self.fast_tier
        self.fast_tier = None
        if tier is not None:
            tier.stop()
            if self._is_under_way(_LIMIT_S, self._copied):
                logger.warning(
                    "fast tier: expected the last copy to be done within %g s, got none", _LIMIT_S
                )
            tier.remove()

    # -- wait -----------------------------------------------------------------------------------------------------

    @property
    def is_busy(self) -> bool:
        """Whether a save on disk is not yet durable and read back."""
        return self._is_under_way(0, self._durable, self._done)

    def wait(self, only_durable: bool = False) -> None:
        """Wait until no rank writes: saves are durable and were read back, and copies in memory are complete.

        Collective over the ranks of the role.

        Args:
            only_durable: whether to wait for the chief's file to be durable only.

        Raises:
            CheckpointError: if it could not be written, raised once, or if the disk takes or gives no block within the
                timeout; on all ranks.
            DesyncError: if it was not written, as other ranks hold another state; once, on all ranks.
        """
        self._start_to_wait()
        awaited: list[Future[Any] | None] = [self._durable]
        if not only_durable:
            awaited += [self._done, self._copied]
        while self._is_any_rank_busy(awaited):
            pass
        with self._world.agreed(self._world.role_comm):
            self._raise_failure(only_durable)

    def _is_any_rank_busy(self, awaited: "list[Future[Any] | None]") -> bool:
        """Wait for at most `BEAT_S` seconds; return whether a rank still writes.

        Collective over the ranks of the role.
        """
        is_busy = False
        with self._world.agreed(self._world.role_comm):
            for_s = min(BEAT_S, self._world.timeout_s / 4)
            is_busy = self._is_under_way(for_s, *awaited)
            if is_busy:
                self._require_blocks()
        return self._world.all_reduce_int(int(is_busy), MPI.MAX, self._world.role_comm) > 0

    @staticmethod
    def _is_under_way(for_s: float, *awaited: "Future[Any] | None") -> bool:
        """Wait up to `for_s` seconds; return whether a part is not done."""
        futures = [future for future in awaited if future is not None]
        return len(wait(futures, for_s).not_done) > 0

    def _raise_failure(self, only_durable: bool = False) -> None:
        """Raise the error of the last save, once; its parts are done."""
        durable = self._durable
        self._durable = None
        if durable is not None and durable.exception() is not None:
            atexit.unregister(self._wait_at_exit)  # it is reported now
            durable.result()
        done = None
        if not only_durable:
            done = self._done
            self._done = None
        # nothing is left to wait for at the program's exit, which would keep this object
        if self._done is None:
            atexit.unregister(self._wait_at_exit)
        if done is not None:
            done.result()

    def _start_to_wait(self) -> None:
        self._n_blocks = self._n_blocks_so_far
        self._waited_s = 0.0
        self._looked_s = time.monotonic()
        self._is_stuck = False

    @property
    def _n_blocks_so_far(self) -> int:
        """Blocks written and read back so far: while it grows, a slow save is not stuck."""
        n_blocks = self._image.n_blocks + self.store.n_blocks_read
        if self.fast_tier is not None:
            n_blocks += self.fast_tier.n_blocks_read
        return n_blocks

    def _require_blocks(self) -> None:
        """Raise CheckpointError if no block was written or read for as long as the world's timeout."""
        now = time.monotonic()
        # a longer gap means that the job was suspended
        self._waited_s += min(now - self._looked_s, BEAT_S + AWAKE_S)
        self._looked_s = now
        if self._n_blocks_so_far != self._n_blocks:
            self._n_blocks = self._n_blocks_so_far
            self._waited_s = 0.0
        if self._waited_s > self._world.timeout_s:
            self._is_stuck = True
            raise CheckpointError(
                f"checkpoint: expected the disk of {self.store.path} to take or give {BLOCK_BYTES} bytes within "
                f"{self._world.timeout_s:g} s, got none; check the file system (HPCDIST_TIMEOUT_S sets the limit)."
            )

    # -- the end of the program -----------------------------------------------------------------------------------

    def release(self) -> None:
        """Note that the program has dropped its manager, maybe for another one of the same folder."""
        self._is_released = True

    def _wait_at_exit(self) -> None:
        """Wait for the last save, at most a second if the disk was found stuck; end the job if it failed."""
        if os.getpid() != self._pid:  # a forked child does not inherit the background thread
            return
        try:
            if not self._is_stuck:
                self._start_to_wait()
            while self._is_under_way(1.0, self._durable, self._done):
                send_heartbeat()
                self._require_blocks()
            self._raise_failure()
        except AttemptReplaced as error:
            if not self._is_released:
                end_job(f"hpcdist: {error}\n", int(error.exit_code))
            logger.warning("%s", error)
        except DesyncError as error:
            end_job(f"hpcdist: {error}\n", int(error.exit_code))
        except Exception as error:  # noqa: BLE001  raising here would make Python print the error and exit with 0
            text = str(error)
            if not isinstance(error, (CheckpointError, OSError)):
                text = f"{type(error).__name__}: {error}"
            end_job(f"hpcdist: {text}\n", int(ExitCode.CHECKPOINT_IO))

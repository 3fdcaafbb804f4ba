"""CheckpointManager: saves and restores a Checkpoint in one folder, collectively; only the chief uses the disk."""

import contextlib
import functools
import logging
import operator
import os
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from hpcdist.checkpoint.available_memory import available_bytes
from hpcdist.checkpoint.retention import Retention
from hpcdist.checkpoint.store import Saved, Store
from hpcdist.checkpoint.tree import NamedArray
from hpcdist.cluster.environment import job_id, read_environment
from hpcdist.collectives.group import group_of
from hpcdist.errors import DesyncError, UsageError
from hpcdist.run.decision import suspects
from hpcdist.run.ledger import PROGRAM_HAS_FINISHED, Launch, Ledger
from hpcdist.run.metrics_file import make_durable
from hpcdist.run.provenance import describe, warn_of_changes
from hpcdist.run.run_config import begin_config
from hpcdist.run.stop_request import StopRequest
from hpcdist.runtime.mpi import MPI
from hpcdist.runtime.time_spent import counted
from hpcdist.saving.checkpoint import Checkpoint
from hpcdist.saving.desync import (
    Comparison,
    contents_of,
    difference,
    digest_of,
    digest_of_others,
    gather_digests,
    require_equal,
)
from hpcdist.saving.fast_tier import FastTier
from hpcdist.saving.restore import Restore, Restored
from hpcdist.saving.saver import Saver

logger = logging.getLogger("hpcdist")

#: Longest wait before a copy in memory for records to be in their file.
_PATIENCE_S = 1.0


class CheckpointManager:
    """Saves and restores a Checkpoint in one folder: written by the chief, restored on all ranks.

    Making it writes nothing. The first restore, or the first save without one, begins an attempt, which replaces
    earlier writers of the folder.

    Collective over chief and workers.

    >>> manager = hpcdist.CheckpointManager(checkpoint, "runs/a/checkpoints", keep_best="loss")
    >>> path = manager.restore_or_initialize()  # None in a new run
    >>> path = manager.save(1, {"loss": 0.5})

    Args:
        checkpoint: the objects to save.
        directory: the folder; created by the attempt if missing. Only the chief needs access.
        max_to_keep: number of checkpoints to keep; older ones are removed once a newer one is committed and read back.
            None keeps all.
        keep_every_n_hours: hours; of the older checkpoints the first is kept, and each that is this much later than the
            one kept before it.
        keep_best: name of a metric passed to `save`: the checkpoint with its best value is kept too, as `best.h5`.
        best_mode: "min" or "max": which value is best.
        n_best: number of checkpoints with the best values that are kept.
        keep_every_n_steps: steps; older checkpoints are kept at this distance, as with `keep_every_n_hours`.
        fast_directory: an in-memory folder on every node, such as /dev/shm, for the copies of `save_fast`. A restore
            uses the newest state that verifies, on disk or in memory.
        checkpoint_interval: steps; a save that comes sooner after the last one is left out.

    Attributes:
        checkpoint: the objects that are saved.
        latest_path: path of the last saved or restored checkpoint; None before the first.
        saved_step: step of the last save or restore; before the first, the step of the Checkpoint, which another
            manager may have saved or restored.
        saved_at: time of the last save or restore, by `time.monotonic`.
        ledger: the attempts of the run. Valid on the chief only.
    """

    def __init__(  # noqa: PLR0913  most say what is kept
        self,
        checkpoint: Checkpoint,
        directory: str | os.PathLike[str],
        max_to_keep: int | None = 3,
        keep_every_n_hours: float | None = None,
        *,
        keep_best: str | None = None,
        best_mode: str = "min",
        n_best: int = 1,
        keep_every_n_steps: int | None = None,
        fast_directory: str | os.PathLike[str] | None = None,
        checkpoint_interval: int | None = None,
    ) -> None:
        self.checkpoint = checkpoint
        self._interval = checkpoint_interval or 0
        self._world = checkpoint.world
        self._comm = self._world.role_comm
        self._retention = Retention(
            max_to_keep, keep_every_n_hours, keep_best, best_mode, n_best, keep_every_n_steps
        )
        self._is_writer = self._world.is_chief
        prepare = functools.partial(make_durable, checkpoint.files())
        self._saver = Saver(self._world, Store(directory), self._retention, prepare)
        weakref.finalize(self, self._saver.release).atexit = False
        self.ledger = Ledger(self._saver.store)
        self._fast_directory: Path | None = None
        if fast_directory is not None:
            self._fast_directory = Path(fast_directory).absolute()
        self._has_begun = False
        self._were_records_late = False
        self.latest_path: str | None = None
        self.saved_step = checkpoint.step
        self.saved_at = time.monotonic()

    def begin_attempt(self, is_new_try: bool = False) -> None:
        """Begin an attempt, which replaces earlier writers of the folder, unless one of this manager is in progress.

        A restore and the first save begin one too.

        Collective over chief and workers.

        Args:
            is_new_try: whether a person wants another try, so that earlier attempts without progress do not count.

        Raises:
            CheckpointError: if the folder cannot be written; on all ranks.
        """
        if self._has_begun:
            if is_new_try:
                self._try_again()
            return
        self.wait()  # a save that is still being written belongs to the attempt before
        self._saver.keep_copies(None)
        with self._world.agreed(self._comm):
            if self._is_writer:
                self.ledger.begin(Launch.of_this_process(), is_new_try)
                self.check_current()
                self.checkpoint.claim_files()
        if self._fast_directory is not None:
            self._saver.keep_copies(self._begin_fast_tier(self._fast_directory))
        self._has_begun = True

    def _try_again(self) -> None:
        with self._world.agreed(self._comm):
            if self._is_writer:
                self.ledger.try_again()

    def _begin_fast_tier(self, directory: Path) -> FastTier | None:
        """Return this node's fast tier on the first rank of the node; None on its other ranks."""
        if self._world.task.type not in ("chief", "worker"):  # an evaluator only reads
            return None
        run_id = ""
        with self._world.agreed(self._comm):
            if self._is_writer:
                run_id = self._saver.store.run_id()
        text = self._world.broadcast_text(f"{run_id} {self.attempt}", 0, self._comm)
        run_id, attempt = text.split()
        if self._world.node_comm.rank > 0:
            return None
        job = job_id(read_environment()) or "0"  # scripts remove copies by it
        return FastTier(directory, f"{job}-{run_id}", int(attempt))

    @property
    def store(self) -> Store:
        """The files of the checkpoints' folder; the chief alone writes there."""
        return self._saver.store

    @property
    def directory(self) -> str:
        """The checkpoints' folder."""
        return str(self._saver.store.path)

    @property
    def best_path(self) -> str | None:
        """The path of the best checkpoint, a link for `Checkpoint.read` and `restore`; None without `keep_best`.

        It is there once a checkpoint with that metric was saved.
        """
        if self._retention.keep_best is None:
            return None
        return str(self._saver.store.path / "best.h5")

    @property
    def attempt(self) -> int:
        """The number of this attempt; 0 before `begin_attempt`. Valid on the chief only."""
        return self._saver.store.attempt

    @property
    def is_saving(self) -> bool:
        """Whether a save is not yet durable and read back. Valid on the chief only."""
        return self._saver.is_busy

    @property
    def last_save_s(self) -> float | None:
        """Duration of the last save that was read back, in seconds, on the chief; None before, and elsewhere."""
        return self._saver.last_save_s

    # -- save -----------------------------------------------------------------------------------------------------

    @counted("save", "save")
    def save(
        self,
        step: int,
        metrics: Mapping[str, float] | None = None,
        *,
        blocking: bool = True,
        if_changed: bool = False,
        in_memory: bool = False,
        check_interval: bool = True,
    ) -> str | None:
        """Commit the state after `step` optimizer steps and return the file's path on every rank.

        Collective over chief and workers. The chief copies the state; a background thread writes it. The next save,
        `wait` and the end of the program wait for that thread. Older checkpoints are pruned after the file was read
        back.

        Args:
            step: optimizer steps taken; at least the last step in the folder.
            metrics: numbers to store in the file, from the chief; see `keep_best`. Without them, a step that is
                saved again keeps its metrics.
            blocking: whether to return once the file is durable; otherwise return once the state is copied.
            if_changed: whether to save nothing if the chief's state equals the last saved or restored one.
            in_memory: whether to copy the state to the memory of every node too, like `save_fast`; on the chief's node
                one copy of the arrays is enough for the file and for the memory.
            check_interval: whether to save nothing, and return None, within `checkpoint_interval` steps of the last
                save or restore.

        Raises:
            UsageError: if an object that drives an optimizer is not in the Checkpoint, or a metric is no number; on all
                ranks.
            CheckpointError: if this save or the previous one cannot be written, on all ranks; earlier checkpoints are
                untouched.
            DesyncError: if ranks differ in parameters or optimizers: raised by this call with `blocking`, or if ranks
                other than the chief differ among themselves; else by the next save or `wait`. On all ranks; no file is
                written, and copies in memory are removed.

        Cost: one copy of the arrays on the chief; with `blocking`, also the time to write them. The other ranks read
            parameters and optimizers once, while the chief copies.
        """
        step = _checked_step(step)
        if check_interval and self._is_too_soon(step):
            return None
        group = group_of(self._comm, None, self._world)
        with group.recorded("save", None):  # the watchdog names ranks that do not come
            group.wait([group.comm.Ibarrier()])
        with self._world.agreed(self._comm):
            numbers = None if metrics is None else _numbers_of(metrics)
        self._require_optimizer_drivers()
        self._begin_to_save()
        self.wait()
        self.checkpoint.make_equal()
        in_memory = in_memory and self._agree_to_copy()
        path = ""
        gathered = self.checkpoint.gather()
        expected: Future[int] = Future()  # the digest of the other ranks, for the chief's thread
        try:
            with self._world.agreed(self._comm):
                if self._is_writer:
                    collected = self.checkpoint.collect(gathered)
                    saved = self._saver.save(
                        step,
                        collected,
                        self._written(),
                        numbers,
                        if_changed=if_changed,
                        in_memory=in_memory,
                        comparison=self._comparison_of(*collected, expected),
                    )
                    path = str(saved or self.latest_path)
                elif in_memory and self._saver.keeps_copies:
                    self._saver.copy(step, self.checkpoint.collect(gathered), self._written())
            if self._comm.size > 1:
                self._compare_others(expected)
        except BaseException as error:
            if not expected.done():  # or the thread would wait for it
                expected.set_exception(error)
            raise
        if blocking:
            self._wait(only_durable=True)
        self.latest_path = self._world.broadcast_text(path, 0, self._comm)
        self.note_saved(step)
        return self.latest_path

    def _is_too_soon(self, step: int) -> bool:
        """Return whether a step is within `checkpoint_interval` steps of the last save or restore."""
        is_first = self.latest_path is None
        return not is_first and 0 <= step - self.saved_step < self._interval

    def _comparison_of(
        self, state: Any, arrays: list[NamedArray], expected: "Future[int]"
    ) -> Comparison | None:
        """Return how the chief's thread compares its state with that of other ranks; None without other ranks.

        Args:
            state: state of the objects.
            arrays: arrays that the state refers to.
            expected: digest that the other ranks hold.
        """
        if self._comm.size == 1:
            return None
        parts = self.checkpoint.trained_parts(state["objects"])
        return Comparison(parts, arrays, self._comm.size, expected)

    def _compare_others(self, expected: "Future[int]") -> None:
        """Give the chief's thread the digest that all other ranks hold, or raise DesyncError if they hold several.

        Collective over chief and workers. The chief has laid out its state meanwhile.
        """
        local_digest = None if self._is_writer else self._digest_of_trained()
        digest = digest_of_others(local_digest, self._world)
        if digest is not None:
            expected.set_result(digest)
            return
        if local_digest is None:
            local_digest = self._digest_of_trained()
        digests = gather_digests(local_digest, self._world)
        expected.set_exception(difference(digests))
        self._wait(only_durable=True)  # raises that error on all ranks

    def _digest_of_trained(self) -> int:
        nodes, arrays = self.checkpoint.collect_equal()
        return digest_of(self.checkpoint.trained_parts(nodes), arrays, contents_of(arrays))

    def _begin_to_save(self) -> str | None:
        """Begin an attempt if there is none; return the path that `Checkpoint.restore` loaded since the last call.

        Progress counts from there, and any later step can be saved. An attempt that has saved a later step gives way to
        another one.

        Collective over chief and workers.
        """
        chosen = self.checkpoint.chosen_path
        step = self.checkpoint.step
        if chosen is not None and self.saved_step > step:
            self._has_begun = False
        self.begin_attempt()
        if chosen is not None:
            with self._world.agreed(self._comm):
                if self._is_writer:
                    self.ledger.resume(step, is_base=True)
                    self._saver.store.resume_from(Saved(self.attempt, step))
                    self._saver.last = None  # it describes the state before the choice
            if self._saver.fast_tier is not None:
                self._saver.fast_tier.resume_from(Saved(0, step))
            self.latest_path = chosen
            self.checkpoint.chosen_path = None
            self.note_saved(step)
        return chosen

    def call_after_commit(self, note: Callable[[int], None]) -> None:
        """Have note(step), a method, called on the chief after each commit, in the thread that writes. Not collective.

        The method is held weakly. The next save or `wait` raises its errors.
        """
        self._saver.call_after_commit(note)

    def note_saved(self, step: int) -> None:
        """Record that `step` is saved, by this manager or by a user's function in its place. On all ranks."""
        self.checkpoint.step = step
        self.saved_step = step
        self.saved_at = time.monotonic()

    def reserve(self) -> None:
        """Take the memory in which saves, and copies in memory, are laid out, now that the state has its full size.

        The handler does so after the first step: in a memory cgroup, memory is charged when it is first used, and a
        process that exceeds the limit is killed, which must not be hours later.

        Collective over chief and workers.

        Raises:
            CheckpointError: if memory is insufficient; on all ranks.

        Cost: one copy of the arrays on the chief, and on the first rank of each node where copies are kept. A save that
        is being written is waited for.
        """
        self.wait()
        self._require_optimizer_drivers()
        self.checkpoint.unsaved_state.note_copies()
        gathered = self.checkpoint.gather()
        with self._world.agreed(self._comm):
            if self._is_writer or self._saver.keeps_copies:
                self._saver.reserve(self.checkpoint.collect(gathered))

    def _require_optimizer_drivers(self) -> None:
        with self._world.agreed(self._comm):
            self.checkpoint.unsaved_state.look()

    def require_model_copies(self) -> None:
        """Raise UsageError on all ranks if a copy of a model, which changes at each step, is not in the Checkpoint.

        To be called one step after `reserve`. Collective over chief and workers.
        """
        with self._world.agreed(self._comm):
            self.checkpoint.unsaved_state.look_at_copies()

    def start(self) -> None:
        """Make ready to save also while the program exits. Not collective: it acts on the chief alone."""
        if self._is_writer:
            self._saver.start()

    def warn_of_memory(self) -> None:
        """Log if memory may be too small for saves, by an estimate: `reserve` knows, but only after the first step.

        Not collective.
        """
        if not self._is_writer:
            return
        available = available_bytes()
        expected = self.checkpoint.estimate_bytes(1 + 2 * self._saver.keeps_copies)
        if available is not None and available < expected:
            logger.warning(
                "save: about %d bytes of memory will be needed after the first step, with what saves take, and %d are "
                "available: the job may be ended then; ask the batch system for more.",
                expected,
                available,
            )

    @counted("save", "copy in memory")
    def save_fast(self, step: int) -> None:
        """Copy the state after `step` optimizer steps to the memory of every node; see `fast_directory`.

        The state must be equal on all ranks, as models, optimizers, distributed datasets and metrics are. A node that
        cannot make a copy logs it and continues without. The chief's node makes none while a save is being written, and
        no node does while records of metrics wait to be written, on which copies rely. Where they cannot be written at
        all, copies are made: a restart then misses these records.

        Collective over chief and workers.

        Cost: one copy of the arrays on the first rank of each node, and an all-reduce of 8 bytes.
        """
        self._begin_to_save()
        if not self._agree_to_copy():
            return
        self.checkpoint.make_equal()
        gathered = self.checkpoint.gather()
        with self._world.agreed(self._comm):
            if self._saver.keeps_copies:
                self._saver.copy(step, self.checkpoint.collect(gathered), self._written())

    def _agree_to_copy(self) -> bool:
        """Return whether records of metrics are in their file: copies in memory rely on it.

        Collective over chief and workers.
        """
        can_copy = True
        if self._is_writer:
            # a file server that hangs delays one copy only
            for_s = _PATIENCE_S
            if self._were_records_late:
                for_s = 0
            for file in self.checkpoint.files():
                can_copy = can_copy and file.is_written(for_s)
            self._were_records_late = not can_copy
        return self._world.all_reduce_int(int(can_copy), MPI.MIN, self._comm) == 1

    def remove_all(self) -> None:
        """Remove all checkpoints, of a run that has ended and is not to be resumed. A failed removal is only logged.

        Not collective: the chief acts. Call `wait` before.
        """
        if self._is_writer:
            self._saver.store.remove_all()

    @counted("save", "wait for the disk")
    def wait(self) -> None:
        """Wait until the last save is durable and was read back.

        Collective over chief and workers.

        Raises:
            CheckpointError: if it cannot be written, on all ranks.
            DesyncError: if it was not written, as ranks differ; on all ranks.
        """
        self._wait()

    def _wait(self, only_durable: bool = False) -> None:
        with self._forgetting_copies():
            self._saver.wait(only_durable)

    @contextlib.contextmanager
    def _forgetting_copies(self) -> Iterator[None]:
        """Remove copies in memory if ranks differ: they are newer than the last comparison, and may be wrong."""
        try:
            yield
        except DesyncError:
            self.forget_copies()
            raise

    def check_equal(self) -> None:
        """Raise unless all ranks hold the same models and optimizers, bit for bit.

        If they differ, checkpoints stay and copies in memory are removed.

        Collective over chief and workers.

        Raises:
            DesyncError: on all ranks, naming those that differ; exit code 76, "do not requeue".

        Cost: every rank reads its models and optimizers once; two all-reduces of 8 bytes.
        """
        self.checkpoint.make_equal()
        self.checkpoint.refresh()
        with self._forgetting_copies():
            nodes, arrays = self.checkpoint.collect_equal()
            if self.checkpoint.is_on_servers:
                nodes = self.checkpoint.trained_parts(nodes)
            require_equal(digest_of(nodes, arrays, contents_of(arrays)), self._world)

    # -- restore --------------------------------------------------------------------------------------------------

    def restore_or_initialize(self) -> str | None:
        """Restore the latest checkpoint that verifies; return its path, or None for an empty folder.

        Begins an attempt if none of this manager is in progress, and records which checkpoint it restores. A checkpoint
        that two attempts died on is skipped, see docs/concepts/checkpoints.md. After `Checkpoint.restore(path)` it
        keeps the state of `path`.

        Collective over chief and workers. The chief reads and broadcasts; other ranks do not access the folder.

        Raises:
            CheckpointMismatch: if the checkpoint is of another model or other objects, or has a newer format; on all
                ranks.
            CheckpointError: if checkpoints exist but none verifies, or one cannot be read; on all ranks.
        """
        chosen = self._begin_to_save()
        if chosen is not None:
            return chosen
        self.wait()
        restored = self._restore(self._suspects())
        if restored is None:
            return None
        # to the disk, before the copies in memory can be removed
        if restored.is_in_memory:
            self.save(self.checkpoint.step, blocking=False, check_interval=False)
        return restored.path

    def _suspects(self) -> set[int]:
        """Return the steps that attempts died on, and log that they are skipped. Collective over chief and workers."""
        text = ""
        with self._world.agreed(self._comm):
            if self._is_writer:
                deaths_by_step = suspects(self.ledger.attempts()[:-1])
                text = " ".join(map(str, deaths_by_step))
                for step, died in deaths_by_step.items():
                    numbers = [str(attempt.number) for attempt in reversed(died)]
                    logger.warning(
                        "restore: skips step %d, if there is another one: attempts %s died on it, in different jobs or "
                        "on different nodes.",
                        step,
                        " and ".join(numbers),
                    )
        text = self._world.broadcast_text(text, 0, self._comm)
        return set(map(int, text.split()))

    def begin_config(self, program_end: float | None) -> None:
        """Write `config.json` into the run folder, and a line to the log; see `run_config.py`.

        Collective over chief and workers.
        """
        begin_config(
            self._world, self._saver.store.path.parent, self.attempt, program_end, self._written
        )

    def give_up_attempt(self) -> None:
        """Let the next save or restore begin another attempt: this one was refused, or has failed. On all ranks."""
        self._has_begun = False

    @property
    def is_attempt_in_progress(self) -> bool:
        """Whether an attempt of this manager has begun and has not ended."""
        return self._has_begun

    def check_current(self) -> None:
        """Raise AttemptReplaced if a later attempt of this run has begun. Not collective: chief only."""
        self._saver.store.check_current(has_time=True)

    def end_attempt(
        self,
        request: StopRequest | None = None,
        is_excused: bool = False,
        is_late: bool = False,
    ) -> None:
        """Record that this attempt ends in an orderly way.

        Collective over chief and workers.

        Args:
            request: the stop request that ends it; None if the program has finished.
            is_excused: whether the batch system asked, so that it does not count as an attempt without progress.
            is_late: whether there is no time to wait for a save in progress; copies in memory stay then, too.

        Raises:
            CheckpointError: if the record or the last save cannot be written; on all ranks.
        """
        if not is_late:
            self.wait()
        with self._world.agreed(self._comm):
            if self._is_writer:
                if request is None:
                    self.ledger.end("finished", PROGRAM_HAS_FINISHED)
                else:
                    self.ledger.end_stopped(request, is_excused)
        if not is_late:
            self.forget_copies()
        self._has_begun = False  # the next save or restore begins another attempt

    def forget_copies(self) -> None:
        """Remove this node's copies in memory, if this rank keeps them."""
        self._saver.forget_copies()

    def _restore(self, skipped: set[int]) -> Restored | None:
        copy = None
        if self._saver.fast_tier is not None:
            copy = self._saver.fast_tier.find()
        restore = Restore(self._world, self.checkpoint)
        restored = restore.newest(self._saver.store, copy, skipped, self._note_restore)
        if restored is None:
            self.note_saved(self.checkpoint.step)
            return None
        self.checkpoint.publish()
        with self._world.agreed(self._comm):
            if self._is_writer:
                self._saver.store.resume_from(restored.saved)
                self._saver.last = restored.index
                self.ledger.resume(restored.saved.step)
        if self._saver.fast_tier is not None:
            self._saver.fast_tier.resume_from(restored.saved)
        if self._is_writer:
            warn_of_changes(restored.index.written, self._written())
        self.latest_path = restored.path
        self.note_saved(restored.saved.step)
        return restored

    def _note_restore(self, saved: Saved) -> None:
        """Record which checkpoint is about to be read, as reading may kill this process.

        An evaluator only reads, and records nothing.
        """
        if self._is_writer:
            self.ledger.restore(saved.step)

    def _written(self) -> dict[str, Any]:
        return describe(self._world, self.checkpoint.describe_sums())


def _checked_step(step: int) -> int:
    """Return a number of steps as an int.

    Raises:
        UsageError: if it is not from 0 to 2**63 - 1.
        TypeError: if it is not an integer.
    """
    step = operator.index(step)
    if not 0 <= step < 1 << 63:
        raise UsageError(
            f"save: expected a step from 0 to 2**63 - 1, got {step}; count optimizer steps."
        )
    return step


def _numbers_of(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return metrics as numbers of Python.

    Raises:
        UsageError: for a metric that is no number; on this rank only.
    """
    numbers: dict[str, float] = {}
    for name, value in metrics.items():
        try:
            if isinstance(value, (str, bytes)):
                raise TypeError
            plain = value.detach() if hasattr(value, "detach") else value
            numbers[name] = float(plain)
        except (TypeError, ValueError, RuntimeError):
            # of an array, a tensor of several numbers, or anything else
            raise UsageError(
                f"save: expected a number for the metric {name!r}, got {type(value).__name__}; pass one, such as "
                f"value.mean().item()."
            ) from None
    return numbers

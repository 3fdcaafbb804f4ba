"""The saver of one folder: a buffer for a file, and the background thread that writes it."""

import functools
import json
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

from hpcdist.background import BackgroundThread
from hpcdist.checkpoint.image import FileImage
from hpcdist.checkpoint.layout import lay_out
from hpcdist.checkpoint.read import Index
from hpcdist.checkpoint.retention import Retention
from hpcdist.checkpoint.store import Saved, Store
from hpcdist.checkpoint.tree import NamedArray


class Saver:
    """Saves into one folder in the background, one save at a time.

    Args:
        store: destination.
        retention: which checkpoints to keep.
        prepare: called in the background before a checkpoint is written; its CheckpointError is that of the save. It
            must not hold models: a save that is not done keeps this object to the end of the program.

    Attributes:
        store: see above.
        verified_step: step of the last checkpoint that is durable and was read back; -1 before the first.
        last_save_s: its duration from the copy on, in seconds; None before the first.
        last: index of the last committed or restored checkpoint; None before the first.
    """

    def __init__(self, store: Store, retention: Retention, prepare: Callable[[], None] = lambda: None) -> None:
        self.store = store
        self._prepare = prepare
        self.verified_step = -1
        self.last_save_s: float | None = None
        self.last: Index | None = None
        self._retention = retention
        self._image = FileImage()
        self._thread = BackgroundThread("hpcdist-saver")
        self._committing: Future[Index] | None = None
        self._tidying: Future[None] | None = None

    def save(
        self,
        step: int,
        state: Any,
        arrays: list[NamedArray],
        written: dict[str, Any],
        metrics: Mapping[str, float] | None,
        is_changed: bool = True,
    ) -> Path | None:
        """Copy a state, and write it and prune older ones in the background; return the path of its file.

        Args:
            step: optimizer steps taken.
            state: the state, as JSON.
            arrays: its arrays.
            written: its provenance.
            metrics: metrics for the index; None: those of the last checkpoint, if it has the same step.
            is_changed: False to compare the state with the last saved or restored one first, and return None if they
                are equal.

        Raises:
            CheckpointError: if the previous save cannot be written, or this one cannot start.
        """
        self.finish()
        started = time.monotonic()
        path = self.store.path_of(step)
        if metrics is None:
            metrics = self.last.metrics if self.last is not None and self.last.step == step else {}
        facts = {"step": step, "time_s": time.time(), "metrics": {name: float(metrics[name]) for name in metrics}}
        lay_out(self._image, {**facts, "written": written}, state, arrays)
        if not is_changed and self._is_last(state):
            return None
        self._committing = self._thread.submit(functools.partial(self._commit, step))
        self._tidying = self._thread.submit(functools.partial(self._tidy, self._committing, started))
        return path

    def reserve(self, state: Any, arrays: list[NamedArray]) -> None:
        """Lay out a state as for a save, but write nothing: the memory of the saves that follow is taken now.

        Raises:
            CheckpointError: if memory is insufficient, or the previous save cannot be written.
        """
        self.finish()
        lay_out(self._image, {"step": 0, "time_s": 0.0, "metrics": {}, "written": {}}, state, arrays)

    def _is_last(self, state: Any) -> bool:
        """Return whether a state, with the arrays in the image, is that of the last checkpoint."""
        return (
            self.last is not None
            and json.dumps(state) == json.dumps(self.last.state)
            and self._image.digest_of_arrays() == self.last.header.arrays_digest
        )

    def _commit(self, step: int) -> Index:
        self._prepare()
        return self.store.commit(step, self._image)

    def _tidy(self, committing: "Future[Index]", started: float) -> None:
        if committing.exception() is None:
            self.last = committing.result()
            self.store.prune(Saved(self.store.attempt, self.last.step), self._retention)
            self.store.note("commit", step=self.last.step)
            self.verified_step, self.last_save_s = self.last.step, time.monotonic() - started

    def is_committing(self, for_s: float) -> bool:
        """Wait up to `for_s` seconds for the last save; return whether it is not yet durable."""
        return _is_under_way(self._committing, for_s)

    def is_busy(self, for_s: float) -> bool:
        """Wait up to `for_s` seconds for the last save; return whether it is not yet durable and read back."""
        return _is_under_way(self._tidying, for_s)

    @property
    def n_blocks(self) -> int:
        """Blocks written and read back so far: while it grows, a slow save is not stuck."""
        return self._image.n_blocks + self.store.n_blocks_read

    @property
    def is_settled(self) -> bool:
        """Whether no save is in progress and no failure is unreported."""
        saves = [future for future in (self._committing, self._tidying) if future is not None]
        return all(future.done() and future.exception() is None for future in saves)

    def finish_commit(self) -> None:
        """Wait until the last save is durable.

        Raises:
            CheckpointError: if it could not be written; raised once.
        """
        committing, self._committing = self._committing, None
        if committing is not None:
            committing.result()

    def finish(self) -> None:
        """Wait until the last save is durable, was read back, and older ones are pruned.

        Raises:
            CheckpointError: if it could not be written; raised once.
        """
        self.finish_commit()
        tidying, self._tidying = self._tidying, None
        if tidying is not None:
            tidying.result()


def _is_under_way(future: "Future[Any] | None", for_s: float) -> bool:
    return future is not None and future not in wait([future], for_s).done

"""A sampler for programs that keep their own DataLoader.

It is not in `torch_source.py`: worker processes of a DataLoader import that file, and must not start MPI.
"""

import itertools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from hpcdist.data.own_items import SeededLoader
from hpcdist.data.row_numbers import RowSeeds, seed_of
from hpcdist.errors import DataError
from hpcdist.runtime.parts import PartSource
from hpcdist.runtime.process import make_world

logger = logging.getLogger("hpcdist")


class DistributedSampler(torch.utils.data.DistributedSampler[Any]):
    """torch's sampler for this rank's share of a dataset, for programs that keep their own DataLoader.

    `experimental_distribute_dataset(loader)` needs no sampler, divides each batch exactly, and resumes on other ranks.

    In `Checkpoint(data=sampler)` it resumes at the exact batch, on the same number of ranks: begin the loop over epochs
    at `sampler.epoch`. The position is counted where a DataLoader with this sampler yields batches in the main thread;
    it counts the batches that a step was made of.

    >>> sampler = hpcdist.DistributedSampler(range(10))
    >>> loader = torch.utils.data.DataLoader(range(10), batch_size=2, sampler=sampler)

    Not collective, but for the start of MPI in a process that has made no strategy.

    Args:
        dataset: dataset with a length that is equal on all ranks.
        num_replicas: number of shares. By default, the number of ranks of the strategy's role.
        rank: number of this rank's share. By default, the number of this rank in its role.
        shuffle: whether each epoch that `set_epoch` names has a new random order.
        seed: seed of the order, equal on all ranks.
        drop_last: whether rows that do not divide evenly are dropped, instead of giving some rows twice.
    """

    def __init__(
        self,
        dataset: Any,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        if num_replicas is None or rank is None:
            comm = make_world().role_comm
            if num_replicas is None:
                num_replicas = comm.size
            if rank is None:
                rank = comm.rank
        super().__init__(dataset, num_replicas, rank, shuffle, seed, drop_last)
        self._order_epoch = 0
        self._n_used = 0
        self._is_named = False
        self._has_unknown_position = False
        self._source: PartSource | None = None
        self._n_complete_at_load: int | None = None
        self._seeded_loader: SeededLoader | None = None

    def set_epoch(self, epoch: int, n_used: int = 0) -> None:
        """Name the epoch whose order comes next. Without a call, every pass has the order of the first epoch.

        After a restore, the rows that the restored epoch has used are left out.

        Args:
            epoch: number of the epoch.
            n_used: number of rows of this rank's share that the epoch has used already: they are left out of the next
                pass.

        Raises:
            DataError: after a restore, for another epoch than the restored one.
        """
        if self._is_resuming and epoch != self.epoch:
            raise DataError(
                f"DistributedSampler.set_epoch: expected {self.epoch}, the epoch of the checkpoint, got {epoch}; begin "
                f"the loop over epochs there: for epoch in range(sampler.epoch, n_epochs)."
            )
        if not self._is_resuming:
            self._n_used = n_used
        super().set_epoch(epoch)
        self._order_epoch = epoch
        self._is_named = True

    def __iter__(self) -> Iterator[Any]:
        """Return an iterator over the numbers of this rank's rows, from the first unused one on."""
        epoch = self.epoch
        self.epoch = self._order_epoch
        rows = itertools.islice(super().__iter__(), self._n_used, None)
        self.epoch = epoch
        if self._source is None:
            self._n_used = 0
            self._n_complete_at_load = None
            self._has_unknown_position = True
        return rows

    # -- position, as the passes of a DataLoader are followed ----------------------------------------------------

    @property
    def _is_resuming(self) -> bool:
        """Whether a position was loaded, and nothing was trained since."""
        if self._n_complete_at_load is None:
            return False
        return self._source is None or self._source.n_complete == self._n_complete_at_load

    def follow(self, source: PartSource) -> bool:
        """Take the position from what a DataLoader has handed out and steps have completed.

        Returns:
            whether the position is taken: not if another DataLoader with this sampler is followed.
        """
        if self._source is not None and not self._source.is_abandoned:
            return False
        self._source = source
        self._seeded_loader = None
        source.move(self.position_after(self._n_used))
        if self._n_complete_at_load is not None:
            self._n_complete_at_load = source.n_complete
        return True

    @contextmanager
    def beginning_pass(self, loader: "torch.utils.data.DataLoader[Any]") -> Iterator[None]:
        """Let a DataLoader begin a pass in the block: each row gets other random numbers, the same after a restart.

        The workers get theirs when they begin, from torch's generator, which is left as it was.
        """
        if self._seeded_loader is None:
            self._seeded_loader = SeededLoader(loader, self._row_seeds)
        state = torch.get_rng_state()
        torch.default_generator.manual_seed(seed_of(self.seed, self._order_epoch, self.epoch))
        try:
            with self._seeded_loader.beginning(loader):
                yield
        finally:
            torch.set_rng_state(state)

    def _row_seeds(self) -> RowSeeds:
        return RowSeeds(seed_of(self.seed, self._order_epoch), self.epoch)

    def begin_pass(self) -> int:
        """Return how many rows of the epoch were used before the pass that begins now."""
        return self._n_used

    def position_after(self, n_rows: int) -> "_SamplerPosition":
        """Return the position after rows of this rank's share of the epoch."""
        return _SamplerPosition(self.epoch, self._order_epoch, min(n_rows, len(self)))

    def end_pass(self) -> "_SamplerPosition":
        """Move on to the next epoch; return its position."""
        if self.shuffle and not self._is_named and self.epoch == 0 and self.rank == 0:
            logger.warning(
                "DistributedSampler: expected set_epoch(epoch) before each epoch, got none: every epoch has the same "
                "order of rows."
            )
        self.epoch += 1
        self._n_used = 0
        self._n_complete_at_load = None
        return self.position_after(0)

    def state_dict(self) -> dict[str, int]:
        """Return the epoch, and how many rows of this rank's share it has used. Equal on all ranks.

        Raises:
            DataError: if rows were drawn otherwise than by a DataLoader, so that the number of used rows is unknown.
        """
        if self._has_unknown_position:
            raise DataError(
                "DistributedSampler: expected DataLoader(data, batch_size=..., sampler=sampler) to draw its rows, got "
                "another way, of which nobody knows what was used; draw by a DataLoader, made after the handler."
            )
        position = self.position_after(self._n_used)
        if self._source is not None:
            position = self._source.saved_position(is_training=True)
        return {
            "epoch": position.epoch,
            "order_epoch": position.order_epoch,
            "n_used": position.n_used,
            "n_rows": self.total_size,
            "n_replicas": self.num_replicas,
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Resume at a position.

        Raises:
            DataError: when it is of a dataset of another length, or of other ranks.
        """
        for key, size in (("n_rows", self.total_size), ("n_replicas", self.num_replicas)):
            if state[key] != size:
                raise DataError(
                    f"restore: expected a DistributedSampler with {key} {state[key]} as in the checkpoint, got {size}; "
                    f"use the same data and ranks, or strategy.experimental_distribute_dataset(loader)."
                )
        self.epoch = state["epoch"]
        self._order_epoch = state["order_epoch"]
        self._n_used = state["n_used"]
        self._n_complete_at_load = 0
        if self._source is not None:
            self._source.forget()
            self._source.move(self.position_after(self._n_used))
            self._n_complete_at_load = self._source.n_complete


@dataclass(frozen=True)
class _SamplerPosition:
    """A position of a sampler: the epoch in progress, the epoch whose order it has, and the rows used of it."""

    epoch: int
    order_epoch: int
    n_used: int

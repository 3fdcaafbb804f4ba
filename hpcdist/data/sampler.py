"""A sampler for programs that keep their own DataLoader.

In a file of its own: worker processes of a DataLoader import `torch_source.py`, and must not start MPI.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import torch

from hpcdist.errors import DataError
from hpcdist.runtime.loop_state import PartSource
from hpcdist.runtime.process import make_world


class DistributedSampler(torch.utils.data.DistributedSampler[Any]):
    """torch's sampler for this rank's share of a dataset, for programs that keep their own DataLoader.

    `experimental_distribute_dataset(loader)` needs no sampler, divides each batch exactly, and keeps the cursor itself.

    >>> sampler = hpcdist.DistributedSampler(range(10))
    >>> loader = torch.utils.data.DataLoader(range(10), batch_size=2, sampler=sampler)

    Not collective, but for the start of MPI in a process that has made no strategy.

    Args:
        dataset: has a length, equal on all ranks.
        num_replicas: default: the ranks of the strategy's role.
        rank: default: this one's number among them.
        shuffle: a new order in each epoch that `set_epoch` names.
        seed: of the order; equal on all ranks.
        drop_last: drop rows that do not divide evenly, instead of giving some twice.
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
        comm = make_world().role_comm if num_replicas is None or rank is None else None
        n_replicas = comm.size if num_replicas is None and comm is not None else num_replicas
        own = comm.rank if rank is None and comm is not None else rank
        super().__init__(dataset, n_replicas, own, shuffle, seed, drop_last)
        self._n_used = 0
        self._is_loaded = False
        self._source: PartSource | None = None

    def set_epoch(self, epoch: int, n_used: int = 0) -> None:
        """Name the epoch whose order comes next. Without a call, each pass that has ended is followed by the next epoch.

        After a restore the rows that the restored epoch has used are left out.

        Args:
            epoch: its number.
            n_used: rows of this rank's share that the epoch has used already: they are left out of the next iteration.

        Raises:
            DataError: after a restore, for another epoch than the restored one.
        """
        if self._is_loaded and epoch != self.epoch:
            raise DataError(
                f"DistributedSampler.set_epoch: expected {self.epoch}, the epoch that the checkpoint is in, got {epoch}; "
                f"begin the loop over epochs there: for epoch in range(sampler.epoch, n_epochs)."
            )
        if not self._is_loaded:
            self._n_used = n_used
        super().set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        """Yield the numbers of this rank's rows, from the first unused one on."""
        n_used, self._n_used = self._n_used, 0
        return itertools.islice(super().__iter__(), n_used, None)

    # -- position, as a DataLoader's passes are followed -----------------------------------------------------------

    def follow(self, source: PartSource) -> None:
        """Take the position from what a DataLoader has handed out and steps have completed."""
        self._source = source
        source.move((self.epoch, self._n_used))

    def begin_pass(self) -> int:
        """Return how many rows of the epoch were used before the pass that begins now."""
        source = self._source
        if source is not None and not source.has_pass and self._is_loaded:
            self._is_loaded = False
        return self._n_used

    def position_after(self, n_rows: int) -> tuple[int, int]:
        """Return the position after rows of this rank's share of the epoch."""
        return self.epoch, min(n_rows, len(self))

    def end_pass(self) -> tuple[int, int]:
        """Move on to the next epoch; return its position."""
        self.epoch += 1
        self._n_used = 0
        return self.epoch, 0

    def state_dict(self) -> dict[str, int]:
        """Return the epoch, and how many rows of this rank's share it has used. Equal on all ranks."""
        source = self._source
        epoch, n_used = (self.epoch, self._n_used) if source is None else source.saved_position(is_training=True)
        return {"epoch": epoch, "n_used": n_used, "n_rows": self.total_size, "n_replicas": self.num_replicas}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Resume at a position.

        Raises:
            DataError: when it is of a dataset of another length, or of other ranks.
        """
        for key, own in (("n_rows", self.total_size), ("n_replicas", self.num_replicas)):
            if state[key] != own:
                raise DataError(
                    f"restore: expected a DistributedSampler with {key} {state[key]} as in the checkpoint, got {own}; "
                    f"use the same data and ranks, or strategy.experimental_distribute_dataset, which resumes on others."
                )
        self.epoch = state["epoch"]
        self._n_used = state["n_used"]
        self._is_loaded = True
        if self._source is not None:
            self._source.forget()
            self._source.move((self.epoch, self._n_used))

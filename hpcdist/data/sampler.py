"""A sampler for programs that keep their own DataLoader.

In a file of its own: worker processes of a DataLoader import `torch_source.py`, and must not start MPI.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import torch

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

    def set_epoch(self, epoch: int, n_used: int = 0) -> None:
        """Name the epoch whose order comes next.

        Args:
            epoch: its number.
            n_used: rows of this rank's share that the epoch has used already, as a checkpoint knows: they are left out
                of the next iteration.
        """
        super().set_epoch(epoch)
        self._n_used = n_used

    def __iter__(self) -> Iterator[Any]:
        """Yield the numbers of this rank's rows, from the first unused one on."""
        n_used, self._n_used = self._n_used, 0
        return itertools.islice(super().__iter__(), n_used, None)

"""Sums over the replicas of this rank, kept as the subtrees of the tree over all replicas that they make up."""

import torch
from torch import Tensor

from hpcdist.plan.replicas import Subtree, is_joint


class SubtreeSums:
    """Flat tensors of one bucket, one from each local replica, in the order of replicas.

    At most one tensor of every subtree size is kept, so for k local replicas about log2(k) + 1.

    Args:
        n_replicas: of the job.
    """

    def __init__(self, n_replicas: int) -> None:
        self._n_replicas = n_replicas
        self._subtrees: list[Subtree] = []
        self._sums: list[Tensor] = []

    @torch.no_grad()
    def add(self, replica: int, tensor: Tensor, is_kept: bool) -> None:
        """Add a replica's tensor.

        Args:
            replica: its number, one more than the last one's.
            tensor: flat.
            is_kept: whether it may be kept and overwritten; else it is copied where it is to be kept.
        """
        subtree = (replica, replica + 1)
        if self._subtrees and is_joint(self._subtrees[-1], subtree, self._n_replicas):
            self._sums[-1].add_(tensor)
            self._subtrees[-1] = (self._subtrees[-1][0], subtree[1])
        else:
            self._subtrees.append(subtree)
            self._sums.append(tensor if is_kept else tensor.clone())
        while len(self._subtrees) > 1 and is_joint(self._subtrees[-2], self._subtrees[-1], self._n_replicas):
            right, (_, stop) = self._sums.pop(), self._subtrees.pop()
            self._sums[-1].add_(right)
            self._subtrees[-1] = (self._subtrees[-1][0], stop)

    def take(self) -> list[Tensor]:
        """Return the sums, one for each subtree, and forget them."""
        sums, self._sums, self._subtrees = self._sums, [], []
        return sums

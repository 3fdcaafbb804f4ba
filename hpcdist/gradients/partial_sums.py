"""Sums over the replicas of this rank, kept as the subtrees of the tree over all replicas that they make up."""

import torch
from torch import Tensor

from hpcdist.plan.replicas import is_joint
from hpcdist.plan.tree import Partial


class PartialSums:
    """Flat tensors of one bucket, one from each local replica, in the order of replicas.

    Kept is at most one tensor of every subtree size, so for k local replicas about log2(k) + 1.

    Args:
        n_replicas: of the job.
    """

    def __init__(self, n_replicas: int) -> None:
        self._n_replicas = n_replicas
        self._spans: list[Partial] = []
        self._sums: list[Tensor] = []

    @torch.no_grad()
    def push(self, replica: int, tensor: Tensor, is_ours: bool) -> None:
        """Add a replica's.

        Args:
            replica: its number, one more than the last one's.
            tensor: flat.
            is_ours: whether it may be kept and overwritten; else it is copied where it is to be kept.
        """
        span = (replica, replica + 1)
        if self._spans and is_joint(self._spans[-1], span, self._n_replicas):
            self._sums[-1].add_(tensor)
            self._spans[-1] = (self._spans[-1][0], span[1])
        else:
            self._spans.append(span)
            self._sums.append(tensor if is_ours else tensor.clone())
        while len(self._spans) > 1 and is_joint(self._spans[-2], self._spans[-1], self._n_replicas):
            right, (_, stop) = self._sums.pop(), self._spans.pop()
            self._sums[-1].add_(right)
            self._spans[-1] = (self._spans[-1][0], stop)

    def take(self) -> list[Tensor]:
        """Return the sums, one for each subtree, and forget them."""
        sums, self._sums, self._spans = self._sums, [], []
        return sums

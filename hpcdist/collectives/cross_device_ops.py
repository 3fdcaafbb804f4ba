"""`CrossDeviceOps`: what sums a bucket of gradients over the replicas, as users of tf.distribute know it."""

import abc
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hpcdist.collectives import mpi, selection
from hpcdist.collectives.group import Group
from hpcdist.collectives.ops import SUM
from hpcdist.collectives.options import CommunicationImplementation as Implementation
from hpcdist.mpi import MPI

Array = npt.NDArray[Any]


class CrossDeviceOps(abc.ABC):
    """Sums buckets of gradients over the replicas. Subclass it to sum them your own way.

    Where tf.distribute's method takes a value per device, `all_reduce` takes this rank's: a rank has one device.
    """

    @abc.abstractmethod
    def all_reduce(self, array: Array, group: Group) -> None:
        """Replace `array` by its sum over the ranks of `group`.

        Collective: `group.comm`, which is yours to use, in a thread of its own where there are several hosts.

        Args:
            array: (n_elements,) float32 or float64 on the host; overwritten.
            group: `group.comm` is an mpi4py communicator with one replica per rank.
        """


class ReductionToOneDevice(CrossDeviceOps):
    """Sums on one rank, which sends the sum to the others. Never the fastest; easy to follow.

    Args:
        reduce_to_device: the rank that sums.
        accumulation_fn: returns the sum of a list of arrays, one per rank in order; default: MPI's own.
    """

    def __init__(
        self, reduce_to_device: int = 0, accumulation_fn: Callable[[Sequence[Array]], Array] | None = None
    ) -> None:
        self._root = reduce_to_device
        self._accumulate = accumulation_fn

    def all_reduce(self, array: Array, group: Group) -> None:
        """Replace `array` by its sum. Cost: root receives and sends (P-1) n bytes, and holds P n with a function."""
        is_root = group.rank == self._root
        if self._accumulate is None:
            group.comm.Reduce(MPI.IN_PLACE if is_root else array, array if is_root else None, MPI.SUM, self._root)
        else:
            rows = np.empty((group.size, array.size), array.dtype) if is_root else None
            group.comm.Gather(array, rows, self._root)
            if rows is not None:
                array[...] = self._accumulate(list(rows))
        mpi.broadcast(array, group.comm, self._root)


class HierarchicalCopyAllReduce(CrossDeviceOps):
    """Shared memory in each host, lanes across hosts: what AUTO is for gradients.

    Args:
        num_packs: accepted for tf.distribute's sake; bucket sizes are `CommunicationOptions.bytes_per_pack`.
    """

    def __init__(self, num_packs: int = 1) -> None:
        self.num_packs = num_packs

    def all_reduce(self, array: Array, group: Group) -> None:
        """Replace `array` by its sum."""
        chosen = selection.for_gradients(group, Implementation.AUTO)
        selection.ALGORITHMS[chosen](array, group, SUM)


class NcclAllReduce(CrossDeviceOps):
    """NCCL, one GPU per rank.

    Args:
        num_packs: accepted for tf.distribute's sake; bucket sizes are `CommunicationOptions.bytes_per_pack`.
    """

    def __init__(self, num_packs: int = 1) -> None:
        self.num_packs = num_packs

    def all_reduce(self, array: Array, group: Group) -> None:
        """Replace `array`, which may be on the device, by its sum."""
        selection.ALGORITHMS[Implementation.NCCL](array, group, SUM)

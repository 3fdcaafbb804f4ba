"""`CrossDeviceOps`: what tf.distribute calls an algorithm that sums gradients, and its three built-in ones."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hpcdist.collectives.calls import all_reduce
from hpcdist.collectives.ops import OPS
from hpcdist.collectives.options import AllReduceAlgorithm
from hpcdist.collectives.options import CommunicationImplementation as Implementation
from hpcdist.runtime.mpi import MPI

Array = npt.NDArray[Any]


class CrossDeviceOps(AllReduceAlgorithm):
    """Sums buckets of gradients over the replicas. Subclass it to sum them your own way; see `AllReduceAlgorithm`.

    Where tf.distribute's method takes a value per device, `all_reduce` takes this rank's: a rank has one device.
    """


class ReductionToOneDevice(CrossDeviceOps):
    """Sums on one rank, which sends the sum to the others. Never the fastest; easy to follow.

    Args:
        reduce_to_device: the rank that sums; or a device's name such as "/cpu:0", as in tf.distribute, for the first.
        accumulation_fn: returns the sum of a list of arrays, one per rank in order; default: MPI's own.
    """

    def __init__(
        self, reduce_to_device: int | str | None = 0, accumulation_fn: Callable[[Sequence[Array]], Array] | None = None
    ) -> None:
        self._root = reduce_to_device if isinstance(reduce_to_device, int) else 0
        self._accumulate = accumulation_fn

    def all_reduce(self, array: Array, comm: MPI.Comm, op: MPI.Op = MPI.SUM) -> None:
        """Replace `array` by its reduction. Cost: root receives and sends (P-1) n bytes, holds P n with a function."""
        is_root = comm.rank == self._root
        if self._accumulate is None:
            comm.Reduce(MPI.IN_PLACE if is_root else array, array if is_root else None, op, self._root)
        else:
            rows = np.empty((comm.size, array.size), array.dtype) if is_root else None
            comm.Gather(array, rows, self._root)
            if rows is not None:
                array[...] = self._accumulate(list(rows))
        comm.Bcast(array, self._root)


class HierarchicalCopyAllReduce(CrossDeviceOps):
    """Shared memory in each host, lanes between hosts: what AUTO is for gradients.

    Args:
        num_packs: accepted for compatibility; bucket sizes are `CommunicationOptions.bytes_per_pack`.
    """

    stands_for = Implementation.AUTO

    def __init__(self, num_packs: int = 1) -> None:
        self.num_packs = num_packs

    def all_reduce(self, array: Array, comm: MPI.Comm, op: MPI.Op = MPI.SUM) -> None:
        """Replace `array` by its reduction."""
        all_reduce(array, _name_of(op), comm=comm)


class NcclAllReduce(CrossDeviceOps):
    """NCCL, one GPU per rank. Buckets stay in device memory.

    Args:
        num_packs: accepted for compatibility; bucket sizes are `CommunicationOptions.bytes_per_pack`.
    """

    stands_for = Implementation.NCCL

    def __init__(self, num_packs: int = 1) -> None:
        self.num_packs = num_packs

    def all_reduce(self, array: Array, comm: MPI.Comm, op: MPI.Op = MPI.SUM) -> None:
        """Replace `array`, a device buffer, by its reduction."""
        all_reduce(array, _name_of(op), Implementation.NCCL, comm)


def _name_of(op: MPI.Op) -> str:
    return next(name for name, known in OPS.items() if known.mpi_op == op)

"""`CrossDeviceOps`, tf.distribute's name for an algorithm that sums gradients, and the three built-in ones."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from hpcdist.collectives.calls import all_reduce
from hpcdist.collectives.library import mpi_op
from hpcdist.collectives.ops import OPS, ReduceOp
from hpcdist.collectives.options import AllReduceAlgorithm, CommunicationOptions
from hpcdist.collectives.options import CommunicationImplementation as Implementation
from hpcdist.errors import CollectiveError, ConfigurationError, agreed
from hpcdist.runtime.mpi import MPI

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class RankValues:
    """The argument of `CrossDeviceOps.reduce_implementation` in place of a PerReplica: a flat array of each rank."""

    values: tuple[Array, ...]


class CrossDeviceOps(AllReduceAlgorithm):
    """Sums buckets of gradients over the ranks. A subclass overrides `reduce_implementation`, as in tf.distribute.

    It may override `all_reduce` instead, which gets only this rank's values and the communicator; see
    `AllReduceAlgorithm`.

    >>> class Ordered(hpcdist.CrossDeviceOps):
    ...     def reduce_implementation(self, reduce_op, per_replica_value, destinations, options):
    ...         return sum(per_replica_value.values)
    >>> strategy = hpcdist.MultiWorkerMirroredStrategy(cross_device_ops=Ordered())
    """

    def reduce_implementation(
        self,
        reduce_op: ReduceOp,
        per_replica_value: RankValues,
        destinations: Array,
        options: CommunicationOptions,
    ) -> Any:
        """Return the reduction of all ranks' values; called on every rank with the same values.

        Args:
            reduce_op: the reduction, SUM. Gradients that are averaged are divided afterwards.
            per_replica_value: object whose `values` has a flat array of each rank, in the order of the ranks. It is the
                sum over the rank's replicas where there are several.
            destinations: array that the result is written to.
            options: default options.
        """
        raise NotImplementedError(
            f"{type(self).__name__}: override reduce_implementation or all_reduce."
        )

    def all_reduce(
        self,
        array: Array,
        comm: MPI.Comm,
        op: MPI.Op = MPI.SUM,
    ) -> None:
        """Replace `array` by the result of `reduce_implementation` for all ranks' arrays.

        Raises:
            CollectiveError: for another reduction than a sum, or a result of another size; on every rank alike.

        Cost: every rank receives the bytes of all other ranks: P n, not 2 n.
        """
        if op != MPI.SUM:
            raise CollectiveError(
                f"{type(self).__name__}: expected a sum, as reduce_implementation knows SUM and MEAN only, got "
                f"{_name_of(op)}; override all_reduce."
            )
        rows = np.empty((comm.size, array.size), array.dtype)
        comm.Allgather(array, rows)
        rank_values = RankValues(tuple(rows))
        options = CommunicationOptions()
        result = self.reduce_implementation(ReduceOp.SUM, rank_values, array, options)
        result_values = getattr(result, "values", (result,))
        reduced = np.asarray(result_values[0])
        if reduced.size != array.size:
            raise CollectiveError(
                f"{type(self).__name__}: expected reduce_implementation to return {array.size} elements, got shape "
                f"{reduced.shape}; return one array like each of the values."
            )
        array[...] = reduced.reshape(array.shape)


class ReductionToOneDevice(CrossDeviceOps):
    """Sums on one rank, which sends the sum to the other ranks. Never the fastest; easy to follow.

    Args:
        reduce_to_device: number of the rank that sums. A device's name such as "/cpu:0", as in tf.distribute, means
            rank 0.
        accumulation_fn: function that returns the sum of a list of arrays, one per rank in order; default: MPI's sum.
    """

    def __init__(
        self,
        reduce_to_device: int | str | None = 0,
        accumulation_fn: Callable[[Sequence[Array]], Array] | None = None,
    ) -> None:
        self._root = reduce_to_device if isinstance(reduce_to_device, int) else 0
        self._accumulate = accumulation_fn

    def all_reduce(
        self,
        array: Array,
        comm: MPI.Comm,
        op: MPI.Op = MPI.SUM,
    ) -> None:
        """Replace `array` by its reduction.

        Cost: the summing rank receives and sends (P-1) n bytes. With an `accumulation_fn` it also holds P n.
        """
        is_root = comm.rank == self._root
        if self._accumulate is not None:
            rows = np.empty((comm.size, array.size), array.dtype) if is_root else None
            comm.Gather(array, rows, self._root)
            if rows is not None:
                array[...] = self._accumulate(list(rows))
        elif is_root:
            comm.Reduce(MPI.IN_PLACE, array, op, self._root)
        else:
            comm.Reduce(array, None, op, self._root)
        comm.Bcast(array, self._root)


class BuiltInOps(CrossDeviceOps):
    """A built-in implementation, `stands_for`, under its name in tf.distribute.

    Args:
        num_packs: accepted for compatibility; bucket sizes are `CommunicationOptions.bytes_per_pack`.
    """

    def __init__(self, num_packs: int = 1) -> None:
        self.num_packs = num_packs

    def all_reduce(
        self,
        array: Array,
        comm: MPI.Comm,
        op: MPI.Op = MPI.SUM,
    ) -> None:
        """Replace `array`, for NCCL a device buffer, by its reduction."""
        all_reduce(array, _name_of(op), self.stands_for, comm)


class HierarchicalCopyAllReduce(BuiltInOps):
    """Shared memory in each host, lanes between hosts, as AUTO chooses for gradients."""

    stands_for = Implementation.AUTO


class NcclAllReduce(BuiltInOps):
    """NCCL, one GPU per rank. Buckets stay in device memory."""

    stands_for = Implementation.NCCL


def _name_of(op: MPI.Op) -> str:
    """Return the name of the first reduction that MPI calculates by this operation."""
    return next(name for name, candidate in OPS.items() if mpi_op(candidate) == op)


def options_with(ops: CrossDeviceOps, options: CommunicationOptions) -> CommunicationOptions:
    """Return options that name `ops` as the algorithm.

    Raises:
        ConfigurationError: when `ops` is no CrossDeviceOps, or the options name another algorithm; on every rank alike.
    """
    if not isinstance(ops, CrossDeviceOps):
        raise agreed(
            ConfigurationError(
                f"strategy: expected cross_device_ops as a CrossDeviceOps object, got {ops!r}; make one, or pass an "
                f"AllReduceAlgorithm as CommunicationOptions(implementation=...)."
            )
        )
    has_chosen = options.implementation is not Implementation.AUTO
    if has_chosen or options.wire_dtype is not None or options.is_ordered is not None:
        raise agreed(
            ConfigurationError(
                f"strategy: expected cross_device_ops or {options}, got both; drop one of them."
            )
        )
    return replace(options, implementation=ops)

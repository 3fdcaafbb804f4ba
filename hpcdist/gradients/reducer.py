"""How the buckets of a strategy are reduced: by which algorithm, in which thread, in which sizes."""

import functools
import time
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from hpcdist.collectives import hierarchical, mpi, nccl_joining, partials, selection
from hpcdist.collectives.cross_device_ops import CrossDeviceOps, NcclAllReduce
from hpcdist.collectives.group import Group
from hpcdist.collectives.ops import SUM
from hpcdist.collectives.options import CommunicationImplementation as Implementation
from hpcdist.collectives.options import CommunicationOptions
from hpcdist.collectives.staging import add_rows
from hpcdist.collectives.thread import Handle, thread_of
from hpcdist.collectives.wire import PLAIN, Wire
from hpcdist.errors import ConfigurationError, agreed
from hpcdist.gradients.wire import HalfWire
from hpcdist.mpi import MPI
from hpcdist.plan.buckets import Limits, best_bucket_bytes
from hpcdist.plan.replicas import ReplicaPlan
from hpcdist.plan.tree import plan_row_additions

Array = npt.NDArray[Any]
#: From this size on a gradient is summed where torch made it: a copy would cost more than a call of its own.
DIRECT_BYTES = 1 << 20
#: Buckets on one host, where only the number of calls counts.
LOCAL_BUCKET_BYTES = 64 << 20
#: Bounds for buckets that travel between hosts.
MIN_BUCKET_BYTES, MAX_BUCKET_BYTES = 128 << 10, 32 << 20
#: What all algorithms that combine gradients in one binary tree over the replicas are called in a checkpoint.
ORDERED = "in the order of replicas"
#: Bytes whose all-reduce is timed to learn latency and bandwidth.
_PROBE_BYTES = (4 << 10, 1 << 20)


class Reducer:
    """Sums buckets over the ranks of a group.

    Args:
        group: the ranks.
        options: which algorithm, pack size and wire.
        cross_device_ops: the user's own way of summing, instead.
        replicas: which rank holds which; default: one each.

    Raises:
        ConfigurationError: when NCCL is asked for and a rank cannot have it; on every rank alike.

    Attributes:
        replicas: see above.
        is_on_device: whether buckets are on the parameters' device, where NCCL sums them; else on the host.
        is_overlapped: whether buckets are reduced while backward goes on: between hosts. In one host the cores are busy
            with backward, and what sums shares them.
    """

    def __init__(
        self,
        group: Group,
        options: CommunicationOptions,
        cross_device_ops: CrossDeviceOps | None = None,
        replicas: ReplicaPlan | None = None,
    ) -> None:
        self._group = group
        self.replicas = replicas or ReplicaPlan(group.size, group.size)
        self._cross_device_ops = _check(cross_device_ops, options)
        if isinstance(cross_device_ops, NcclAllReduce):  # takes buckets on the device
            options, self._cross_device_ops = replace(options, implementation=Implementation.NCCL), None
        self._options = options
        self._implementation = selection.for_gradients(group, Implementation.parse(options.implementation))
        self._wire: Wire = PLAIN
        self.is_overlapped = len(group.placement.hosts) > 1
        self.is_on_device = self._implementation is Implementation.NCCL
        if self.is_on_device:
            nccl_joining.choose_device(group)

    def start(self, array: Any, bucket: int, is_exact: bool = False, title: str = "gradients") -> Handle | None:
        """Begin to sum a flat array over all ranks; it is ready when the handle's `wait` returns, or now without one.

        Collective: the group, in the order of calls.

        Args:
            array: on the host, or for NCCL on the device; overwritten.
            bucket: names the array to a wire that rounds.
            is_exact: the array must not be rounded.
            title: what reports call it.
        """
        wire = PLAIN if is_exact else self._wire
        if self.is_overlapped:
            thread = thread_of(self._group)
            return thread.submit(functools.partial(self._reduce, array, bucket, wire, title, thread.group))
        self._reduce(array, bucket, wire, title, self._group)
        return None

    def start_partials(
        self, sums: list[Any], result: Any, bucket: int, is_exact: bool = False, title: str = "gradients"
    ) -> Handle | None:
        """Begin to put the sum of all replicas into `result`, given this rank's sums of the subtrees that it holds.

        Collective: as `start`.

        Args:
            sums: as `replicas.partials` says; overwritten.
            result: flat, of their size; may be one of them.
            bucket: as `start`.
            is_exact: as `start`.
            title: as `start`.
        """
        if self.replicas.is_plain or not self._is_by_replica:
            for other in sums[1:]:
                np.add(sums[0], other, out=sums[0])
            if result is not sums[0]:
                np.copyto(result, sums[0])
            return self.start(result, bucket, is_exact, title)
        if self.is_overlapped:
            thread = thread_of(self._group)
            return thread.submit(functools.partial(self._reduce_partials, sums, result, title, thread.group))
        self._reduce_partials(sums, result, title, self._group)
        return None

    @property
    def _is_by_replica(self) -> bool:
        """Whether sums are in the order of replicas: not by algorithms asked for by name, or on a wire that rounds."""
        chosen = Implementation.parse(self._options.implementation)
        is_ours = chosen in (Implementation.AUTO, Implementation.SHARED_MEMORY, Implementation.HIERARCHICAL)
        is_exact = self._options.wire_dtype is None and self._options.is_ordered is not False
        return is_ours and is_exact and self._cross_device_ops is None

    def _reduce_partials(self, sums: list[Array], result: Array, title: str, group: Group) -> None:
        with group.recorded(title, result):
            partials.all_reduce(sums, result, group, self.replicas)

    @property
    def own_replicas(self) -> range:
        """The replicas of this rank."""
        return self.replicas.of_rank(self._group.rank)

    def sum_rows(self, rows: list[Array], title: str) -> Array:
        """Return the sum of one flat host array of each local replica over all replicas. Collective: the group.

        In the order of replicas where gradients are.

        Args:
            rows: of any dtype that numpy adds; overwritten.
            title: what reports call it.
        """
        first, parts = self.own_replicas[0], []
        for start, stop in self.replicas.partials[self._group.rank]:
            part = rows[start - first : stop - first]
            add_rows(part, plan_row_additions(len(part)), np.add)  # a subtree's is the tree over as many rows
            parts.append(part[0])
        self.reduce_partials(parts, rows[-1], title)
        return rows[-1]

    def reduce_partials(self, sums: list[Array], result: Array, title: str) -> None:
        """Put the sum of all replicas into `result`; see `start_partials`. Collective: the group. Blocking."""
        if self.is_on_device:
            for other in sums[1:]:
                np.add(sums[0], other, out=sums[0])
            np.copyto(result, sums[0])
            with self._group.recorded(title, result):
                mpi.all_reduce(result, self._group)
        elif (handle := self.start_partials(sums, result, 0, is_exact=True, title=title)) is not None:
            handle.wait()

    def reduce(self, array: Array) -> None:
        """Sum a flat host array over all ranks. Collective: the group. Blocking."""
        if self.is_on_device:
            with self._group.recorded("buffers", array):
                mpi.all_reduce(array, self._group)
        elif (handle := self.start(array, 0, is_exact=True)) is not None:
            handle.wait()

    def broadcast(self, array: Array) -> None:
        """Replace a host array, of any dtype, by the first replica's. Collective: the group. Blocking."""
        with self._group.recorded("broadcast", array):
            mpi.broadcast(array, self._group.comm)

    def _reduce(self, array: Any, bucket: int, wire: Wire, title: str, group: Group) -> None:
        with group.recorded(title, array):
            self._carry_out(array, bucket, wire, group)

    def _carry_out(self, array: Any, bucket: int, wire: Wire, group: Group) -> None:
        if self._cross_device_ops is not None:
            self._cross_device_ops.all_reduce(array, group)
        elif self._implementation is Implementation.HIERARCHICAL:
            hierarchical.all_reduce(array, group, SUM, self._options.is_ordered, wire, bucket)
        else:
            selection.ALGORITHMS[self._implementation](array, group, SUM)

    def plan(self, total_bytes: int) -> Limits:
        """Begin to sum other buckets; return how large they should be for gradients of some size in all.

        Collective at the first call: the group, on several hosts.
        """
        self._wire = PLAIN if self._options.wire_dtype is None else HalfWire(self._options.wire_dtype)
        if self._options.bytes_per_pack:
            return Limits(self._options.bytes_per_pack, DIRECT_BYTES, self._options.bytes_per_pack // 4)
        if not self.is_overlapped:
            return Limits(LOCAL_BUCKET_BYTES, DIRECT_BYTES)
        best = best_bucket_bytes(total_bytes, *self._group.keep("link", self._measure_link))
        bucket_bytes = min(max(best, MIN_BUCKET_BYTES), MAX_BUCKET_BYTES)
        return Limits(bucket_bytes, DIRECT_BYTES, bucket_bytes // 4)

    def describe(self) -> dict[str, str | None]:
        """Return what the bits of its sums depend on, as recorded with each checkpoint. Equal on all ranks.

        Algorithms that sum in the order of replicas give the same bits, and a wire rounds between hosts only.
        """
        is_by_lanes = self._cross_device_ops is None and self._implementation is Implementation.HIERARCHICAL
        return {
            "all_reduce": ORDERED if self._is_in_order else self._name,
            "wire": self._options.wire_dtype if is_by_lanes and self.is_overlapped else None,
        }

    @property
    def _name(self) -> str:
        return type(self._cross_device_ops).__name__ if self._cross_device_ops else self._implementation.value

    @property
    def _is_in_order(self) -> bool:
        """Whether sums are in the binary tree over the replicas, on any placement."""
        if self._implementation is Implementation.HIERARCHICAL and self._options.is_ordered is not None:
            return self._options.is_ordered
        is_known = self._implementation in (Implementation.SHARED_MEMORY, Implementation.HIERARCHICAL)
        return is_known and self._cross_device_ops is None and self._group.placement.is_aligned

    def _measure_link(self) -> tuple[float, float]:
        """Return the latency in seconds, and the seconds per byte, of an all-reduce; the chief's times on all ranks."""
        small_s, large_s = (self._probe(nbytes) for nbytes in _PROBE_BYTES)
        per_byte_s = max(large_s - small_s, 1e-9) / (_PROBE_BYTES[1] - _PROBE_BYTES[0])
        nanoseconds = [int(1e9 * small_s), int(1e15 * per_byte_s)]
        chiefs = [
            self._group.world.all_reduce_int(value if self._group.rank == 0 else 0, MPI.MAX, self._group.comm)
            for value in nanoseconds
        ]
        return max(chiefs[0], 1000) / 1e9, max(chiefs[1], 1) / 1e15

    def _probe(self, nbytes: int) -> float:
        array = np.zeros(nbytes // 4, np.float32)
        times = []
        for _ in range(3):
            started = time.perf_counter()
            self.reduce(array)
            times.append(time.perf_counter() - started)
        return min(times)


def _check(ops: CrossDeviceOps | None, options: CommunicationOptions) -> CrossDeviceOps | None:
    """Return the user's way of summing, unless it is no such thing or options say otherwise."""
    if ops is not None and not isinstance(ops, CrossDeviceOps):
        raise agreed(
            ConfigurationError(
                f"strategy: expected cross_device_ops as a CrossDeviceOps object, got {ops!r}; make one."
            )
        )
    chosen = Implementation.parse(options.implementation) is not Implementation.AUTO
    if ops is not None and (chosen or options.wire_dtype is not None or options.is_ordered is not None):
        raise agreed(
            ConfigurationError(f"strategy: expected cross_device_ops or {options}, got both; drop one of them.")
        )
    return ops

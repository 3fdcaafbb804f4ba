"""How the buckets of a strategy are summed: by one route, in the main or in a background thread, in which sizes."""

import functools
import time
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from hpcdist.collectives import algorithms, library, subtree_sums
from hpcdist.collectives.cross_device_ops import CrossDeviceOps
from hpcdist.collectives.gpu import nccl_setup
from hpcdist.collectives.group import Group, Handle, thread_of
from hpcdist.collectives.ops import SUM
from hpcdist.collectives.options import CommunicationImplementation as Implementation
from hpcdist.collectives.options import CommunicationOptions
from hpcdist.collectives.route import Route, choose_route
from hpcdist.collectives.staging import add_rows
from hpcdist.collectives.wire import PLAIN, Wire
from hpcdist.errors import ConfigurationError, agreed
from hpcdist.gradients.half_wire import HalfWire
from hpcdist.plan.buckets import Limits, best_bucket_bytes
from hpcdist.plan.replicas import ReplicaPlan, plan_row_additions
from hpcdist.runtime.mpi import MPI

Array = npt.NDArray[Any]
#: From this size on a gradient is summed where torch made it: a copy would cost more than a call of its own.
DIRECT_BYTES = 1 << 20
#: Buckets on one host, where only the number of calls counts.
LOCAL_BUCKET_BYTES = 64 << 20
#: Bounds for buckets that travel between hosts.
MIN_BUCKET_BYTES, MAX_BUCKET_BYTES = 128 << 10, 32 << 20
#: How a checkpoint names all routes that combine gradients in the binary tree over the replicas.
ORDERED = "in the order of replicas"
#: Bytes whose all-reduce is timed to learn latency and bandwidth.
_PROBE_BYTES = (4 << 10, 1 << 20)


class Reducer:
    """Sums buckets over the ranks of a group.

    Args:
        group: the ranks.
        options: which algorithm, pack size and wire.
        cross_device_ops: the algorithm, where tf.distribute has it as an argument of its own.
        replicas: which rank holds which; default: one each.

    Raises:
        ConfigurationError: for NCCL where a rank cannot have it, and for two algorithms; on every rank alike.

    Attributes:
        replicas: see above.
        route: how every bucket is summed. Between hosts buckets are summed while backward runs; inside one host the
            cores are busy with backward, and a sum would compete for them.
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
        self._options = options if cross_device_ops is None else _options_with(cross_device_ops, options)
        # one route for all buckets: bits must not depend on how parameters are packed, so dtype and size are not used
        self.route: Route = choose_route(group.facts, self._options, SUM, 0, replicas=self.replicas)
        self._wire: Wire = PLAIN
        if self.route.is_on_device:
            nccl_setup.choose_device(group)

    @property
    def own_replicas(self) -> range:
        """The replicas of this rank."""
        return self.replicas.of_rank(self._group.rank)

    def start(
        self, sums: list[Any], result: Any, bucket: int, is_exact: bool = False, title: str = "gradients"
    ) -> Handle | None:
        """Start to put the sum over all replicas into `result`; it is there when the handle's `wait` returns.

        Collective: the group, in the order of calls.

        Args:
            sums: flat arrays, on the host, or for NCCL on the device: this rank's sums of the subtrees that it holds.
                With one replica per rank, the one array is that replica's. Overwritten.
            result: flat, of their size; may be one of them.
            bucket: names the array to a wire that rounds.
            is_exact: the sum must not be rounded.
            title: what reports call it.

        Returns:
            A handle; None where the sum is there already.
        """
        wire = PLAIN if is_exact else self._wire
        if not self.route.is_overlapped:
            self._reduce(sums, result, bucket, wire, title, self._group)
            return None
        thread = thread_of(self._group)
        return thread.submit(functools.partial(self._reduce, sums, result, bucket, wire, title, thread.group))

    def _reduce(self, sums: list[Any], result: Any, bucket: int, wire: Wire, title: str, group: Group) -> None:
        with group.recorded(title, result):
            if self.route.by_subtrees:
                subtree_sums.all_reduce(sums, result, group, self.replicas)
                return
            _add_up(sums, result)
            algorithms.run(self.route, result, group, SUM, wire, bucket)

    def sum_rows(self, rows: list[Array], title: str) -> Array:
        """Return the sum of one flat host array of each local replica over all replicas.

        Collective: the group. Blocking. In the order of replicas where gradients are.

        Args:
            rows: of any dtype that numpy adds; overwritten.
            title: what reports call it.
        """
        first, sums, result = self.own_replicas[0], [], rows[-1]
        for start, stop in self.replicas.subtrees[self._group.rank]:
            part = rows[start - first : stop - first]
            add_rows(part, plan_row_additions(len(part)), np.add)  # a subtree of n replicas is the tree over n rows
            sums.append(part[0])
        if self.route.is_on_device:
            _add_up(sums, result)
            with self._group.recorded(title, result):
                library.all_reduce(result, self._group)
        elif (handle := self.start(sums, result, 0, is_exact=True, title=title)) is not None:
            handle.wait()
        return result

    def broadcast(self, array: Array) -> None:
        """Replace a host array, of any dtype, by the first replica's. Collective: the group. Blocking."""
        with self._group.recorded("broadcast", array):
            library.broadcast(array, self._group.comm)

    def begin_buckets(self, total_bytes: int) -> Limits:
        """Return how large buckets should be for gradients of this size; forget the rounding errors of older ones.

        Collective at the first call: the group, on several hosts.
        """
        self._wire = PLAIN if self.route.wire_dtype is None else HalfWire(self.route.wire_dtype)
        if self._options.bytes_per_pack:
            return Limits(self._options.bytes_per_pack, DIRECT_BYTES, self._options.bytes_per_pack // 4)
        if not self.route.is_overlapped:
            return Limits(LOCAL_BUCKET_BYTES, DIRECT_BYTES)
        best = best_bucket_bytes(total_bytes, *self._group.keep("link", self._measure_link))
        bucket_bytes = min(max(best, MIN_BUCKET_BYTES), MAX_BUCKET_BYTES)
        return Limits(bucket_bytes, DIRECT_BYTES, bucket_bytes // 4)

    def describe(self) -> dict[str, str | None]:
        """Return what the bits of its sums depend on, as recorded with each checkpoint. Equal on all ranks."""
        return {
            "all_reduce": ORDERED if self.route.is_in_replica_order else self.route.name,
            "wire": self.route.wire_dtype,
        }

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
        rows = [np.zeros(nbytes // 4, np.float32) for _ in self.own_replicas]
        times = []
        for _ in range(3):
            started = time.perf_counter()
            self.sum_rows(rows, "probe")
            times.append(time.perf_counter() - started)
        return min(times)


def _add_up(sums: list[Any], result: Any) -> None:
    """Put the sum of this rank's arrays into `result`, in their order."""
    for other in sums[1:]:
        np.add(sums[0], other, out=sums[0])
    if result is not sums[0]:
        np.copyto(result, sums[0])


def _options_with(ops: CrossDeviceOps, options: CommunicationOptions) -> CommunicationOptions:
    """Return options that name `ops` as the algorithm, unless it is no such thing or options name another."""
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
            ConfigurationError(f"strategy: expected cross_device_ops or {options}, got both; drop one of them.")
        )
    return replace(options, implementation=ops)

"""How the buckets of a strategy are summed: by one route, in the main or in a background thread, in which sizes."""

import functools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hpcdist.collectives import algorithms, library, subtree_sums
from hpcdist.collectives.gpu import nccl, nccl_setup
from hpcdist.collectives.group import CommunicationThread, Group, thread_of
from hpcdist.collectives.ops import SUM
from hpcdist.collectives.options import CommunicationImplementation as Implementation
from hpcdist.collectives.options import CommunicationOptions
from hpcdist.collectives.route import Route, choose_route
from hpcdist.collectives.wire import PLAIN, Wire
from hpcdist.gradients.device_staging import DeviceStaging
from hpcdist.gradients.half_wire import HalfWire
from hpcdist.plan.buckets import Limits, best_bucket_bytes
from hpcdist.plan.replicas import ReplicaPlan, Subtree
from hpcdist.runtime.handle import Handle
from hpcdist.runtime.mpi import MPI

logger = logging.getLogger("hpcdist")

Array = npt.NDArray[Any]
#: From this size on a gradient is summed where torch made it: a copy would cost more than a call of its own.
DIRECT_BYTES = 1 << 20
#: Buckets on one host, where only the number of calls counts.
LOCAL_BUCKET_BYTES = 64 << 20
#: Buckets that NCCL sums inside a host, and 1 MiB for the last one: DistributedDataParallel's sizes.
DEVICE_BUCKET_BYTES = 25 << 20
#: Bounds for buckets that travel between hosts.
MIN_BUCKET_BYTES = 128 << 10
MAX_BUCKET_BYTES = 32 << 20
#: How a checkpoint names all routes that combine gradients in the binary tree over the replicas.
ORDERED = "in the order of replicas"
#: Bytes whose all-reduce is timed to learn latency and bandwidth.
_PROBE_BYTES = (4 << 10, 1 << 20)


class Reducer:
    """Sums buckets over the ranks of a group.

    Args:
        group: the ranks.
        options: which algorithm, pack size and wire.
        replicas: which rank holds which; default: one each.
        device: of this rank's models. If all are GPUs, AUTO sums by NCCL where every rank has it and a GPU of its own;
            default: sums by NCCL are made on the GPU of its number on the host.

    Raises:
        ConfigurationError: for NCCL where a rank cannot have it, and for two algorithms; on every rank alike. Where no
            rank has a GPU, NCCL is replaced by AUTO with a warning, as in tf.distribute.

    Attributes:
        replicas: see above. device: where buckets are.
        route: how every bucket is summed. Between hosts, and by NCCL, buckets are summed while backward runs; else the
            cores are busy with backward, and a sum would compete for them.
    """

    def __init__(
        self,
        group: Group,
        options: CommunicationOptions,
        replicas: ReplicaPlan | None = None,
        device: torch.device | None = None,
    ) -> None:
        self._group = group
        self.replicas = replicas or ReplicaPlan(group.size, group.size)
        self._options = options
        implementation = self._options.implementation
        implementation = getattr(implementation, "stands_for", implementation)
        if implementation is Implementation.NCCL and not nccl_setup.has_gpu(group):
            if group.rank == 0:
                logger.warning(
                    "strategy: expected a GPU for NCCL, got none on any rank: sums go by AUTO."
                )
            self._options = replace(self._options, implementation=Implementation.AUTO)
        is_on_gpu = device is not None and device.type == "cuda"
        are_on_gpus = bool(group.world.all_reduce_int(int(is_on_gpu), MPI.MIN, group.comm))
        if are_on_gpus and device is not None:
            nccl_setup.find_nccl(group, device.index)
            if not group.facts.has_nccl and group.rank == 0:
                logger.warning(
                    "strategy: expected NCCL and a GPU for each rank, got neither on some: sums go through host memory."
                )
        # one route for all buckets: bits must not depend on how parameters are packed, so dtype and size are not used
        self.route: Route = choose_route(
            group.facts, self._options, SUM, 0, "any" if are_on_gpus else None, self.replicas
        )
        by_subtrees = functools.partial(_reduce_by_subtrees, self.replicas)
        self._reduce = (
            by_subtrees
            if self.route.by_subtrees
            else functools.partial(_reduce_by_route, self.route)
        )
        self._thread: CommunicationThread | None = None
        self._wire: Wire = PLAIN
        if self.route.is_on_device and not is_on_gpu:
            device = torch.device("cuda", nccl_setup.choose_device(group))
        self.device = torch.device("cpu")
        is_staged = are_on_gpus and not self.route.is_on_device and len(self.own_replicas) == 1
        if device is not None and (self.route.is_on_device or is_staged):
            self.device = device
        self._staging = DeviceStaging(self.device) if is_staged else None

    @property
    def group(self) -> Group:
        """The ranks that hold the replicas."""
        return self._group

    @property
    def own_replicas(self) -> range:
        """The replicas of this rank."""
        return self.replicas.of_rank(self._group.rank)

    @property
    def own_subtrees(self) -> tuple[Subtree, ...]:
        """The subtrees of the tree over all replicas that this rank's replicas make up."""
        return self.replicas.subtrees[self._group.rank]

    def start(
        self,
        array: Any,
        bucket: int,
        is_exact: bool = False,
        title: str = "gradients",
        divisor: float | None = None,
    ) -> Handle | None:
        """Start to replace an array by its sum over all ranks; it is there when the handle's `wait` returns.

        Collective over the group, in the order of calls.

        Args:
            array: flat, on the host or the GPU of the models: of this rank's replica, or the sum over its replicas. A
                tensor on a GPU without NCCL is summed in pinned host memory.
                Where sums go by subtrees a rank of several replicas uses `replicas/local_sums.py` instead.
            bucket: names the array to a wire that rounds.
            is_exact: the sum must not be rounded.
            title: what reports call it.
            divisor: what the sum is divided by.

        Returns:
            A handle; None where the sum is there already.
        """
        wire = PLAIN if is_exact else self._wire
        if self._staging is not None and isinstance(array, torch.Tensor):
            run_staged = self._staging.behind_producer(array)
            return self.submit(
                lambda group: run_staged(
                    lambda host: self._reduce(host, group, wire, bucket, divisor)
                ),
                array,
                title,
            )
        buffer = array
        if self._thread is not None and self.route.is_on_device:
            buffer = nccl.hand_over(array, self._group)
        return self.submit(
            lambda group: self._reduce(buffer, group, wire, bucket, divisor), array, title
        )

    def submit(self, reduce: Callable[[Group], None], buffer: Any, title: str) -> Handle | None:
        """Call reduce(group), recorded as the collective `title` on `buffer`, in the thread if there is one."""
        thread = self._thread
        if thread is None:
            self.call(reduce, buffer, title)
            return None

        def reduce_in_thread() -> None:
            with thread.group.recorded(title, buffer):
                reduce(thread.group)

        return thread.submit(reduce_in_thread)

    def call(self, reduce: Callable[[Group], None], buffer: Any, title: str) -> None:
        """Call reduce(group), recorded as the collective `title` on `buffer`, in the calling thread. Blocking.

        The thread's communicator is left to buckets: when one starts depends on what the rank's backward has reached,
        so another collective that is called inside a backward would come before it on one rank and after it on another.
        """
        with self._group.recorded(title, buffer):
            reduce(self._group)

    def sum_array(self, array: Array, title: str) -> None:
        """Replace a flat host array by its exact sum over all ranks, in the order in which gradients are summed.

        Collective over the group. Blocking. As `start`, not for a rank of several replicas where sums go by subtrees.

        Args:
            array: of any dtype that numpy adds.
            title: what reports call it.
        """
        if self.route.is_on_device:
            self.call(lambda group: library.all_reduce(array, group), array, title)
        else:
            self.call(lambda group: self._reduce(array, group, PLAIN, 0, None), array, title)

    def gather(self, array: Array, counts: Sequence[int], title: str) -> Array:
        """Return the flat host arrays of all ranks joined, in the order of ranks. Collective over the group. Blocking.

        Args:
            array: this rank's, of any dtype.
            counts: elements of every rank's.
            title: what reports call it.
        """
        joined = np.empty(sum(counts), array.dtype)
        self.call(lambda group: library.all_gather(array, counts, joined, group), joined, title)
        return joined

    def broadcast(self, array: Array) -> None:
        """Replace a host array, of any dtype, by the first replica's. Collective over the group. Blocking."""
        with self._group.recorded("broadcast", array):
            library.broadcast(array, self._group.comm)

    def begin_buckets(self, total_bytes: int) -> Limits:
        """Return how large buckets should be for gradients of this size; forget the rounding errors of older ones.

        From then on, where sums overlap with backward, a background thread makes them. Collective there at the first
        call: the group.
        """
        if self.route.is_overlapped:
            self._thread = thread_of(self._group)
        self._wire = PLAIN if self.route.wire_dtype is None else HalfWire(self.route.wire_dtype)
        if self._options.bytes_per_pack:
            return Limits(
                self._options.bytes_per_pack, DIRECT_BYTES, self._options.bytes_per_pack // 4
            )
        if not self.route.is_overlapped:
            return Limits(LOCAL_BUCKET_BYTES, DIRECT_BYTES)
        if len(self._group.placement.hosts) == 1:
            return Limits(DEVICE_BUCKET_BYTES, DIRECT_BYTES, DEVICE_BUCKET_BYTES // 25)
        best = best_bucket_bytes(total_bytes, *self._group.keep("link", self._measure_link))
        bucket_bytes = min(max(best, MIN_BUCKET_BYTES), MAX_BUCKET_BYTES)
        if self._group.rank == 0:
            logger.info(
                "strategy: buckets of %d bytes for %d bytes of gradients", bucket_bytes, total_bytes
            )
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
            self._group.world.all_reduce_int(
                value if self._group.rank == 0 else 0, MPI.MAX, self._group.comm
            )
            for value in nanoseconds
        ]
        return max(chiefs[0], 1000) / 1e9, max(chiefs[1], 1) / 1e15

    def _probe(self, nbytes: int) -> float:
        array = np.zeros(nbytes // 4, np.float32)
        times: list[float] = []
        rows = [array.copy() for _ in self.own_subtrees]

        def reduce(group: Group) -> None:
            if self.route.is_on_device:  # the array is on the host: MPI's link stands for NCCL's
                library.all_reduce(array, group)
            elif self.route.by_subtrees:
                subtree_sums.all_reduce(rows, array, group, self.replicas)
            else:
                algorithms.run(self.route, array, group)

        for _ in range(3):
            started = time.perf_counter()
            handle = self.submit(reduce, array, "probe")
            if handle is not None:
                handle.wait()
            times.append(time.perf_counter() - started)
        return min(times)


def _reduce_by_route(
    route: Route,
    array: Any,
    group: Group,
    wire: Wire,
    bucket: int,
    divisor: float | None,
) -> None:
    algorithms.run(route, array, group, SUM, wire, bucket, divisor)


def _reduce_by_subtrees(
    replicas: ReplicaPlan,
    array: Any,
    group: Group,
    wire: Wire,
    bucket: int,
    divisor: float | None,
) -> None:
    """Sum where other ranks hold several replicas, and this one a single one: its value is its only subtree's sum."""
    assert len(replicas.subtrees[group.rank]) == 1, (
        "a rank with more subtrees goes by replicas/local_sums.py"
    )
    subtree_sums.all_reduce([array], array, group, replicas, divisor)

"""The sums of a strategy's buckets: by one route, in the main or in a background thread, and the sizes of buckets."""

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
from hpcdist.errors import ConfigurationError
from hpcdist.gradients.device_staging import DeviceStaging
from hpcdist.gradients.half_wire import HalfWire
from hpcdist.plan.buckets import Limits, best_bucket_bytes
from hpcdist.plan.replicas import ReplicaPlan, Subtree
from hpcdist.runtime.handle import Handle
from hpcdist.runtime.mpi import MPI

logger = logging.getLogger("hpcdist")

Array = npt.NDArray[Any]
#: From this size on a gradient is summed where torch made it: a copy would cost more than a separate call.
DIRECT_BYTES = 1 << 20
#: Bytes of buckets on one host, where only the number of calls counts.
LOCAL_BUCKET_BYTES = 64 << 20
#: Bytes of buckets that NCCL sums inside a host; the last one has 1 MiB. These are DistributedDataParallel's sizes.
DEVICE_BUCKET_BYTES = 25 << 20
#: Bounds for the bytes of buckets that travel between hosts.
MIN_BUCKET_BYTES = 128 << 10
MAX_BUCKET_BYTES = 32 << 20
#: Name in checkpoints of all routes that combine gradients in the binary tree over the replicas.
ORDERED = "in the order of replicas"
#: Bytes whose all-reduce is timed to learn latency and bandwidth.
_PROBE_BYTES = (4 << 10, 1 << 20)


class Reducer:
    """Sums buckets over the ranks of a group.

    Args:
        group: the ranks.
        options: the algorithm, pack size and wire.
        replicas: which rank holds which replicas; default: one on each rank.
        device: device of this rank's models. If the models of all ranks are on GPUs, AUTO sums by NCCL where every rank
            has NCCL and a GPU for itself. Default: sums by NCCL are made on the GPU of the rank's number on the host.

    Raises:
        ConfigurationError: for NCCL where a rank cannot have it or has several replicas, and for two algorithms; on
            every rank alike. Where no rank has a GPU, NCCL is replaced by AUTO with a warning, as in tf.distribute.

    Attributes:
        replicas: which rank holds which replicas.
        device: device of the buckets.
        route: how every bucket is summed. Between hosts, and by NCCL, buckets are summed while backward runs. Elsewhere
            the cores are busy with backward, and a sum would compete for them.
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
        elif implementation is Implementation.NCCL and self.replicas.n_replicas > group.size:
            raise ConfigurationError(
                f"strategy: expected one replica for each of the {group.size} ranks, as NCCL was asked for, got "
                f"{self.replicas.n_replicas}; start as many ranks as GPUs, or leave the implementation out."
            )
        is_on_gpu = device is not None and device.type == "cuda"
        are_on_gpus = bool(group.world.all_reduce_int(int(is_on_gpu), MPI.MIN, group.comm))
        if are_on_gpus and device is not None:
            nccl_setup.find_nccl(group, device.index)
            if not group.facts.has_nccl and group.rank == 0:
                logger.warning(
                    "strategy: expected NCCL and a GPU for each rank, got neither on some: sums go through host memory."
                )
        # one route for all buckets: bits must not depend on how parameters are packed, so dtype and size are not used
        device_dtype = "any" if are_on_gpus else None
        self.route: Route = choose_route(
            group.facts, self._options, SUM, 0, device_dtype, self.replicas
        )
        self._reduce = functools.partial(_reduce_by_route, self.route)
        if self.route.by_subtrees:
            self._reduce = functools.partial(_reduce_by_subtrees, self.replicas)
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
        """Start to replace an array by its sum over all ranks, which is ready when the handle's `wait` returns.

        Collective over the group, in the order of calls.

        Args:
            array: flat array on the host or the GPU of the models: the gradients of this rank's replica, or the sum
                over its replicas. A tensor on a GPU without NCCL is summed in pinned host memory. Where sums are made
                by subtrees, a rank of several replicas uses `gradients/local_sums.py` instead.
            bucket: number that names the array to a wire that rounds.
            is_exact: whether the sum must not be rounded.
            title: name of the sum in reports.
            divisor: number that the sum is divided by; None if it is not divided.

        Returns:
            A handle; None where the sum is ready already.
        """
        wire = PLAIN if is_exact else self._wire
        if self._staging is not None and isinstance(array, torch.Tensor):
            run_staged = self._staging.behind_producer(array)

            def reduce_staged(group: Group) -> None:
                run_staged(lambda host: self._reduce(host, group, wire, bucket, divisor))

            return self.submit(reduce_staged, array, title)
        buffer = array
        if self._thread is not None and self.route.is_on_device:
            buffer = nccl.hand_over(array, self._group)

        def reduce(group: Group) -> None:
            self._reduce(buffer, group, wire, bucket, divisor)

        return self.submit(reduce, array, title)

    def submit(
        self,
        reduce: Callable[[Group], None],
        buffer: Any,
        title: str,
    ) -> Handle | None:
        """Call reduce(group), recorded as the collective `title` on `buffer`, in the thread if there is one."""
        thread = self._thread
        if thread is None:
            self.call(reduce, buffer, title)
            return None

        def reduce_in_thread() -> None:
            with thread.group.recorded(title, buffer):
                reduce(thread.group)

        return thread.submit(reduce_in_thread)

    def call(
        self,
        reduce: Callable[[Group], None],
        buffer: Any,
        title: str,
    ) -> None:
        """Call reduce(group), recorded as the collective `title` on `buffer`, in the calling thread. Blocking.

        The thread's communicator is used by buckets only. A bucket starts when the rank's backward has reached its
        gradients, so another collective that is called inside a backward would come before the bucket on one rank and
        after it on another.
        """
        with self._group.recorded(title, buffer):
            reduce(self._group)

    def sum_array(self, array: Array, title: str) -> None:
        """Replace a flat host array by its exact sum over all ranks, in the order in which gradients are summed.

        Collective over the group. Blocking. As with `start`, not for a rank of several replicas where sums are made by
        subtrees.

        Args:
            array: array of any dtype that numpy adds.
            title: name of the sum in reports.
        """
        if self.route.is_on_device:
            self.call(lambda group: library.all_reduce(array, group), array, title)
        else:
            self.call(lambda group: self._reduce(array, group, PLAIN, 0, None), array, title)

    def gather(
        self,
        array: Array,
        counts: Sequence[int],
        title: str,
    ) -> Array:
        """Return the flat host arrays of all ranks joined, in the order of the ranks.

        Collective over the group. Blocking.

        Args:
            array: array of this rank, of any dtype.
            counts: numbers of elements of every rank's array.
            title: name of the gather in reports.
        """
        joined = np.empty(sum(counts), array.dtype)

        def gather(group: Group) -> None:
            library.all_gather(array, counts, joined, group)

        self.call(gather, joined, title)
        return joined

    def broadcast(self, array: Array) -> None:
        """Replace a host array, of any dtype, by the array of the first replica.

        Collective over the group. Blocking.
        """
        with self._group.recorded("broadcast", array):
            library.broadcast(array, self._group.comm)

    def begin_buckets(self, total_bytes: int) -> Limits:
        """Return the best sizes of buckets for gradients of this size; forget the rounding errors of older buckets.

        From then on, where sums overlap with backward, a background thread makes them. There the first call is
        collective over the group.
        """
        if self.route.is_overlapped:
            self._thread = thread_of(self._group)
        self._wire = PLAIN
        if self.route.wire_dtype is not None:
            self._wire = HalfWire(self.route.wire_dtype)
        bytes_per_pack = self._options.bytes_per_pack
        if bytes_per_pack:
            return Limits(bytes_per_pack, DIRECT_BYTES, bytes_per_pack // 4)
        if not self.route.is_overlapped:
            return Limits(LOCAL_BUCKET_BYTES, DIRECT_BYTES)
        if len(self._group.placement.hosts) == 1:
            return Limits(DEVICE_BUCKET_BYTES, DIRECT_BYTES, DEVICE_BUCKET_BYTES // 25)
        latency_s, byte_s = self._group.keep("link", self._measure_link)
        best_bytes = best_bucket_bytes(total_bytes, latency_s, byte_s)
        bucket_bytes = min(max(best_bytes, MIN_BUCKET_BYTES), MAX_BUCKET_BYTES)
        if self._group.rank == 0:
            logger.info(
                "strategy: buckets of %d bytes for %d bytes of gradients", bucket_bytes, total_bytes
            )
        return Limits(bucket_bytes, DIRECT_BYTES, bucket_bytes // 4)

    def describe(self) -> dict[str, str | None]:
        """Return the facts that determine the bits of sums, as checkpoints record them. Equal on all ranks."""
        algorithm = ORDERED if self.route.is_in_replica_order else self.route.name
        return {"all_reduce": algorithm, "wire": self.route.wire_dtype}

    def _measure_link(self) -> tuple[float, float]:
        """Return the latency in seconds, and the seconds per byte, of an all-reduce; the chief's times on all ranks."""
        small_bytes, large_bytes = _PROBE_BYTES
        small_s = self._probe(small_bytes)
        large_s = self._probe(large_bytes)
        byte_s = max(large_s - small_s, 1e-9) / (large_bytes - small_bytes)
        latency_nanoseconds = self._chiefs_number(int(1e9 * small_s))
        byte_femtoseconds = self._chiefs_number(int(1e15 * byte_s))
        return max(latency_nanoseconds, 1000) / 1e9, max(byte_femtoseconds, 1) / 1e15

    def _chiefs_number(self, number: int) -> int:
        """Return the chief's number, of 0 or more. Collective over the group."""
        group = self._group
        return group.world.all_reduce_int(number if group.rank == 0 else 0, MPI.MAX, group.comm)

    def _probe(self, nbytes: int) -> float:
        """Return the seconds of the fastest of three sums of an array. Collective over the group."""
        array = np.zeros(nbytes // 4, np.float32)
        times: list[float] = []
        rows = [array.copy() for _ in self.own_subtrees]

        def reduce(group: Group) -> None:
            if self.route.is_on_device:
                # the array is on the host: MPI's link is measured in place of NCCL's
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
    """Sum where other ranks hold several replicas, and this one holds one, whose value is its only subtree's sum."""
    assert len(replicas.subtrees[group.rank]) == 1, (
        "a rank with more subtrees goes by replicas/local_sums.py"
    )
    subtree_sums.all_reduce([array], array, group, replicas, divisor)

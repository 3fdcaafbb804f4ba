"""All-reduce by NCCL, through cupy: its calls, and the wait for them. nccl_setup.py makes the communicators.

NCCL binds a communicator to the device that is current when the communicator is made, so it is made when the first
buffer shows the device. Device memory never goes to MPI here: NCCL and CUDA-aware MPI may wait for each other for ever.
"""

from contextlib import AbstractContextManager
from typing import Any

from hpcdist.collectives.gpu.cupy_door import (
    DeviceArray,
    device_array,
    handed_over,
    is_device_buffer,
    load_cupy,
    load_nccl,
    make_stream,
    on_device,
    queued_on,
    visible_devices,
)
from hpcdist.collectives.gpu.nccl_setup import join
from hpcdist.collectives.group import Group
from hpcdist.collectives.ops import SUM, Op
from hpcdist.errors import CollectiveError, CollectiveFailed
from hpcdist.runtime.mpi import MPI
from hpcdist.runtime.waiting import YIELDS, late, wait_until

#: dtype -> name of NCCL's constant.
DTYPES = {
    "float16": "NCCL_FLOAT16",
    "bfloat16": "NCCL_BFLOAT16",
    "float32": "NCCL_FLOAT32",
    "float64": "NCCL_FLOAT64",
    "int8": "NCCL_INT8",
    "uint8": "NCCL_UINT8",
    "int32": "NCCL_INT32",
    "uint32": "NCCL_UINT32",
    "int64": "NCCL_INT64",
    "uint64": "NCCL_UINT64",
}
#: op -> name of NCCL's constant.
OPS = {"sum": "NCCL_SUM", "min": "NCCL_MIN", "max": "NCCL_MAX", "product": "NCCL_PROD"}
#: How often NCCL is asked, while the host waits, whether a peer has failed.
_CHECK_S = 0.1


def all_reduce(buffer: Any, group: Group, op: Op = SUM) -> None:
    """Replace `buffer` by its reduction over the group.

    Collective over `group.comm`. Blocking. Same shape and dtype required on every rank: yes.

    Waits for the work queued on the producer's stream (`cupy_door.device_array`) and returns when the result is ready.
    A buffer that was handed over (`hand_over`) is reduced on a stream of the group, beside work that is queued later.

    Args:
        buffer: cupy array or torch CUDA tensor of one of `DTYPES`, contiguous; overwritten.
        group: any size >= 1; the first call makes the communicator, on the device of `buffer`.
        op: sum, min, max or product.

    Raises:
        CollectiveError: for a buffer or op that NCCL cannot carry; on this rank only.
        CollectiveFailed: when a peer fails; on every rank that NCCL reports it to.
        CollectiveTimeoutError: when a rank does not arrive; on the ranks that arrived.
        ConfigurationError: as `communicator_of`; on every rank alike.

    Cost: chosen by NCCL; 2(P-1)/P * n elements sent per rank, or less where switches add. One wait of the host.
    """
    if not isinstance(buffer, DeviceArray) and not is_device_buffer(buffer):
        visible_devices()  # report what is missing on this machine first
    array = device_array(buffer)
    check(array, op.name)
    if array.size:
        communicator = communicator_of(group, group.comm, array.device)
        with queue_for(array, group):
            communicator.all_reduce(array, op.name)
            communicator.wait()


def hand_over(buffer: Any, group: Group) -> DeviceArray:
    """Return a device buffer for a background thread to reduce, behind the work queued now. Not collective.

    Args:
        buffer: as `all_reduce`; this thread must not use it until the sum is ready.
        group: group of this thread.
    """
    is_tensor = hasattr(buffer, "new_tensor")
    device_index = buffer.device.index if is_tensor else buffer.device.id
    with on_device(device_index):
        stream = group.keep("stream of events", make_stream)
        return handed_over(buffer, stream)


def queue_for(array: DeviceArray, group: Group) -> AbstractContextManager[None]:
    """Choose the stream for calls on an array: cupy's current one, or a stream of the group if it was handed over."""
    if array.ready is None:
        return on_device(array.device)
    with on_device(array.device):
        stream = group.keep("stream of sums", make_stream)
    return queued_on(stream, array)


def check(array: DeviceArray, op: str) -> None:
    """Raise CollectiveError for a dtype or op that NCCL does not have; on this rank only, before anything is sent."""
    if array.dtype not in DTYPES:
        raise CollectiveError(
            f"nccl: expected a dtype of {', '.join(DTYPES)}, got {array.dtype}; convert it first."
        )
    if op not in OPS:
        raise CollectiveError(
            f"nccl: expected an op of {', '.join(OPS)}, got {op!r}; name one of them."
        )


def communicator_of(
    group: Group,
    comm: MPI.Comm,
    device: int,
) -> "NcclCommunicator":
    """Return the NCCL communicator over `comm`, making it at first use; it lives as long as the group.

    Collective over `group.comm` when it is made.

    Args:
        group: group that keeps the communicator.
        comm: the ranks: `group.comm` or `group.node_comm`.
        device: index of the device that this rank's buffers are on.

    Raises:
        ConfigurationError: without cupy, NCCL or GPU, and for two ranks on one GPU; on every rank alike.
        CollectiveFailed: when NCCL fails on a rank; on every rank alike.

    Cost: to make: O(log P) messages, and NCCL's own.
    """
    key = ("nccl", "node" if comm == group.node_comm else "all")

    def make() -> NcclCommunicator:
        limit_s = group.timeout_s
        yields = 0 if group.is_background else YIELDS
        inner = join(group, comm, device, limit_s)
        return NcclCommunicator(comm, device, inner, limit_s, yields)

    return group.keep(key, make, NcclCommunicator.free)


class NcclCommunicator:
    """An NCCL communicator over the ranks of `comm`, on one device per rank.

    Calls are queued on cupy's current stream, while `device` is the current device; `wait` waits for them. Made by
    `communicator_of`.

    Args:
        comm: the ranks.
        device: index of this rank's device.
        inner: cupy's communicator.
        limit_s: longest wait for the other ranks, in seconds.
        yields: see `wait_until`.
    """

    def __init__(
        self,
        comm: MPI.Comm,
        device: int,
        inner: Any,
        limit_s: float,
        yields: int = YIELDS,
    ) -> None:
        self.rank = comm.rank
        self.size = comm.size
        self.device = device
        self._inner = inner
        self._limit_s = limit_s
        self._yields = yields
        self._nccl = load_nccl()

    def all_reduce(self, array: DeviceArray, op: str = "sum") -> None:
        """Replace `array` by its reduction. Collective over its ranks. Queued, not waited for."""
        dtype = self._prepare(array, op)
        self._inner.allReduce(
            array.address, array.address, array.size, dtype, self._op(op), _stream()
        )

    def reduce_scatter(
        self,
        source: DeviceArray,
        target: DeviceArray,
        op: str = "sum",
    ) -> None:
        """Put this rank's part of the reduction into `target`. Collective over its ranks. Queued, not waited for.

        Args:
            source: (size * n,) on every rank; part r is for rank r.
            target: (n,) of the same dtype; may be this rank's part of `source`.
            op: as `all_reduce`.
        """
        dtype = self._prepare(source, op)
        self._check_parts(source, target)
        self._inner.reduceScatter(
            source.address, target.address, target.size, dtype, self._op(op), _stream()
        )

    def all_gather(self, source: DeviceArray, target: DeviceArray) -> None:
        """Put the `source` of all ranks into `target`, in order. Collective over its ranks. Queued, not waited for.

        Args:
            source: (n,); may be this rank's part of `target`.
            target: (size * n,) of the same dtype.
        """
        dtype = self._prepare(source, "sum")
        self._check_parts(target, source)
        self._inner.allGather(source.address, target.address, source.size, dtype, _stream())

    def wait(self) -> None:
        """Wait until the work queued on cupy's current stream is done.

        Raises:
            CollectiveFailed: when NCCL reports that a peer failed; the communicator cannot be used any more.
            CollectiveTimeoutError: when the other ranks do not arrive within the limit.
        """
        stream = load_cupy().cuda.get_current_stream()
        waited_s = 0.0
        while not wait_until(lambda: stream.done, _CHECK_S, self._yields):
            waited_s += _CHECK_S
            self._check_peers(waited_s)

    def free(self) -> None:
        """Free the communicator. Collective over its ranks."""
        self._inner.destroy()

    def _check_peers(self, waited_s: float) -> None:
        try:
            self._inner.check_async_error()
        except (self._nccl.NcclError, KeyError) as error:
            # cupy before 13.4 does not know the code of a failed peer
            self._inner.abort()
            text = f"NCCL's error {error}" if isinstance(error, KeyError) else str(error)
            raise CollectiveFailed(
                f"nccl: expected all {self.size} ranks, got {text} on rank {self.rank}; look for the rank that "
                f"failed first (NCCL_DEBUG=INFO prints more)."
            ) from error
        if waited_s > self._limit_s:
            self._inner.abort()
            raise late("nccl", self._limit_s, "some ranks", f"rank {self.rank}")

    def _prepare(self, array: DeviceArray, op: str) -> int:
        check(array, op)
        if array.device != self.device:
            raise CollectiveError(
                f"nccl: expected a buffer on device {self.device}, as at the first call, got one on device "
                f"{array.device} on rank {self.rank}; keep one device per rank."
            )
        return int(getattr(self._nccl, DTYPES[array.dtype]))

    def _op(self, op: str) -> int:
        return int(getattr(self._nccl, OPS[op]))

    def _check_parts(self, whole: DeviceArray, part: DeviceArray) -> None:
        if whole.size != part.size * self.size or whole.dtype != part.dtype:
            raise CollectiveError(
                f"nccl: expected {self.size} parts of {part.size} {part.dtype}, got {whole.size} {whole.dtype} on rank "
                f"{self.rank}; pad the buffer."
            )


def _stream() -> int:
    return int(load_cupy().cuda.get_current_stream().ptr)

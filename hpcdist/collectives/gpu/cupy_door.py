"""The only door to cupy: finds it, reports what is missing, and turns any device buffer into a cupy array.

cupy is imported when a device buffer or NCCL is asked for, never before. Torch tensors come by DLPack: torch is not
imported here.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hpcdist.dtypes import dtype_name
from hpcdist.errors import CollectiveError, ConfigurationError
from hpcdist.plan.devices import piece_bounds

HostArray = npt.NDArray[Any]
#: What a staged copy carries at a time: large enough for the bus, small enough that copies and MPI overlap.
PIECE_BYTES = 4 << 20


@dataclass(frozen=True)
class DeviceArray:
    """A flat view of a device buffer.

    Attributes:
        array: (n_elements,) cupy array that shares the buffer's memory.
        dtype: name of the elements' dtype. "bfloat16", for which cupy has no arithmetic, lies in `array` as int16.
        ready: event behind the work that the producer had queued, for another thread to wait for. None if `array` is
            used in the thread that made it.
    """

    array: Any
    dtype: str
    ready: Any = None

    def __getitem__(self, part: slice) -> "DeviceArray":
        return DeviceArray(self.array[part], self.dtype)

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(self.array.size)

    @property
    def device(self) -> int:
        """Index of the device that holds the buffer."""
        return int(self.array.device.id)

    @property
    def address(self) -> int:
        """Address of the buffer in device memory."""
        return int(self.array.data.ptr)


def load_cupy() -> Any:
    """Return the cupy module.

    Raises:
        ConfigurationError: when it is not installed or cannot be loaded; on this rank only.
    """
    try:
        import cupy
    except ImportError as error:
        reason = " ".join(str(error).split())
        raise ConfigurationError(
            f"nccl: expected cupy for buffers on a GPU, got none ({reason}); "
            f"pip install 'hpcdist[cuda]' ('hpcdist[cuda12]' beside a torch for CUDA 12)."
        ) from error
    return cupy


def load_nccl() -> Any:
    """Return cupy's NCCL module.

    Raises:
        ConfigurationError: when cupy or the NCCL library is missing; on this rank only.
    """
    load_cupy()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # cupy's own hint; the error below is the same on all ranks
        try:
            from cupy.cuda import nccl
        except ImportError:
            nccl = None
    if nccl is None or not nccl.available:
        raise ConfigurationError(
            "nccl: expected cupy with NCCL, got a cupy that does not find libnccl; pip install nvidia-nccl-cu13 "
            "(nvidia-nccl-cu12 for cupy-cuda12x)."
        )
    return nccl


def visible_devices() -> list[str]:
    """Return the identity of each device that this rank sees, in the order of their indices.

    Raises:
        ConfigurationError: without cupy, driver or device; on this rank only.
    """
    cupy = load_cupy()
    try:
        n_devices = cupy.cuda.runtime.getDeviceCount()
        devices = [_identity(cupy, index) for index in range(n_devices)]
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise ConfigurationError(
            f"nccl: expected a GPU and its driver, got {error}; run on a node with a GPU (look at nvidia-smi)."
        ) from error
    if not devices:
        raise ConfigurationError(
            "nccl: expected a GPU, got none that this process may see; ask the batch system for GPUs and look at "
            "CUDA_VISIBLE_DEVICES."
        )
    return devices


def _identity(cupy: Any, index: int) -> str:
    """Return bus id and UUID. Both are needed, as parts of one GPU (MIG) have the same bus id."""
    properties = cupy.cuda.runtime.getDeviceProperties(index)
    uuid = properties.get("uuid", b"")
    bus_id = cupy.cuda.Device(index).pci_bus_id
    if not uuid:
        return str(bus_id)
    return f"{bus_id} (UUID {uuid.hex()})"


def use_device(index: int) -> None:
    """Make a device the current one of this thread, for cupy and for torch, which asks the CUDA runtime too.

    Raises:
        ConfigurationError: when the device cannot be used; on this rank only.
    """
    cupy = load_cupy()
    try:
        cupy.cuda.Device(index).use()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise ConfigurationError(
            f"nccl: expected device {index} to be usable, got {error}; look at its state in nvidia-smi."
        ) from error


@contextmanager
def on_device(index: int) -> Iterator[None]:
    """Run a block with a device as the current one: streams and NCCL's calls belong to the current device."""
    with load_cupy().cuda.Device(index):
        yield


def is_device_buffer(buffer: Any) -> bool:
    """Return whether a buffer lives on a GPU. Does not import cupy."""
    # torch: its __cuda_array_interface__ raises while a gradient is wanted
    if hasattr(buffer, "new_tensor"):
        return str(buffer.device.type) == "cuda"
    return hasattr(buffer, "__cuda_array_interface__")


def device_array(buffer: Any) -> DeviceArray:
    """Return a flat view of a device buffer.

    Work queued on the producer's stream is done before work that is queued next on cupy's current stream. For torch's
    current stream DLPack's stream protocol ensures this, for other libraries that of __cuda_array_interface__. The
    caller ensures the other direction: it waits for cupy's stream before the producer uses the buffer again.

    Args:
        buffer: cupy array, torch tensor or anything with __cuda_array_interface__; contiguous, any shape. A DeviceArray
            is returned as it is.

    Raises:
        ConfigurationError: without cupy; on this rank only.
        CollectiveError: for a buffer on the host, or one that is not contiguous; on this rank only.
    """
    if isinstance(buffer, DeviceArray):
        return buffer
    if not is_device_buffer(buffer):
        raise CollectiveError(
            f"nccl: expected a buffer on a GPU, got {type(buffer).__name__} on the host; move it to the GPU or choose "
            f"another implementation."
        )
    cupy = load_cupy()
    if hasattr(buffer, "new_tensor"):
        array, dtype = _from_torch(cupy, buffer.detach())
    else:
        array = cupy.asarray(buffer)
        dtype = array.dtype.name
    if not array.flags.c_contiguous:
        raise CollectiveError(
            "nccl: expected a contiguous buffer, got one that is not; pass a copy."
        )
    return DeviceArray(array.reshape(-1), dtype)


def _from_torch(cupy: Any, tensor: Any) -> tuple[Any, str]:
    dtype = dtype_name(tensor)
    if dtype == "bfloat16":  # cupy refuses it, or kills the process: its issues 7527 and 8801
        int16 = tensor.new_empty(0).short().dtype
        return cupy.from_dlpack(tensor.view(int16)), dtype
    return cupy.from_dlpack(tensor), dtype


@contextmanager
def in_float32(buffer: Any) -> Iterator[Any]:
    """Yield a device buffer, or a float32 copy of one of half precision, whose values are rounded back at the end."""
    if dtype_name(buffer) not in ("float16", "bfloat16"):
        yield buffer
        return
    wide = buffer.float() if hasattr(buffer, "new_tensor") else buffer.astype(np.float32)
    yield wide
    if hasattr(buffer, "new_tensor"):
        buffer.copy_(wide)
    else:
        buffer[...] = wide


def handed_over(buffer: Any, stream: Any) -> DeviceArray:
    """Return a flat view of a device buffer that another thread may use; see `DeviceArray.ready`.

    Called in the producer's thread: the streams of other threads do not know the work that it has queued.

    Args:
        buffer: as `device_array`.
        stream: stream of the buffer's device, used only for such events.
    """
    with stream:
        array = device_array(buffer)
        return DeviceArray(array.array, array.dtype, stream.record())


def behind_producers(buffers: Sequence[Any], call: Callable[[], Any]) -> Callable[[], Any]:
    """Return a function that makes a call in another thread, behind the work this thread has queued for device buffers.

    Streams of another thread do not wait for streams of this thread. The function also waits until the results are in
    device memory, so that any stream may read them. Where all buffers are on the host, `call` itself is returned.
    Without cupy, this thread waits for the work queued for torch tensors.

    Args:
        buffers: arrays and tensors that the call reads or writes.
        call: the call.
    """
    waits = []
    for buffer in buffers:
        is_sparse = getattr(buffer, "is_sparse", False)  # calls refuse it
        if is_device_buffer(buffer) and not is_sparse:
            waits.append(_wait_of(buffer))
    if not waits:
        return call

    def call_when_ready() -> Any:
        for wait in waits:
            wait.for_producer()
        result = call()
        for wait in waits:
            wait.for_result()
        return result

    return call_when_ready


class _WaitByEvent:
    """Waits, in another thread, for an event behind the work that a buffer's producer had queued."""

    def __init__(self, event: Any, device_id: int) -> None:
        self._event = event
        self._device_id = device_id

    def for_producer(self) -> None:
        """Wait for the event."""
        with on_device(self._device_id):
            self._event.synchronize()

    def for_result(self) -> None:
        """Wait for the default stream, which calls in other threads use."""
        with on_device(self._device_id):
            load_cupy().cuda.Stream.null.synchronize()


class _WaitByReading:
    """Waits by reading a torch tensor's first element, which arrives behind all work queued on the current stream."""

    def __init__(self, tensor: Any) -> None:
        self._first = tensor.detach().reshape(-1)[:1]
        self._first.cpu()

    def for_producer(self) -> None:
        """Return at once: the producer's thread has waited."""

    def for_result(self) -> None:
        """Wait for the current stream of this thread."""
        self._first.cpu()


def _wait_of(buffer: Any) -> "_WaitByEvent | _WaitByReading":
    try:
        return _wait_by_event(buffer)
    except ConfigurationError:  # without cupy it is a torch tensor
        return _WaitByReading(buffer)


def _wait_by_event(buffer: Any) -> _WaitByEvent:
    cupy = load_cupy()
    if hasattr(buffer, "new_tensor"):
        device_id = int(buffer.device.index)
        with on_device(device_id):
            stream = make_stream()
            # makes the stream wait for torch's
            buffer.detach().reshape(-1)[:1].__dlpack__(stream=stream.ptr)
            return _WaitByEvent(stream.record(), device_id)
    array = cupy.asarray(buffer)  # waits for the stream that other libraries name
    device_id = int(array.device.id)
    with on_device(device_id):
        return _WaitByEvent(cupy.cuda.get_current_stream().record(), device_id)


@contextmanager
def queued_on(stream: Any, array: DeviceArray) -> Iterator[None]:
    """Queue the work of the block on a stream, behind the work that made the array."""
    with on_device(array.device), stream:
        stream.wait_event(array.ready)
        yield


def make_stream() -> Any:
    """Return a stream of the current device that waits for no other stream."""
    return load_cupy().cuda.Stream(non_blocking=True)


def padded(buffer: DeviceArray, n_elements: int) -> DeviceArray:
    """Return `buffer` itself if it has `n_elements`, else a copy with zeros appended."""
    if buffer.size == n_elements:
        return buffer
    zeros = load_cupy().zeros(n_elements, buffer.array.dtype)
    copy = DeviceArray(zeros, buffer.dtype)
    copy_into(copy[: buffer.size], buffer)
    return copy


def copy_into(target: DeviceArray, source: DeviceArray) -> None:
    """Copy `source` over `target`, of the same size and dtype. Queued on cupy's current stream, not waited for.

    The copy engine copies: an assignment would have cupy compile a kernel, which takes a CUDA compiler on the node.
    """
    stream = load_cupy().cuda.get_current_stream()
    target.array.data.copy_from_device_async(source.array.data, source.array.nbytes, stream)


def staged_all_reduce(buffer: DeviceArray, host_all_reduce: Callable[[HostArray], None]) -> None:
    """Replace `buffer` by its reduction over ranks that no NCCL joins, through pinned memory of the host.

    Collective over the ranks of `host_all_reduce`. Blocking. Same shape and dtype required on every rank: yes.

    Device memory is never passed to MPI, CUDA-aware or not: NCCL and CUDA-aware MPI may wait for each other for ever.
    Waits for the work queued on cupy's current stream, and returns when the result is in device memory.

    Args:
        buffer: array in device memory; overwritten.
        host_all_reduce: function that reduces a (n_piece,) numpy array in place; called once per piece, in order. Half
            precision arrives as float32.

    Cost: n elements to the host and back; the next piece is fetched and the last one returned while a piece is reduced.
        Two pieces of pinned memory, from cupy's pool.
    """
    cupy = load_cupy()
    n_piece = max(1, PIECE_BYTES // buffer.array.itemsize)
    pieces = piece_bounds(buffer.size, n_piece)
    n_staged = min(n_piece, buffer.size)
    staging = [_pinned(n_staged, buffer.array.dtype) for _ in pieces[:2]]
    stream = cupy.cuda.Stream(non_blocking=True)
    stream.wait_event(cupy.cuda.get_current_stream().record())

    def fetch(index: int) -> tuple[HostArray, Any]:
        # into the pinned memory of the piece before the last, whose way back is queued on this stream already
        start, stop = pieces[index]
        host = staging[index % 2][: stop - start]
        buffer.array[start:stop].get(stream=stream, out=host, blocking=False)
        return host, stream.record()

    fetched = fetch(0) if pieces else None
    for index, (start, stop) in enumerate(pieces):
        assert fetched is not None, "fetched one piece ahead"
        host, arrived = fetched
        fetched = fetch(index + 1) if index + 1 < len(pieces) else None
        arrived.synchronize()
        _reduce_on_host(host, buffer.dtype, host_all_reduce)
        buffer.array[start:stop].set(host, stream)
    stream.synchronize()


def _pinned(n_elements: int, dtype: Any) -> HostArray:
    import cupyx

    array: HostArray = cupyx.empty_pinned(n_elements, dtype)
    return array


def _reduce_on_host(
    host: HostArray,
    dtype: str,
    host_all_reduce: Callable[[HostArray], None],
) -> None:
    """Reduce a piece. MPI has no half precision; widening on the host, not the device, halves the bytes copied."""
    if dtype == "bfloat16":
        wide = (host.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        host_all_reduce(wide)
        host[...] = _to_bfloat16_bits(wide).view(host.dtype)
    elif dtype == "float16":
        wide = host.astype(np.float32)
        host_all_reduce(wide)
        host[...] = wide
    else:
        host_all_reduce(host)


def _to_bfloat16_bits(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Return the upper halves of float32 numbers, rounded to the nearest, ties to even; NaN stays NaN."""
    bits = values.view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)

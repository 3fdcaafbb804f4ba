"""A stand-in for cupy on machines without a GPU: the calls that hpcdist makes, with host memory for the device's.

It lets tests prove the order of calls on NCCL's path, and that ranks agree, where there is no GPU.

Real: the plan, the order of calls, the messages, MPI. Not real: CUDA, NCCL, speed. What is queued on a stream runs only
when somebody waits for it, so that a forgotten wait gives wrong numbers. Arrays have no buffer protocol, so that MPI
refuses them. The communicator does its arithmetic by MPI over the ranks that present the same unique id.
"""

import ctypes
import functools
import itertools
import sys
import threading
import types
import zlib

import numpy as np

FLOATS = {"NCCL_FLOAT16": np.float16, "NCCL_FLOAT32": np.float32, "NCCL_FLOAT64": np.float64, "NCCL_BFLOAT16": None}
INTEGERS = {
    f"NCCL_{kind.upper()}{bits}": f"{kind}{bits}" for kind, bits in itertools.product(("int", "uint"), (8, 32, 64))
}
INTEGERS = {name: np.dtype(dtype) for name, dtype in INTEGERS.items() if name not in ("NCCL_INT16", "NCCL_UINT16")}
DTYPE_CODES = {name: code for code, name in enumerate([*FLOATS, *INTEGERS])}
OP_CODES = {"NCCL_SUM": 10, "NCCL_PROD": 11, "NCCL_MAX": 12, "NCCL_MIN": 13}


class CUDARuntimeError(RuntimeError):
    pass


class NcclError(RuntimeError):
    pass


class Current(threading.local):
    """Device and stream, as CUDA's and cupy's: each thread has its own."""

    device = 0
    streams = ()


class Stream:
    """Work that runs when it is waited for."""

    def __init__(self, cupy, non_blocking=False):
        self.cupy = cupy
        self.queue = []
        self.ptr = len(cupy.streams)
        cupy.streams.append(self)

    def __enter__(self):
        self.cupy.local.streams = (*self.cupy.local.streams, self)

    def __exit__(self, *error):
        self.cupy.local.streams = self.cupy.local.streams[:-1]

    def run(self, n_left=0):
        while len(self.queue) > n_left:
            self.queue.pop(0)()

    def record(self):
        event = Event(self)
        queued = []
        self.queue.append(lambda: queued.append(True))
        event.reached = lambda: bool(queued)
        return event

    def wait_event(self, event):
        self.queue.append(event.synchronize)

    synchronize = run

    @property
    def done(self):
        self.run()
        return True


class Event:
    def __init__(self, stream):
        self.stream = stream

    def synchronize(self):
        while not self.reached():
            self.stream.queue.pop(0)()


class Pointer:
    def __init__(self, host):
        self.host = host
        self.ptr = host.ctypes.data

    def copy_from_device_async(self, source, n_bytes, stream):
        stream.queue.append(lambda: ctypes.memmove(self.ptr, source.ptr, n_bytes))


class Array:
    """Device memory: reached by pointer, by get and set, and by other arrays of this kind."""

    def __init__(self, cupy, host, device=None):
        self.cupy = cupy
        self.host = host
        self.dtype = host.dtype
        self.size = host.size
        self.itemsize = host.itemsize
        self.shape = host.shape
        self.nbytes = host.nbytes
        self.flags = host.flags
        self.ndim = host.ndim
        self.device = types.SimpleNamespace(id=cupy.local.device if device is None else device)
        self.data = Pointer(host)
        self.__cuda_array_interface__ = {"shape": host.shape, "version": 3}

    def reshape(self, *shape):
        return Array(self.cupy, self.host.reshape(*shape), self.device.id)

    def __reduce__(self):
        return _unpickled, (self.get(),)

    def __array__(self, *_, **__):
        raise TypeError("Implicit conversion to a NumPy array is not allowed. Please use `.get()`.")

    def __getitem__(self, part):
        return Array(self.cupy, self.host[part], self.device.id)

    def get(self, stream=None, out=None, blocking=True):
        stream = stream or self.cupy.cuda.get_current_stream()
        out = np.empty_like(self.host) if out is None else out
        stream.queue.append(lambda: np.copyto(out, self.host))
        if blocking:
            stream.synchronize()
        return out

    def set(self, host, stream=None):
        assert host.dtype == self.dtype
        assert host.size == self.size
        (stream or self.cupy.cuda.get_current_stream()).queue.append(
            lambda: np.copyto(self.host, host.reshape(self.host.shape))
        )


def _unpickled(host):
    """Return an array of this process's stand-in, as cupy does with its own."""
    return sys.modules["cupy"].asarray(host)


class CudaTensor:
    """Stands for a torch tensor on a GPU: what hpcdist asks of one."""

    def __init__(self, values, dtype, device="cuda"):
        self.values = values
        self.dtype = f"torch.{dtype}"
        self.device = types.SimpleNamespace(type=device, index=0)
        self.new_tensor = None

    @property
    def __cuda_array_interface__(self):
        raise RuntimeError("a tensor that wants a gradient has none")

    def detach(self):
        return self

    def numel(self):
        return self.values.size

    def reshape(self, *shape):
        return CudaTensor(self.values.reshape(*shape), self.dtype.removeprefix("torch."), self.device.type)

    def __getitem__(self, part):
        return CudaTensor(self.values[part], self.dtype.removeprefix("torch."), self.device.type)

    def __dlpack__(self, stream):
        cupy = sys.modules["cupy"]
        cupy.streams[stream].wait_event(cupy.producer.record())

    def new_empty(self, n):
        return self

    def short(self):
        return CudaTensor(self.values.view(np.int16), "int16")

    def view(self, dtype):
        assert dtype == "torch.int16"
        return self.short()


def bfloat16(values):
    """Return numbers that bfloat16 holds exactly, as its bits."""
    return (np.asarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16).view(np.int16)


def from_bfloat16(bits):
    return (bits.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def make_cupy(devices=("gpu-0",), *, mpi=None, has_nccl=True, id_form=bytes):
    """Return a stand-in for cupy.

    Args:
        devices: bus ids of what this rank sees; None: no driver.
        mpi: mpi4py's module, for a working communicator.
        has_nccl: whether libnccl is found.
        id_form: bytes, as cupy 14 makes unique ids, or tuple of signed numbers, as older ones.
    """
    cupy, cuda, nccl, cupyx = map(types.ModuleType, ("cupy", "cupy.cuda", "cupy.cuda.nccl", "cupyx"))
    cupy.__path__ = cuda.__path__ = []
    cupy.cuda = cuda
    cuda.nccl = nccl
    cupy.local = Current()
    cupy.seen_dlpack = []
    cupy.made = []
    cupy.streams = []
    # the latter is torch's
    cupy.stream = Stream(cupy)
    cupy.producer = Stream(cupy)

    class Device:
        def __init__(self, index):
            self.index = index

        @property
        def pci_bus_id(self):
            return devices[self.index]

        def use(self):
            if self.index >= len(devices):
                raise CUDARuntimeError("cudaErrorInvalidDevice: invalid device ordinal")
            cupy.local.device = self.index

        def __enter__(self):
            self.previous = cupy.local.device
            cupy.local.device = self.index

        def __exit__(self, *error):
            cupy.local.device = self.previous

    def count():
        if devices is None:
            raise CUDARuntimeError("cudaErrorInsufficientDriver: CUDA driver version is insufficient")
        return len(devices)

    def from_dlpack(tensor):
        cupy.seen_dlpack.append(tensor.dtype)
        cuda.get_current_stream().wait_event(cupy.producer.record())
        return Array(cupy, tensor.values)

    cuda.runtime = types.SimpleNamespace(
        getDeviceCount=count,
        getDeviceProperties=lambda index: {"uuid": devices[index].encode()},
        CUDARuntimeError=CUDARuntimeError,
    )
    cuda.Device = Device
    cuda.Stream = functools.partial(Stream, cupy)
    cuda.Stream.null = cupy.stream
    cuda.get_current_stream = lambda: cupy.local.streams[-1] if cupy.local.streams else cupy.stream

    def asarray(array, dtype=None):
        if isinstance(array, Array):
            return array
        return Array(cupy, np.array(array, dtype))

    cupy.ndarray = Array
    cupy.from_dlpack = from_dlpack
    cupy.asarray = asarray
    cupy.array = lambda host: Array(cupy, np.array(host))
    cupy.zeros = lambda n, dtype: Array(cupy, np.zeros(n, dtype))
    cupyx.empty_pinned = lambda n, dtype: np.full(n, 77).astype(dtype)
    _fill_nccl(cupy, nccl, mpi, id_form)
    nccl.available = has_nccl
    return {"cupy": cupy, "cupy.cuda": cuda, "cupy.cuda.nccl": nccl, "cupyx": cupyx}


def _fill_nccl(cupy, nccl, mpi, id_form):
    for name, code in {**DTYPE_CODES, **OP_CODES}.items():
        setattr(nccl, name, code)
    nccl.NcclError = NcclError

    def get_unique_id():
        raw = np.random.default_rng().integers(0, 256, 128, np.uint8)
        if id_form is bytes:
            return raw.tobytes()
        return tuple(raw.view(np.int8).tolist())

    class NcclCommunicator(_Communicator):
        def __init__(self, size, unique_id, rank):
            assert type(unique_id) is id_form
            assert len(unique_id) == 128
            assert id_form is bytes or min(unique_id) < 0 <= max(unique_id) < 128  # C's signed characters
            cupy.made.append((size, unique_id, rank, cupy.local.device))
            super().__init__(cupy, mpi, unique_id)
            assert (self.comm.size, self.comm.rank) == (size, rank), "ranks with one unique id"

    nccl.get_unique_id = get_unique_id
    nccl.NcclCommunicator = NcclCommunicator


class _Communicator:
    """NCCL's arithmetic by MPI. Ranks of the world that present one unique id form one communicator."""

    def __init__(self, cupy, mpi, unique_id):
        self.cupy = cupy
        self.mpi = mpi
        self.log = []
        self.device = cupy.local.device
        digest = zlib.crc32(repr(unique_id).encode()) & 0x7FFFFFFF
        self.comm = mpi.COMM_WORLD.Split(digest, mpi.COMM_WORLD.rank)

    def allReduce(self, send, receive, count, dtype, op, stream):
        self._queue("allReduce", lambda: self._store(receive, dtype, self._reduce(send, count, dtype, op)))

    def reduceScatter(self, send, receive, count, dtype, op, stream):
        def work():
            total = self._reduce(send, count * self.comm.size, dtype, op)
            self._store(receive, dtype, total[self.comm.rank * count : (self.comm.rank + 1) * count])

        self._queue("reduceScatter", work)

    def allGather(self, send, receive, count, dtype, stream):
        def work():
            self._store(receive, dtype, np.concatenate(self.comm.allgather(_load(send, count, dtype))))

        self._queue("allGather", work)

    def check_async_error(self):
        pass

    def destroy(self):
        self.log.append("destroy")
        self.comm.Free()

    def _queue(self, name, work):
        assert self.cupy.local.device == self.device, "the stream of another device"
        self.log.append(name)
        self.cupy.cuda.get_current_stream().queue.append(work)

    def _reduce(self, address, count, dtype, op):
        functions = {"NCCL_SUM": np.add, "NCCL_PROD": np.multiply, "NCCL_MAX": np.maximum, "NCCL_MIN": np.minimum}
        name = next(name for name, code in OP_CODES.items() if code == op)
        return functions[name].reduce(np.array(self.comm.allgather(_load(address, count, dtype))), dtype=None)

    def _store(self, address, dtype, values):
        if dtype == DTYPE_CODES["NCCL_BFLOAT16"]:
            values = bfloat16(values)
        else:
            values = values.astype(_numpy_dtype(dtype))
        ctypes.memmove(address, np.ascontiguousarray(values).ctypes.data, values.nbytes)


def _numpy_dtype(code):
    name = next(name for name, dtype_code in DTYPE_CODES.items() if dtype_code == code)
    return np.dtype({**FLOATS, **INTEGERS}[name] or np.int16)


def _load(address, count, dtype):
    size = _numpy_dtype(dtype).itemsize * count
    raw = np.frombuffer(bytes((ctypes.c_char * size).from_address(address)), _numpy_dtype(dtype))
    if dtype == DTYPE_CODES["NCCL_BFLOAT16"]:
        return from_bfloat16(raw)
    return raw.copy()


def install(monkeypatch, modules):
    """Put the stand-in where `import cupy` finds it; return it."""
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return modules["cupy"]

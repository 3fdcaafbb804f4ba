"""NCCL, CUDA IPC and staged copies on real GPUs. Every body is right for any number of ranks and GPUs."""

import numpy as np
import pytest

from hpcdist.cluster.environment import nccl_may_share_devices, read_environment
from hpcdist.collectives import library
from hpcdist.collectives.gpu import cupy_door as cuda
from hpcdist.collectives.gpu import hierarchical as hierarchical_cuda
from hpcdist.collectives.gpu import nccl
from hpcdist.collectives.group import group_of
from hpcdist.collectives.ops import OPS
from hpcdist.errors import ConfigurationError

pytestmark = [pytest.mark.gpu, pytest.mark.mpi]


def values(rank, count):
    return np.arange(count) % 5 + rank + 1


def total(size, count):
    return sum(values(rank, count) for rank in range(size))


@pytest.mark.feature("collectives.nccl-all-reduce")
@pytest.mark.parametrize("dtype", [dtype for dtype in nccl.DTYPES if dtype != "bfloat16"])
def test_nccl_all_reduce(comm, nccl_ranks, on_gpu, make_group, dtype):
    group = make_group()
    for count in (0, 1, comm.size + 1, 1 << 20):
        array = on_gpu(values(comm.rank, count).astype(dtype))
        nccl.all_reduce(array, group)
        assert array.get().tolist() == total(comm.size, count).astype(dtype).tolist()


@pytest.mark.parametrize("op", nccl.OPS)
def test_nccl_ops_equal_mpis(comm, nccl_ranks, on_gpu, make_group, op):
    host = values(comm.rank, 1000).astype(np.float64)
    array = on_gpu(host)
    nccl.all_reduce(array, make_group(), OPS[op])
    library.all_reduce(host, group_of(comm), OPS[op])
    assert array.get().tolist() == host.tolist()


def test_reduce_scatter_and_all_gather(comm, nccl_ranks, on_gpu, make_group):
    group = make_group()
    whole = cuda.device_array(on_gpu(values(comm.rank, 4 * comm.size).astype(np.float32)))
    communicator = nccl.communicator_of(group, group.comm, whole.device)
    part = whole[4 * comm.rank : 4 * comm.rank + 4]
    communicator.reduce_scatter(whole, part)
    communicator.wait()
    assert part.array.get().tolist() == total(comm.size, 4 * comm.size)[4 * comm.rank : 4 * comm.rank + 4].tolist()
    communicator.all_gather(part, whole)
    communicator.wait()
    assert whole.array.get().tolist() == total(comm.size, 4 * comm.size).tolist()


def test_two_ranks_on_one_gpu_are_refused(comm, cupy, has_gpu_each, on_gpu, make_group):
    if has_gpu_each or nccl_may_share_devices(read_environment()):
        pytest.skip("every rank has a GPU of its own, or NCCL was told to share")
    with pytest.raises(ConfigurationError, match="expected one rank per GPU, got ranks 0 and 1 on GPU"):
        nccl.all_reduce(on_gpu(np.ones(3)), make_group())


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64", "int64"])
def test_hierarchical_through_host_memory(comm, cupy, on_gpu, make_group, dtype):
    """Every rank plays a host of its own: NCCL of size 1, the lane by MPI; works with all ranks on one GPU."""
    group = make_group(1)
    for count in (1, 1000, 3 << 20):
        array = on_gpu(values(comm.rank, count).astype(dtype))
        hierarchical_cuda.all_reduce(array, group)
        assert np.array_equal(array.get(), total(comm.size, count).astype(dtype))


@pytest.mark.feature("gpu.staged-copies")
@pytest.mark.parametrize("n_bytes", [8, cuda.PIECE_BYTES, 3 * cuda.PIECE_BYTES + 8])
def test_staged_copies(comm, cupy, on_gpu, n_bytes):
    host = values(comm.rank, n_bytes // 8).astype(np.float64)
    array = on_gpu(host)
    pieces = []

    def host_all_reduce(piece):
        pieces.append(piece.nbytes)
        library.all_reduce(piece, group_of(comm))

    cuda.staged_all_reduce(cuda.device_array(array), host_all_reduce)
    assert np.array_equal(array.get(), total(comm.size, n_bytes // 8))
    assert sum(pieces) == n_bytes
    assert max(pieces) <= cuda.PIECE_BYTES


def test_staged_copies_wait_for_the_current_stream(comm, cupy, on_gpu):
    source, array = (cuda.device_array(on_gpu(np.full(1 << 22, value, np.float32))) for value in (1, 0))
    with cupy.cuda.Stream(non_blocking=True):
        for _ in range(50):
            cuda.copy_into(array, source)
        cuda.staged_all_reduce(array, lambda piece: library.all_reduce(piece, group_of(comm)))
    assert (array.array.get() == comm.size).all()


def test_memory_of_another_rank_by_cuda_ipc(comm, cupy):
    if comm.size == 1:
        pytest.skip("a process cannot open its own memory: takes two ranks")
    # the unit in which CUDA shares memory
    runtime = cupy.cuda.runtime
    nbytes = 2 << 20
    local_array = cupy.ndarray((nbytes // 8,), np.float64, cupy.cuda.MemoryPointer(cupy.cuda.Memory(nbytes), 0))
    local_array.set(np.full(nbytes // 8, comm.rank, np.float64))
    cupy.cuda.runtime.deviceSynchronize()
    handles = comm.allgather(runtime.ipcGetMemHandle(local_array.data.ptr))
    neighbour = (comm.rank + 1) % comm.size
    address = runtime.ipcOpenMemHandle(handles[neighbour])
    memory = cupy.cuda.UnownedMemory(address, nbytes, None, local_array.device.id)
    seen = cupy.ndarray(local_array.shape, np.float64, cupy.cuda.MemoryPointer(memory, 0)).get()
    runtime.ipcCloseMemHandle(address)
    comm.Barrier()  # before anyone frees what another has open
    assert (seen == neighbour).all()


@pytest.mark.feature("gpu.zero-copy-tensors")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int64"])
def test_torch_tensors_of_a_side_stream(comm, nccl_ranks, make_group, dtype):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this torch is built without CUDA, or finds no GPU")
    with torch.cuda.stream(torch.cuda.Stream()):
        tensor = torch.zeros(1 << 20, device="cuda")
        for _ in range(50):
            tensor = tensor + (comm.rank + 1) / 50
        tensor = tensor.round().to(getattr(torch, dtype))
        address = tensor.data_ptr()
        nccl.all_reduce(tensor, make_group())
        assert tensor.data_ptr() == address
        assert (tensor.double() == comm.size * (comm.size + 1) / 2).all()

"""Arrays of cupy in, arrays of cupy out, for every collective, on a stand-in without NCCL: they travel by the host."""

import numpy as np
import pytest
from cupy_stand_in import install, make_cupy

import hpcdist

pytestmark = [pytest.mark.mpi, pytest.mark.core]


@pytest.fixture
def cupy(comm, monkeypatch):
    return install(monkeypatch, make_cupy((f"gpu-{comm.rank}",), has_nccl=False))


def rows_of(rank, size):
    return np.arange(2 * size, dtype=np.float32).reshape(size, 2) + 100 * rank


def total(size):
    return sum(rows_of(rank, size) for rank in range(size))


#: Collective -> the call, and what it returns on a rank of host arrays.
CALLS = {
    "all_reduce": (lambda x, size: hpcdist.all_reduce(x), lambda rank, size: total(size)),
    "all_reduce_async": (lambda x, size: hpcdist.all_reduce_async(x).wait(), lambda rank, size: total(size)),
    "broadcast": (lambda x, size: hpcdist.broadcast(x, size - 1), lambda rank, size: rows_of(size - 1, size)),
    "broadcast_async": (
        lambda x, size: hpcdist.broadcast_async(x, size - 1).wait(),
        lambda rank, size: rows_of(size - 1, size),
    ),
    "all_gather": (
        lambda x, size: hpcdist.all_gather(x),
        lambda rank, size: np.concatenate([rows_of(source_rank, size) for source_rank in range(size)]),
    ),
    "reduce_scatter": (lambda x, size: hpcdist.reduce_scatter(x), lambda rank, size: total(size)[rank : rank + 1]),
    "alltoall": (
        lambda x, size: hpcdist.alltoall(x)[0],
        lambda rank, size: np.stack([rows_of(source_rank, size)[rank] for source_rank in range(size)]),
    ),
    "scatter": (lambda x, size: hpcdist.scatter(x), lambda rank, size: rows_of(0, size)[rank : rank + 1]),
}


@pytest.mark.parametrize("name", CALLS)
def test_device_arrays_come_back_as_device_arrays(comm, cupy, name):
    call, expected = CALLS[name]
    device_array = cupy.asarray(rows_of(comm.rank, comm.size))
    result = call(device_array, comm.size)
    result = device_array if result is None else result
    assert isinstance(result, cupy.ndarray)
    assert result.dtype == np.float32
    assert result.get().tolist() == expected(comm.rank, comm.size).tolist()


def test_groups_of_device_arrays(comm, cupy):
    device_arrays = [cupy.asarray(rows_of(comm.rank, comm.size)) for _ in range(2)]
    hpcdist.grouped_all_reduce(device_arrays)
    assert [device_array.get().tolist() for device_array in device_arrays] == [total(comm.size).tolist()] * 2


def test_values_of_replicas_are_reduced_and_gathered_on_the_host(comm, cupy):
    strategy = hpcdist.MultiWorkerMirroredStrategy()
    local_rows = cupy.asarray(rows_of(comm.rank, comm.size))
    assert strategy.reduce("sum", local_rows, axis=None).tolist() == total(comm.size).tolist()
    assert strategy.reduce("mean", local_rows, axis=0).tolist() == pytest.approx(total(comm.size).mean(0) / comm.size)
    gathered = strategy.gather(local_rows, axis=0)
    assert gathered.tolist() == np.concatenate([rows_of(rank, comm.size) for rank in range(comm.size)]).tolist()

import itertools

import numpy as np
import pytest
import torch

import hpcdist
from hpcdist.collectives import library
from hpcdist.collectives.group import group_of
from hpcdist.errors import CollectiveError

pytestmark = [pytest.mark.mpi, pytest.mark.core]
COUNTS = {"0": lambda size: 0, "1": lambda size: 1, "size-1": lambda size: size - 1, "size+1": lambda size: size + 1}
COUNTS["1000"] = lambda size: 1000


def values(rank, count):
    """Return numbers that are exact in every dtype, also summed over a few ranks."""
    return np.arange(count) % 7 + rank


def expected(op, size, count):
    rows = np.array([values(rank, count) for rank in range(size)])
    functions = {"sum": rows.sum, "mean": rows.mean, "min": rows.min, "max": rows.max, "product": rows.prod}
    return functions[op](axis=0)


DTYPES = ["float32", "float64", "float16", "int64", "int32", "uint8"]
OPS = ["sum", "mean", "min", "max", "product"]
CASES = [(dtype, op) for dtype, op in itertools.product(DTYPES, OPS) if op != "mean" or "int" not in dtype]


@pytest.mark.feature("collectives.reduction-ops")
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize(("dtype", "op"), CASES)
def test_numpy(comm, dtype, op, count):
    n_elements = COUNTS[count](comm.size)
    buffer = values(comm.rank, n_elements).astype(dtype)
    hpcdist.all_reduce(buffer, op)
    wanted = expected(op, comm.size, n_elements).astype(dtype)  # small integers wrap around, as MPI's do
    assert np.allclose(buffer, wanted, rtol=1e-3)


@pytest.mark.feature("collectives.reduction-ops")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("shape", [(), (0,), (5,), (3, 4)])
def test_torch(comm, dtype, shape):
    buffer = torch.full(shape, comm.rank + 1).to(dtype)
    address = buffer.data_ptr()
    hpcdist.all_reduce(buffer)
    assert buffer.dtype is dtype
    assert buffer.data_ptr() == address
    assert torch.equal(buffer, torch.full(shape, comm.size * (comm.size + 1) // 2).to(dtype))


def test_a_parameter_is_reduced_without_autograd(comm):
    parameter = torch.nn.Parameter(torch.ones(3))
    hpcdist.all_reduce(parameter)
    assert parameter.tolist() == [comm.size] * 3
    assert parameter.requires_grad


class DeviceArray:
    """Stands for cupy's arrays: values that only get() and set() reach."""

    __cuda_array_interface__ = {}

    class flags:
        c_contiguous = True

    def __init__(self, values):
        self._values = values

    def get(self):
        return self._values.copy()

    def set(self, host):
        self._values = host


@pytest.mark.feature("gpu.staged-copies", "complaints.cuda-aware-or-not")
def test_device_arrays_travel_through_the_host(comm):
    array = DeviceArray(np.full(3, comm.rank, np.float32))
    hpcdist.all_reduce(array)
    assert array.get().tolist() == [comm.size * (comm.size - 1) / 2] * 3


@pytest.mark.feature("collectives.reduction-ops")
def test_ops_by_enum_and_any_case(comm):
    buffer = np.ones(2)
    hpcdist.all_reduce(buffer, hpcdist.ReduceOp.MEAN)
    hpcdist.all_reduce(buffer, "Sum")
    assert buffer.tolist() == [comm.size] * 2


@pytest.mark.feature("launch.process-sets", "launch.own-communicators")
def test_over_a_communicator_of_the_users(comm):
    half_comm = comm.Split(comm.rank % 2)
    buffer = np.ones(2)
    hpcdist.all_reduce(buffer, comm=half_comm)
    assert buffer.tolist() == [half_comm.size] * 2
    half_comm.Free()


@pytest.mark.parametrize(
    ("buffer", "op", "text"),
    [
        (np.ones((4, 4))[:, ::2], "sum", "not contiguous"),
        (np.broadcast_to(np.ones(1), (3,)), "sum", "expected a writable contiguous array"),
        (np.frombuffer(b"abcd", np.uint8), "sum", "read-only"),
        (np.array(["text"]), "sum", "expected numbers"),
        (np.ones(3, bool), "sum", "expected numbers"),
        (np.ones(3, int), "mean", "expected floats for a mean"),
        ([1.0], "sum", "got list"),
        (torch.ones(4, 4).t()[:2], "sum", "not contiguous"),
        (torch.ones(3).to_sparse(), "sum", "sparse"),
        (np.ones(3), "xor", "expected an op of sum, mean"),
    ],
)
def test_refuses_before_anything_is_sent(buffer, op, text):
    with pytest.raises(CollectiveError, match=text):
        hpcdist.all_reduce(buffer, op)


@pytest.mark.feature("collectives.large-and-persistent-collectives", "complaints.large-and-half-messages")
def test_large_arrays_go_in_pieces(comm, monkeypatch):
    monkeypatch.setattr(library, "PIECE_BYTES", 64)
    buffer = np.arange(1001, dtype=np.float64).reshape(7, 143)
    library.all_reduce(buffer, group_of(comm))
    assert np.array_equal(buffer.reshape(-1), np.arange(1001) * comm.size)
    buffer[:] = comm.rank
    library.broadcast(buffer, comm, comm.size - 1)
    assert (buffer == comm.size - 1).all()

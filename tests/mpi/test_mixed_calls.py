"""Ranks that exchange values in different orders: an error on all of them, and no sum of what does not fit together."""

import numpy as np
import pytest
import torch

import hpcdist
from hpcdist.collectives.group import group_of
from hpcdist.errors import DesyncError, UsageError
from hpcdist.runtime.mpi import MPI

pytestmark = [pytest.mark.mpi, pytest.mark.core]


class Values:
    """A strategy with what can be read, and the calls that read it."""

    def __init__(self, n_replicas):
        self.strategy = hpcdist.MultiWorkerMirroredStrategy(num_replicas=n_replicas)
        on_read = {"synchronization": "ON_READ", "aggregation": "SUM"}
        with self.strategy.scope():
            self.loss = hpcdist.metrics.Mean("loss")
            self.accuracy = hpcdist.metrics.Mean("accuracy")
            self.unnamed = [hpcdist.Variable(0.0, **on_read) for _ in range(2)]
        self.strategy.run(self.update)
        self.number = self.strategy.run(lambda: torch.tensor(1.0))
        self.rows = self.strategy.run(lambda: torch.ones(3))
        self.square = self.strategy.run(lambda: torch.ones(2, 2))

    def update(self):
        self.loss.update_state([1.0])
        self.accuracy.update_state([3.0])

    def calls(self):
        reduce = self.strategy.reduce
        gather = self.strategy.gather
        return {
            "loss": self.loss.result,
            "accuracy": self.accuracy.result,
            "state of the loss": self.loss.state_dict,
            "first variable": self.unnamed[0].read_value,
            "second variable": self.unnamed[1].read_value,
            "sum": lambda: reduce("sum", self.number, axis=None),
            "mean": lambda: reduce("mean", self.number, axis=None),
            "sum of rows": lambda: reduce("sum", self.rows, axis=0),
            "gather": lambda: gather(self.rows, axis=0),
            "gather square": lambda: gather(self.square, axis=0),
            "gather columns": lambda: gather(self.square, axis=-1),
            "sum over rows": lambda: reduce("sum", self.square, axis=0),
            "sum over columns": lambda: reduce("sum", self.square, axis=1),
            "new variable": self.make_variable,
        }

    def make_variable(self):
        with self.strategy.scope():
            return hpcdist.Variable(0.0)


@pytest.fixture(params=["by default", "several a rank"])
def values(request, comm):
    if comm.size == 1:
        pytest.skip("one rank has one order")
    return Values(None if request.param == "by default" else 2 * comm.size)


PAIRS = [
    ("loss", "accuracy"),
    ("first variable", "second variable"),
    ("sum", "mean"),
    ("sum", "loss"),
    ("loss", "state of the loss"),
    ("sum of rows", "sum"),
    ("gather", "sum"),
    ("gather", "loss"),
    ("gather square", "gather columns"),
    ("sum over rows", "sum over columns"),
    ("new variable", "accuracy"),
]


@pytest.mark.feature("debugging.mismatch-detection")
@pytest.mark.parametrize(("worker_call", "chief_call"), PAIRS)
def test_calls_in_different_orders_are_refused_on_all_ranks(values, comm, worker_call, chief_call):
    if comm.rank:
        name = worker_call
    else:
        name = chief_call
    local_call = values.calls()[name]
    with pytest.raises(UsageError, match=r"others.*elsewhere"):
        local_call()
    assert values.loss.result() == 1, "the next calls are right"
    assert values.accuracy.result() == 3


@pytest.mark.parametrize(("op", "dtype"), [("max", np.float64), ("sum", np.int64)])
def test_reductions_that_do_not_fit_together_are_found_by_all_ranks_of_a_host(comm, op, dtype):
    if comm.size == 1:
        return
    duplicate_comm = comm.Dup()
    for _ in range(3):
        hpcdist.all_reduce(np.ones(2), comm=duplicate_comm)
    rank_dtype = float
    rank_op = "sum"
    if comm.rank == 0:
        rank_dtype = dtype
        rank_op = op
    with pytest.raises(DesyncError, match=rf"{op} of 2 {np.dtype(dtype)} on rank 0, sum of 2 float64 on rank 1"):
        hpcdist.all_reduce(np.ones(2, rank_dtype), rank_op, comm=duplicate_comm)
    hpcdist.all_reduce(np.ones(2), comm=duplicate_comm)
    duplicate_comm.Free()


def test_a_size_that_is_measured_first_meets_one_that_is_not(comm):
    if comm.size == 1:
        return
    duplicate_comm = comm.Dup()
    n_elements = 2
    if comm.rank:
        n_elements = 1000
    with pytest.raises(DesyncError, match="sum of 2 float64 on rank 0, sum of 1000 float64 on rank 1"):
        hpcdist.all_reduce(np.ones(n_elements), comm=duplicate_comm)
    duplicate_comm.Free()


@pytest.mark.parametrize(("op", "dtype"), [("max", np.float64), ("sum", np.int64)])
def test_reductions_by_the_library_that_do_not_fit_together_are_found(comm, op, dtype):
    """By the ranks beside the one that differs, before anybody uses the result: the job would end."""
    if comm.size == 1:
        return
    duplicate_comm = comm.Dup()
    options = {"implementation": "MPI"}
    for _ in range(3):
        hpcdist.all_reduce(np.ones(2), comm=duplicate_comm, **options)
    error = None
    if comm.rank == 0:
        rank_dtype = dtype
    else:
        rank_dtype = float
    values = np.ones(2, rank_dtype)
    if comm.rank == 0:
        rank_op = op
    else:
        rank_op = "sum"
    name = rank_op
    try:
        hpcdist.all_reduce(values, name, comm=duplicate_comm, **options)
    except DesyncError as caught:
        error = str(caught)
    has_failed = comm.allgather(error is not None)
    assert has_failed[0]
    assert has_failed[-1]
    if error is not None:
        assert "expected the same call on every rank" in error
    hpcdist.all_reduce(np.ones(2), comm=duplicate_comm, **options)
    duplicate_comm.Free()


def test_ranks_may_take_other_ways_to_the_same_sum(comm):
    """A scale of its own, or another kind of array: which way a sum goes must not count."""
    duplicate_comm = comm.Dup()
    if comm.rank == 0:
        prescale = 1.0
    else:
        prescale = 0.5
    hpcdist.all_reduce(np.ones(1), prescale=prescale, comm=duplicate_comm)
    if comm.rank == 0:
        summand = np.ones(2)
    else:
        summand = torch.ones(2, dtype=torch.float64)
    hpcdist.all_reduce(summand, comm=duplicate_comm)
    for size in (2, 3):
        buffer = np.ones(size)
        hpcdist.all_reduce(buffer, comm=duplicate_comm)
        assert buffer.tolist() == [comm.size] * size
    duplicate_comm.Free()


def test_a_rank_that_is_ahead_is_no_error(comm):
    duplicate_comm = comm.Dup()
    for number in range(2000):
        hpcdist.all_reduce(np.ones(1 + number % 7), ("sum", "max")[number % 2], comm=duplicate_comm)
    duplicate_comm.Free()


def test_a_library_s_error_names_the_call(comm, monkeypatch):
    """As Open MPI raises it for messages of other sizes."""

    class Failing:
        def Allreduce(self, *args):
            raise MPI.Exception(MPI.ERR_TRUNCATE)

    group = group_of(comm)
    monkeypatch.setattr(group, "comm", Failing())
    with pytest.raises(DesyncError, match=r"all_reduce.*16"):
        hpcdist.all_reduce(np.ones(2), implementation="MPI", comm=comm)

"""The public functions beside all_reduce, handles, large and odd buffers."""

import re
import threading
import time

import numpy as np
import pytest
import torch

import hpcdist
from hpcdist.collectives import group, library, shared_memory
from hpcdist.collectives.group import Group, group_of
from hpcdist.collectives.options import CommunicationImplementation as Implementation
from hpcdist.diagnostics import summary
from hpcdist.errors import CollectiveError, CollectiveTimeoutError, ConfigurationError, DesyncError, UsageError
from hpcdist.runtime.process import make_world

pytestmark = [pytest.mark.mpi, pytest.mark.core]


@pytest.mark.feature("collectives.broadcast-and-gathers")
@pytest.mark.parametrize("root", [0, -1])
def test_broadcast(comm, root):
    root %= comm.size
    array = np.full((2, 3), comm.rank)
    tensor = torch.full((3,), float(comm.rank), dtype=torch.bfloat16)
    hpcdist.broadcast(array, root)
    hpcdist.broadcast(tensor, root)
    assert set(array.reshape(-1).tolist()) == {root}
    assert tensor.tolist() == [root] * 3


@pytest.mark.feature("collectives.broadcast-and-gathers")
def test_all_gather_of_unequal_rows(comm):
    local_rows = np.full((comm.rank, 2), comm.rank, np.int32)
    joined = hpcdist.all_gather(local_rows)
    assert joined.dtype == np.int32
    expected = []
    for rank in range(comm.size):
        expected += [[rank] * 2] * rank
    assert joined.tolist() == expected
    assert hpcdist.all_gather(np.empty((0, 3))).shape == (0, 3)


@pytest.mark.feature("collectives.broadcast-and-gathers")
def test_all_gather_takes_rows_that_fit(comm):
    with pytest.raises(CollectiveError, match="single.*number"):
        hpcdist.all_gather(np.float32(1))
    if comm.size > 1:
        with pytest.raises(CollectiveError, match=r"float.*shape.*2.*0"):
            hpcdist.all_gather(np.zeros((1, 2 + comm.rank)))


@pytest.mark.feature("collectives.other-collectives")
@pytest.mark.parametrize("n_rows", [0, 1, 7])
def test_reduce_scatter(comm, n_rows):
    array = np.arange(3.0 * n_rows).reshape(n_rows, 3) + comm.rank
    before = array.copy()
    whole = np.arange(3.0 * n_rows).reshape(n_rows, 3) * comm.size + sum(range(comm.size))
    parts = comm.allgather(hpcdist.reduce_scatter(array))
    assert np.array_equal(np.concatenate(parts), whole)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert np.array_equal(array, before)
    assert np.allclose(np.concatenate(comm.allgather(hpcdist.reduce_scatter(array, "mean"))), whole / comm.size)
    with pytest.raises(CollectiveError, match="expected rows"):
        hpcdist.reduce_scatter(np.array(1.0))


@pytest.mark.feature("collectives.other-collectives")
def test_gather_objects(comm):
    gathered = hpcdist.gather_objects({"rank": comm.rank}, root=comm.size - 1)
    if comm.rank == comm.size - 1:
        expected = [{"rank": rank} for rank in range(comm.size)]
    else:
        expected = None
    assert gathered == expected


@pytest.mark.feature("collectives.async-handles")
@pytest.mark.parametrize("implementation", ["auto", "mpi", "shared_memory", "ring"])
def test_async_handles_end_in_any_order_of_waits(comm, implementation):
    buffers = [np.full(10_000 + number, comm.rank + number, np.float32) for number in range(5)]
    handles = [hpcdist.all_reduce_async(buffer, implementation=implementation) for buffer in buffers]
    hpcdist.all_reduce(np.ones(5000))  # of the main thread, meanwhile
    for number in (4, 0, 2, 1, 3):
        handles[number].wait()
        assert handles[number].is_done
        assert set(buffers[number].tolist()) == {sum(range(comm.size)) + number * comm.size}


@pytest.mark.feature("collectives.async-handles")
def test_async_mean_and_error(comm):
    buffer = np.full(3, comm.rank, np.float64)
    hpcdist.all_reduce_async(buffer, "mean").wait()
    assert buffer.tolist() == [(comm.size - 1) / 2] * 3
    with pytest.raises(CollectiveError, match="floats.*mean"):
        hpcdist.all_reduce_async(np.ones(3, int), "mean").wait()
    with pytest.raises(CollectiveError, match="expected an op of"):
        hpcdist.all_reduce_async(np.ones(3), "xor")


@pytest.mark.feature("collectives.async-handles")
def test_a_wait_for_a_handle_can_be_bounded(comm):
    if comm.size == 1:
        return
    if comm.rank == 0:
        handle = hpcdist.all_reduce_async(buffer := np.ones(3))
        with pytest.raises(CollectiveTimeoutError, match=r"within.*0.1"):
            handle.wait(0.1)
    comm.Barrier()
    if comm.rank > 0:
        handle = hpcdist.all_reduce_async(buffer := np.ones(3))
    handle.wait()
    assert buffer.tolist() == [comm.size] * 3


@pytest.mark.feature("collectives.large-and-persistent-collectives", "complaints.large-and-half-messages")
@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["mpi", "shared_memory", "hierarchical", "ring", "halving"])
def test_more_than_2_gib(comm, name):
    if comm.size != 2:
        pytest.skip("with two ranks only, for the memory it takes")
    n_bytes = (2 << 30) + 5
    buffer = np.zeros(n_bytes, np.uint8)
    places = [0, 1, (1 << 30) - 1, 1 << 30, (2 << 30) - 1, 2 << 30, n_bytes - 1]
    buffer[places] = comm.rank + 1
    hpcdist.all_reduce(buffer, implementation=name)
    assert buffer[places].tolist() == [3] * len(places)
    assert int(buffer.sum(dtype=np.int64)) == 3 * len(places)


def test_non_contiguous_zero_length_and_scalar_buffers(comm):
    for name in ("shared_memory", "hierarchical", "ring"):
        with pytest.raises(CollectiveError, match="not contiguous"):
            hpcdist.all_reduce(np.ones((4, 4)).T[:2], implementation=name)
        hpcdist.all_reduce(np.empty(0, np.float32), implementation=name)
        scalar = np.array(comm.rank + 1.0)
        hpcdist.all_reduce(scalar, implementation=name)
        assert scalar == comm.size * (comm.size + 1) / 2


@pytest.mark.feature("complaints.large-and-half-messages")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8", "uint8", "int16", "int32", "int64", "bool"])
@pytest.mark.parametrize("name", ["shared_memory", "hierarchical", "ring", "halving"])
def test_torch_dtypes(comm, name, dtype):
    tensor = torch.ones(3000).to(getattr(torch, dtype))
    if dtype == "bool":
        with pytest.raises(CollectiveError, match="expected numbers"):
            hpcdist.all_reduce(tensor.numpy(), implementation=name)
        return
    hpcdist.all_reduce(tensor, implementation=name)
    assert set(tensor.tolist()) == {comm.size}


@pytest.mark.feature("collectives.communication-options", "semantics.options-per-call")
def test_options_that_cannot_be_are_refused():
    for wrong, text in [
        ({"bytes_per_pack": -1}, "bytes_per_pack of 0 or more, got -1"),
        ({"timeout_seconds": 0}, "timeout_seconds above 0"),
        ({"wire_dtype": "int8"}, "wire_dtype of float16, bfloat16 or None, got 'int8'"),
        ({"implementation": "gloo"}, "AUTO, RING, NCCL"),
    ]:
        with pytest.raises(ValueError, match=text):
            hpcdist.CommunicationOptions(**wrong)
    assert hpcdist.CommunicationOptions(implementation="ring").implementation is Implementation.RING
    assert hpcdist.CollectiveCommunication is hpcdist.CommunicationImplementation


@pytest.mark.feature("collectives.communication-options")
def test_a_time_limit_is_the_groups_own(comm):
    strategy = hpcdist.MultiWorkerMirroredStrategy(
        communication_options=hpcdist.CommunicationOptions(timeout_seconds=33.0)
    )
    assert strategy.group.timeout_s == 33.0
    assert group_of(strategy.world.role_comm).timeout_s == make_world().timeout_s


@pytest.mark.feature("semantics.options-per-call")
def test_waits_for_ranks_of_the_node_are_bounded(comm, monkeypatch):
    """One rank stays away from a barrier of the node; the others give up in time and say for whom they waited."""
    monkeypatch.setattr(group, "LATE_S", 0.0)
    bounded_group = Group(comm, make_world(), timeout_s=0.3)
    bounded_group.watchdog.stop()  # which would end the job
    barrier = bounded_group.barrier
    comm.Barrier()
    if comm.rank > 0:
        with pytest.raises(CollectiveTimeoutError, match=r"within 0.3 s, got no answer from rank 0 on rank"):
            barrier.wait()
    comm.Barrier()
    if comm.rank == 0:
        barrier.wait()
    bounded_group.free()


def test_without_shared_memory_the_others_still_work(comm, monkeypatch):
    def refuse(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.memfd_create", refuse)
    memoryless_group = Group(comm, make_world())
    buffer = np.ones(10)
    library.all_reduce(buffer, memoryless_group)
    assert buffer[0] == comm.size
    if comm.size > 1:
        with pytest.raises(CollectiveError, match="memory.*ranks"):
            shared_memory.all_reduce(buffer, memoryless_group)
    memoryless_group.free()


@pytest.mark.feature("debugging.log-of-calls")
def test_journals_hold_what_was_called(comm):
    duplicate_comm = comm.Dup()
    hpcdist.all_reduce(np.ones(7, np.float32), "max", comm=duplicate_comm)
    with pytest.raises(ConfigurationError):
        hpcdist.all_reduce(np.ones(7), implementation="NCCL", comm=duplicate_comm)
    entries = group_of(duplicate_comm).journal.entries
    assert str(entries[0]) == "all_reduce max float32 x 7"
    assert all(entry.ended_s is not None for entry in entries)
    duplicate_comm.Free()


@pytest.mark.feature("tf.other-calls-another")
def test_debug_names_the_rank_that_calls_something_else(comm, monkeypatch):
    world = make_world()
    monkeypatch.setattr(world, "debug", frozenset(["collectives"]))
    duplicate_comm = comm.Dup()
    hpcdist.all_reduce(np.ones(3), comm=duplicate_comm)
    if comm.size > 1:
        with pytest.raises(DesyncError, match=rf"x {comm.size + 2}.*rank|rank.*x {comm.size + 2}"):
            hpcdist.all_reduce(np.ones(3 + (comm.size - 1) * (comm.rank == comm.size - 1)), comm=duplicate_comm)
    duplicate_comm.Free()


@pytest.mark.feature("launch.process-sets")
def test_threads_end_with_their_group(comm):
    def threads():
        return {thread for thread in threading.enumerate() if thread.name == "hpcdist-communication"}

    duplicate_comm = comm.Dup()
    before = threads()
    hpcdist.all_reduce_async(np.ones(3), comm=duplicate_comm).wait()
    started_threads = threads() - before
    assert started_threads
    duplicate_comm.Free()
    deadline = time.monotonic() + 5
    while threads() & started_threads and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not threads() & started_threads


@pytest.mark.feature("collectives.broadcast-and-gathers")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int64, torch.bool, torch.uint8])
def test_tensors_are_gathered_as_tensors(comm, dtype):
    """Ranks give as many rows as their number: rank 0 none."""
    local_rows = torch.full((comm.rank, 2, 3), comm.rank).to(dtype).transpose(1, 2)
    gathered = hpcdist.all_gather(local_rows.requires_grad_() if dtype.is_floating_point else local_rows)
    expected = torch.cat([torch.full((rank, 3, 2), rank).to(dtype) for rank in range(comm.size)])
    assert gathered.dtype is dtype
    assert gathered.requires_grad is dtype.is_floating_point
    assert torch.equal(gathered, expected)


@pytest.mark.feature("collectives.broadcast-and-gathers")
@pytest.mark.parametrize("make", [np.array, torch.tensor])
def test_bools_are_broadcast_and_gathered(comm, make):
    values = make([comm.rank == 0, False])
    hpcdist.broadcast(values)
    assert values.tolist() == [True, False]
    assert hpcdist.all_gather(values).tolist() == [True, False] * comm.size


@pytest.mark.feature("debugging.log-of-calls")
def test_debug_logs_each_call_as_it_ends(comm, monkeypatch, make_group, capfd):
    monkeypatch.setattr(make_world(), "debug", frozenset(["calls"]))
    group = make_group()
    capfd.readouterr()
    with group.recorded("all_reduce sum", np.ones(3, np.float32)):
        pass
    with group.recorded("barrier", None):
        pass
    first, second = capfd.readouterr().err.splitlines()
    log_prefix = f"hpcdist: {make_world().describe()}: "
    assert re.fullmatch(re.escape(f"{log_prefix}1  all_reduce sum float32 x 3  ") + r"[\d.]+ ms", first)
    assert second.startswith(f"{log_prefix}2  barrier any x 0  ")


@pytest.mark.feature("observability.communication-summary")
def test_debug_counts_calls_bytes_and_seconds(comm, monkeypatch, make_group):
    monkeypatch.setattr(make_world(), "debug", frozenset(["summary"]))
    monkeypatch.setattr(summary, "_totals", summary.CallTotals())
    group = make_group()
    for _ in range(3):
        with group.recorded("all_reduce sum", torch.ones(1000, dtype=torch.bfloat16)):
            time.sleep(0.01)
    with group.recorded("barrier", None):
        pass
    heading, first, second, last = hpcdist.communication_summary().splitlines()
    assert heading.split() == ["collective", "calls", "MB", "seconds", "MB/s"]
    *name, calls, megabytes, seconds, rate = first.split()
    assert name == ["all_reduce", "sum", "bfloat16"]
    assert (calls, megabytes) == ("3", "0.006")
    assert float(seconds) >= 0.03
    assert rate == "0"
    assert second.split()[:4] == ["barrier", "any", "1", "0.000"]
    assert re.fullmatch(r"[\d.]+ s of [\d.]+ s in collectives", last)


def test_a_summary_needs_counts(monkeypatch):
    monkeypatch.setattr(summary, "_totals", None)
    with pytest.raises(UsageError, match="HPCDIST_DEBUG=summary"):
        hpcdist.communication_summary()

"""NCCL's path with a stand-in for cupy: plan, order of calls, unique id, agreement. No GPU and no NCCL take part."""

import itertools
import threading
import types

import cupy_stand_in
import numpy as np
import pytest
import torch
from made_up_hosts import group_on
from mpi4py import MPI

from hpcdist.collectives import calls
from hpcdist.collectives.gpu import cupy_door, nccl, nccl_setup
from hpcdist.collectives.gpu import hierarchical as gpu_hierarchical
from hpcdist.collectives.ops import OPS, SUM
from hpcdist.collectives.options import CommunicationImplementation as Implementation
from hpcdist.collectives.options import CommunicationOptions
from hpcdist.errors import CollectiveError, CollectiveTimeoutError, ConfigurationError
from hpcdist.gradients.reducer import Reducer
from hpcdist.plan.replicas import ReplicaPlan
from hpcdist.runtime.process import make_world

pytestmark = pytest.mark.mpi


@pytest.fixture
def cupy(comm, monkeypatch):
    return install(monkeypatch, comm)


def install(monkeypatch, comm, **options):
    modules = cupy_stand_in.make_cupy(**{"devices": (f"gpu-{comm.rank}",), "mpi": MPI, **options})
    return cupy_stand_in.install(monkeypatch, modules)


def values(rank, count):
    return np.arange(count) % 5 + rank + 1


def expected(op, size, count):
    rows = np.array([values(rank, count) for rank in range(size)])
    return {"sum": rows.sum, "min": rows.min, "max": rows.max, "product": rows.prod}[op](axis=0)


@pytest.mark.feature("collectives.nccl-all-reduce")
@pytest.mark.parametrize("op", nccl.OPS)
@pytest.mark.parametrize("dtype", [dtype for dtype in nccl.DTYPES if dtype != "bfloat16"])
def test_all_reduce(comm, cupy, make_group, dtype, op):
    group = make_group()
    for count in (0, 1, comm.size + 1, 1000):
        array = cupy.array(values(comm.rank, count).astype(dtype))
        nccl.all_reduce(array, group, OPS[op])
        assert array.host.tolist() == expected(op, comm.size, count).astype(dtype).tolist()


def test_any_shape(comm, cupy, make_group):
    group = make_group()
    for shape in ((), (3, 4)):
        array = cupy.array(np.full(shape, comm.rank + 1.0))
        nccl.all_reduce(array, group)
        assert (array.host == comm.size * (comm.size + 1) / 2).all()


def test_bfloat16_tensors(comm, cupy, make_group):
    bits = cupy_stand_in.bfloat16(values(comm.rank, 10))
    nccl.all_reduce(cupy_stand_in.CudaTensor(bits, "bfloat16"), make_group())
    assert cupy_stand_in.from_bfloat16(bits).tolist() == expected("sum", comm.size, 10).tolist()


@pytest.mark.feature("collectives.nccl-all-reduce")
@pytest.mark.parametrize("id_form", [bytes, tuple])
def test_one_communicator_and_one_unique_id(comm, monkeypatch, make_group, id_form):
    cupy = install(monkeypatch, comm, id_form=id_form)
    group = make_group()
    for _ in range(3):
        nccl.all_reduce(cupy.array(np.ones(3)), group)
    assert len(cupy.made) == 1
    size, unique_id, rank, device = cupy.made[0]
    assert (size, rank, device) == (comm.size, comm.rank, 0)
    assert set(comm.allgather(unique_id)) == {unique_id}


def test_the_communicator_is_made_at_first_use_on_the_buffers_device_and_freed_with_the_group(comm, monkeypatch):
    cupy = install(monkeypatch, comm, devices=(f"gpu-{comm.rank}-a", f"gpu-{comm.rank}-b"))
    group = group_on(comm.size, comm, make_world())
    assert cupy.made == []
    cupy.local.device = 1
    array = cupy.array(np.ones(3))
    cupy.local.device = 0
    nccl.all_reduce(array, group)
    assert (cupy.made[0][3], cupy.local.device) == (1, 0)
    with pytest.raises(CollectiveError, match=f"expected a buffer on device 1.*device 0 on rank {comm.rank}"):
        nccl.all_reduce(cupy.array(np.ones(3)), group)
    communicator = group.peek(("nccl", "all"))
    group.free()
    assert communicator._inner.log == ["allReduce", "destroy"]


@pytest.mark.parametrize("ranks_per_host", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "int64"])
def test_hierarchical(comm, cupy, make_group, monkeypatch, dtype, ranks_per_host):
    if comm.size % ranks_per_host:
        ranks_per_host = comm.size
    monkeypatch.setattr(cupy_door, "PIECE_BYTES", 64)
    group = make_group(ranks_per_host)
    for count in (0, 1, comm.size - 1, comm.size + 1, 1000):
        array = cupy.array(values(comm.rank, count).astype(dtype))
        gpu_hierarchical.all_reduce(array, group)
        assert array.host.tolist() == expected("sum", comm.size, count).astype(dtype).tolist()
    is_one_host = ranks_per_host == comm.size
    if is_one_host:
        calls = ["allReduce"]
    else:
        calls = ["reduceScatter", "allGather"]
    if is_one_host:
        which = "all"
    else:
        which = "node"
    log = group.peek(("nccl", which))._inner.log
    assert log == calls * (4 - (comm.size == 1))


def test_hierarchical_bfloat16(comm, cupy, make_group):
    bits = cupy_stand_in.bfloat16(values(comm.rank, 10))
    gpu_hierarchical.all_reduce(cupy_stand_in.CudaTensor(bits, "bfloat16"), make_group(1))
    assert cupy_stand_in.from_bfloat16(bits).tolist() == expected("sum", comm.size, 10).tolist()


@pytest.mark.feature("gpu.ordered-device-collectives", "complaints.nccl-beside-mpi")
def test_the_lane_gets_host_memory_and_this_ranks_part_only(comm, cupy, make_group):
    group = make_group(1)
    seen = []

    def lane(host):
        seen.append((type(host), host.size))
        group.lane_comm.Allreduce(MPI.IN_PLACE, host)

    array = cupy.array(values(comm.rank, 101).astype(np.float32))
    gpu_hierarchical.all_reduce(array, group, SUM, lane)
    assert array.host.tolist() == expected("sum", comm.size, 101).tolist()
    # parts of 16 bytes
    if comm.size > 1:
        expected_parts = [(np.ndarray, 104)]
    else:
        expected_parts = []
    assert seen == expected_parts


def test_one_group_has_a_communicator_for_all_and_one_for_the_host(comm, cupy, make_group):
    group = make_group(1)
    for algorithm in (nccl.all_reduce, gpu_hierarchical.all_reduce) * 2:
        array = cupy.array(values(comm.rank, 10).astype(np.float32))
        algorithm(array, group)
        assert array.host.tolist() == expected("sum", comm.size, 10).tolist()
    if comm.size > 1:
        sizes = [comm.size, 1]
    else:
        sizes = [1]
    assert [communicator[0] for communicator in cupy.made] == sizes


def test_a_peer_that_fails_in_the_host_is_reported_before_the_lanes_turn(comm, cupy, monkeypatch, make_group):
    group = make_group(1)
    gpu_hierarchical.all_reduce(cupy.array(np.ones(4)), group)
    if comm.size == 1:
        which = "all"
    else:
        which = "node"
    inner = group.peek(("nccl", which))._inner

    def failed():
        raise cupy_stand_in.NcclError("NCCL_ERROR_REMOTE: peer left")

    monkeypatch.setattr(inner, "check_async_error", failed)
    monkeypatch.setattr(inner, "abort", lambda: None, raising=False)
    endless(cupy, monkeypatch)
    with pytest.raises(CollectiveError, match="NCCL_ERROR_REMOTE"):
        gpu_hierarchical.all_reduce(cupy.array(np.ones(4)), group)


def test_uneven_hosts_are_refused_on_all_ranks(comm, cupy, make_group):
    if comm.size < 3:
        pytest.skip("two hosts with different numbers of ranks take 3 ranks")
    group = make_group(comm.size - 1)
    with pytest.raises(CollectiveError, match=f"same number of ranks on every host, got 1 to {comm.size - 1}"):
        gpu_hierarchical.all_reduce(cupy.array(np.ones(3)), group)


@pytest.mark.feature("collectives.nccl-all-reduce")
@pytest.mark.parametrize(
    ("implementation", "ranks_per_host", "nccl_calls"),
    [
        (None, None, {"allReduce"}),
        ("HIERARCHICAL", 1, {"reduceScatter", "allGather"}),
        ("MPI", None, set()),
    ],
)
def test_who_sums_device_buffers(comm, monkeypatch, make_group, implementation, ranks_per_host, nccl_calls):
    """AUTO is NCCL where all have it; other algorithms get a copy on the host."""
    cupy = install(monkeypatch, comm)
    group = make_group(ranks_per_host)
    array = cupy.array(values(comm.rank, 10).astype(np.float32))
    calls.reduce_buffer(array, SUM, CommunicationOptions(implementation=implementation), group)
    assert array.get().tolist() == expected("sum", comm.size, 10).tolist()
    if comm.size > 1:
        logs = [group.peek(("nccl", which)) for which in ("all", "node")]
        assert set(itertools.chain.from_iterable(log._inner.log for log in logs if log)) == nccl_calls


@pytest.mark.parametrize("implementation", [Implementation.AUTO, Implementation.HIERARCHICAL])
@pytest.mark.parametrize("dtype", ["int16", "uint16", "complex64", "complex128"])
def test_what_nccl_has_no_dtype_for_goes_through_the_host(comm, cupy, make_group, dtype, implementation):
    array = cupy.array(values(comm.rank, 10).astype(dtype))
    calls.reduce_buffer(array, SUM, CommunicationOptions(implementation=implementation), make_group())
    assert array.get().tolist() == expected("sum", comm.size, 10).tolist()
    assert cupy.made == []


def test_the_size_of_buckets_between_hosts_is_measured_by_mpi(comm, monkeypatch, make_group):
    """The probe is in host memory, which NCCL does not take."""
    install(monkeypatch, comm, devices=tuple(f"gpu-{rank}" for rank in range(comm.size)))
    reducer = Reducer(make_group(1), CommunicationOptions(implementation=Implementation.NCCL))
    limits = reducer.begin_buckets(1 << 26)
    assert len(set(comm.allgather(limits))) == 1


def test_truth_values_on_a_device_are_refused(comm, cupy, make_group):
    with pytest.raises(CollectiveError, match="numbers.*dtype"):
        calls.reduce_buffer(cupy.array(np.ones(3, bool)), SUM, CommunicationOptions(), make_group())


def test_without_a_gpu_each_auto_goes_through_the_host(comm, monkeypatch, make_group):
    if comm.size == 1:
        pytest.skip("one rank shares with nobody")
    cupy = install(monkeypatch, comm, devices=(f"gpu-{max(0, comm.rank - 1)}",))
    group = make_group()
    monkeypatch.delenv("NCCL_MULTI_RANK_GPU_ENABLE", raising=False)
    array = cupy.array(values(comm.rank, 10).astype(np.float32))
    calls.reduce_buffer(array, SUM, CommunicationOptions(implementation=Implementation.AUTO), group)
    assert array.get().tolist() == expected("sum", comm.size, 10).tolist()
    assert cupy.made == []


@pytest.mark.feature("gpu.device-binding", "complaints.gpu-binding")
def test_two_ranks_on_one_gpu(comm, monkeypatch, make_group):
    """Rank 1 is put on rank 0's GPU: refused everywhere, unless NCCL was told."""
    cupy = install(monkeypatch, comm, devices=(f"gpu-{max(0, comm.rank - 1)}",))
    group = make_group()
    monkeypatch.delenv("NCCL_MULTI_RANK_GPU_ENABLE", raising=False)
    if comm.size > 1:
        with pytest.raises(ConfigurationError, match="0.*1.*GPU.*0.*UUID.*6770752d30") as caught:
            nccl.all_reduce(cupy.array(np.ones(3)), group)
        assert len(set(comm.allgather(str(caught.value)))) == 1
        assert cupy.made == []
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    array = cupy.array(np.ones(3))
    nccl.all_reduce(array, group)
    assert array.host.tolist() == [comm.size] * 3


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"has_nccl": False}, "does not find libnccl"),
        ({"devices": ()}, "expected a GPU, got none"),
    ],
)
def test_what_one_rank_lacks_is_said_by_all(comm, monkeypatch, make_group, options, text):
    cupy = install(monkeypatch, comm, **(options if comm.rank == comm.size - 1 else {}))
    with pytest.raises(ConfigurationError, match=text):
        nccl.all_reduce(cupy.array(np.ones(3)), make_group())


@pytest.mark.feature("gpu.device-binding", "complaints.gpu-binding")
def test_devices_are_chosen_by_local_rank(comm, monkeypatch, make_group):
    group = make_group()
    install(monkeypatch, comm, devices=[f"gpu-{index}" for index in range(comm.size)])
    assert nccl_setup.choose_device(group) == comm.rank
    install(monkeypatch, comm, devices=(f"gpu-{comm.rank}",))
    assert nccl_setup.choose_device(group) == 0
    if comm.rank == comm.size - 1:
        devices = None
    else:
        devices = ("gpu",)
    install(monkeypatch, comm, devices=devices)
    with pytest.raises(ConfigurationError, match="GPU.*driver"):
        nccl_setup.choose_device(group)


@pytest.mark.feature("complaints.nccl-beside-mpi")
def test_a_rank_that_nccl_fails_on_frees_those_that_wait_for_it(comm, cupy, monkeypatch, make_group):
    released = threading.Event()

    def join(size, unique_id, rank):
        if rank == size - 1:
            raise cupy_stand_in.NcclError("NCCL_ERROR_SYSTEM_ERROR: no room")
        released.wait(30)

    monkeypatch.setattr(cupy.cuda.nccl, "NcclCommunicator", join)
    with pytest.raises(CollectiveError, match=f"got NCCL_ERROR_SYSTEM_ERROR: no room on rank {comm.size - 1}"):
        nccl.all_reduce(cupy.array(np.ones(3)), make_group())
    assert not released.is_set()
    released.set()


def test_a_rank_that_never_arrives_is_named_within_the_limit(comm, cupy, monkeypatch, make_group):
    released = threading.Event()
    monkeypatch.setattr(cupy.cuda.nccl, "NcclCommunicator", lambda *arguments: released.wait(30))
    group = make_group()
    group.timeout_s = 0.2
    with pytest.raises(CollectiveTimeoutError, match=r"rank.*within.*0.2"):
        nccl.all_reduce(cupy.array(np.ones(3)), group)
    released.set()


def test_a_unique_id_that_cannot_be_made_is_said_by_all(comm, cupy, monkeypatch, make_group):
    def fail():
        raise cupy_stand_in.NcclError("NCCL_ERROR_SYSTEM_ERROR: no interface")

    monkeypatch.setattr(cupy.cuda.nccl, "get_unique_id", fail)
    with pytest.raises(CollectiveError, match="interface.*rank.*0"):
        nccl.all_reduce(cupy.array(np.ones(3)), make_group())


def endless(cupy, monkeypatch):
    """Make a stream that never gets done, as when a peer has gone."""
    monkeypatch.setattr(cupy, "stream", types.SimpleNamespace(done=False, ptr=0, queue=[]))


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (cupy_stand_in.NcclError("NCCL_ERROR_REMOTE: peer left"), "NCCL_ERROR_REMOTE: peer left"),
        (KeyError(6), "NCCL's error 6"),
    ],
    ids=["cupy 13.4", "cupy 13.3"],
)
def test_a_peer_that_fails_is_reported(comm, cupy, monkeypatch, make_group, error, text):
    group = make_group()
    communicator = nccl.communicator_of(group, group.comm, 0)
    inner = communicator._inner
    aborted = []

    def failed():
        raise error

    monkeypatch.setattr(inner, "check_async_error", failed)
    monkeypatch.setattr(inner, "abort", lambda: aborted.append(True), raising=False)
    endless(cupy, monkeypatch)
    with pytest.raises(CollectiveError, match=f"got {text} on rank {comm.rank}"):
        communicator.wait()
    assert aborted == [True]


@pytest.mark.feature("gpu.ordered-device-collectives", "complaints.nccl-beside-mpi")
def test_waiting_for_nccl_is_bounded(comm, cupy, monkeypatch, make_group):
    group = make_group()
    group.timeout_s = 0.2
    communicator = nccl.communicator_of(group, group.comm, 0)
    monkeypatch.setattr(communicator._inner, "abort", lambda: None, raising=False)
    endless(cupy, monkeypatch)
    with pytest.raises(CollectiveTimeoutError, match=f"within 0.2 s.*rank {comm.rank}"):
        communicator.wait()


def test_parts_must_add_up(comm, cupy, make_group):
    group = make_group()
    communicator = nccl.communicator_of(group, group.comm, 0)
    whole, part = (cupy_door.device_array(cupy.array(np.ones(n))) for n in (2 * comm.size, 3))
    with pytest.raises(CollectiveError, match=f"expected {comm.size} parts of 3"):
        communicator.reduce_scatter(whole, part)
    with pytest.raises(CollectiveError, match=f"expected {comm.size} parts of 3"):
        communicator.all_gather(part, whole)


@pytest.mark.parametrize(
    ("dtype", "op", "text"),
    [("float32", "mean", "expected an op of sum"), ("bool", "sum", "got bool"), ("complex64", "sum", "got complex64")],
)
def test_what_nccl_cannot_carry_is_refused_before_anything_is_sent(comm, cupy, make_group, dtype, op, text):
    with pytest.raises(CollectiveError, match=text):
        nccl.all_reduce(cupy.array(np.ones(3, dtype)), make_group(), OPS[op])
    assert cupy.made == []


def gpu_tensor(host):
    return cupy_stand_in.CudaTensor(host, host.dtype.name)


@pytest.mark.parametrize("implementation", [Implementation.NCCL, Implementation.HIERARCHICAL])
@pytest.mark.parametrize("ranks_per_host", [None, 1], ids=["one host", "a host each"])
def test_buckets_are_summed_behind_their_gradients_and_beside_later_ones(
    comm, cupy, make_group, ranks_per_host, implementation
):
    """On a stream of the thread's own: what torch queues after a bucket is started runs meanwhile."""
    group = make_group(ranks_per_host or comm.size)
    options = CommunicationOptions(implementation=implementation)
    reducer = Reducer(group, options, device=torch.device("cuda:0"))
    assert reducer.route.is_on_device
    limits = reducer.begin_buckets(64 << 20)
    order = []
    if ranks_per_host is None:
        assert (limits.bucket_bytes, limits.last_bytes) == (25 << 20, 1 << 20)
    handles = []
    buckets = [np.zeros(100, np.float32) for _ in range(2)]

    def gradient(number):
        order.append(number)
        buckets[number][:] = comm.rank + number

    for number, bucket in enumerate(buckets):
        gate = threading.Event()
        reducer._thread.submit(gate.wait)  # the thread comes late
        cupy.producer.queue.append(lambda number=number: gradient(number))
        handles.append(reducer.start(gpu_tensor(bucket), number))
        cupy.producer.queue.append(lambda number=number: order.append(f"after {number}"))
        gate.set()
        handles[-1].wait()
        assert bucket.tolist() == [sum(rank + number for rank in range(comm.size))] * 100
        assert order[-1] == number, "what came later has not run, and was not waited for"
    assert cupy.stream.queue == [], "nothing is queued on the stream that torch uses"
    by_lanes = implementation is Implementation.HIERARCHICAL and ranks_per_host == 1 and comm.size > 1
    if by_lanes:
        which = "node"
    else:
        which = "all"
    log = reducer._thread.group.peek(("nccl", which))._inner.log
    if by_lanes:
        nccl_calls = ["reduceScatter", "allGather"]
    else:
        nccl_calls = ["allReduce"]
    assert log == nccl_calls * 2


@pytest.mark.parametrize(
    ("options", "last", "chosen"),
    [
        ({}, {}, Implementation.NCCL),
        ({"is_ordered": True}, {}, Implementation.SHARED_MEMORY),
        ({}, {"has_nccl": False}, Implementation.SHARED_MEMORY),
        ({}, {"devices": ("gpu-0",)}, Implementation.SHARED_MEMORY),
        ({}, {"device": "cpu"}, Implementation.SHARED_MEMORY),
    ],
    ids=["all", "ordered", "without NCCL", "one GPU for two ranks", "models on the host"],
)
def test_what_auto_takes_for_gradients(comm, monkeypatch, make_group, options, last, chosen):
    """`last` is what the last rank has."""
    if "devices" in last and comm.size == 1:
        pytest.skip("one rank shares its GPU with nobody")
    overrides = last if comm.rank == comm.size - 1 else {}
    device = torch.device(overrides.get("device", "cuda:0"))
    install(monkeypatch, comm, **{name: value for name, value in overrides.items() if name != "device"})
    reducer = Reducer(make_group(), CommunicationOptions(**options), device=device)
    assert (reducer.route.algorithm, reducer.route.is_on_device) == (chosen, chosen is Implementation.NCCL)
    are_all_on_gpus = last.get("device") != "cpu"
    # sums by others are staged
    if are_all_on_gpus:
        expected_device = device
    else:
        expected_device = torch.device("cpu")
    assert reducer.device == expected_device


def test_several_replicas_of_a_rank_are_refused_where_nccl_is_asked_for(comm, cupy, make_group):
    options = CommunicationOptions(implementation=Implementation.NCCL)
    with pytest.raises(ConfigurationError, match=f"expected one replica for each of the {comm.size} ranks"):
        Reducer(make_group(), options, ReplicaPlan(2 * comm.size, comm.size), torch.device("cuda:0"))


@pytest.mark.parametrize("dtype", ["int32", "uint8"])
def test_whole_numbers_on_a_device_are_not_scaled(comm, cupy, dtype):
    array = cupy.array(np.ones(3, dtype))
    with pytest.raises(CollectiveError, match=f"expected floats to be scaled, got {dtype}; convert them"):
        calls.all_reduce(array, prescale=0.5)
    assert array.host.tolist() == [1, 1, 1]


@pytest.mark.parametrize("kind", ["cupy", "torch"])
def test_calls_in_the_background_wait_for_what_made_their_buffers(comm, cupy, monkeypatch, kind):
    """Streams of the thread wait for no stream of this one."""
    host = np.zeros(8, np.float32)
    if kind == "cupy":
        buffer = cupy.array(host)
    else:
        buffer = gpu_tensor(host)
    memory = buffer.host if kind == "cupy" else host
    producer = cupy.stream if kind == "cupy" else cupy.producer
    producer.queue.append(lambda: memory.fill(comm.rank + 1))
    seen = []
    call = cupy_door.behind_producers([np.ones(3), buffer], lambda: seen.append(memory.tolist()))
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert seen == [[comm.rank + 1.0] * 8]


def test_calls_on_host_buffers_are_made_as_they_are():
    def call():
        return 3

    assert cupy_door.behind_producers([np.ones(3), torch.ones(3)], call) is call


def test_ranks_that_were_given_one_gpu_do_not_use_nccl(comm, monkeypatch, make_group):
    """By their numbers on the host each would have its own."""
    if comm.size == 1:
        pytest.skip("one rank shares its GPU with nobody")
    install(monkeypatch, comm, devices=tuple(f"gpu-{index}" for index in range(comm.size)))
    reducer = Reducer(make_group(), CommunicationOptions(), device=torch.device("cuda:0"))
    assert not reducer.route.is_on_device

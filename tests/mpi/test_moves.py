"""Rows and objects that move from rank to rank, barriers, and what strategies know of their ranks."""

import contextlib
import gc
import itertools
import time

import numpy as np
import pytest
import torch

import hpcdist
from hpcdist.collectives.group import group_of
from hpcdist.errors import CollectiveError, CollectiveTimeoutError
from hpcdist.runtime.mpi import MPI

pytestmark = [pytest.mark.mpi, pytest.mark.core]

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.bool]


@pytest.mark.feature("collectives.other-collectives")
@pytest.mark.parametrize("n_rows", [0, 1, 7])
@pytest.mark.parametrize("root", [0, -1])
def test_scatter_divides_roots_rows(comm, n_rows, root):
    whole = np.arange(3 * n_rows, dtype=np.int32).reshape(n_rows, 3)
    if comm.rank == root % comm.size:
        rows = whole
    else:
        rows = "not looked at"
    local_rows = hpcdist.scatter(rows, root % comm.size)
    assert local_rows.dtype == np.int32
    parts = comm.allgather(local_rows)
    assert np.array_equal(np.concatenate(parts), whole)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_scatter_of_a_tensor_gives_tensors(comm, dtype):
    whole = torch.arange(2 * comm.size).reshape(comm.size, 2).to(dtype).requires_grad_(dtype.is_floating_point)
    if comm.rank == 0:
        rows = whole
    else:
        rows = None
    local_rows = hpcdist.scatter(rows)
    assert local_rows.dtype is dtype
    assert not local_rows.requires_grad
    assert torch.equal(local_rows, whole[comm.rank : comm.rank + 1])


def test_scatter_takes_rows(comm):
    with pytest.raises(CollectiveError, match="scatter.*rows.*float"):
        hpcdist.scatter(1.0)
    with pytest.raises(CollectiveError, match="scatter.*U1"):
        hpcdist.scatter(["a"])
    with pytest.raises(CollectiveError, match="scatter.*numbers.*setting"):
        hpcdist.scatter([[1.0], [1.0, 2.0]])


@pytest.mark.feature("collectives.other-collectives")
@pytest.mark.parametrize("make", [np.asarray, torch.tensor])
def test_alltoall_sends_rows_to_each_rank(comm, make):
    counts = [(comm.rank + to) % 3 for to in range(comm.size)]
    targets = np.repeat(np.arange(comm.size), counts)
    rows = make(np.stack([np.full_like(targets, comm.rank), targets], axis=1))
    came, from_each = hpcdist.alltoall(rows, counts)
    assert type(came) is type(rows)
    assert from_each == [(source + comm.rank) % 3 for source in range(comm.size)]
    expected = []
    for source, count in enumerate(from_each):
        expected += [[source, comm.rank]] * count
    assert came.tolist() == expected


def test_alltoall_divides_evenly_by_default(comm):
    came, from_each = hpcdist.alltoall(torch.full((2 * comm.size,), float(comm.rank), dtype=torch.bfloat16))
    assert came.dtype is torch.bfloat16
    assert came.tolist() == sorted([*range(comm.size)] * 2)
    assert from_each == [2] * comm.size


def test_alltoall_that_does_not_fit_is_refused_on_all_ranks(comm):
    counts = [1] * comm.size if comm.rank else [2] * comm.size
    with pytest.raises(CollectiveError, match=r"alltoall.*counts.*ranks"):
        hpcdist.alltoall(np.zeros(comm.size), counts)
    if comm.size > 1:
        dtype = "f8"
        if comm.rank:
            dtype = "f4"
        with pytest.raises(CollectiveError, match="alltoall.*float.*shape"):
            hpcdist.alltoall(np.zeros(comm.size, dtype))


@pytest.mark.feature("collectives.other-collectives")
@pytest.mark.parametrize("dtype", DTYPES[:-1])
@pytest.mark.parametrize("is_async", [False, True])
def test_reduce_scatter_of_a_tensor_gives_a_tensor(comm, dtype, is_async):
    summand = torch.arange(2 * comm.size + 1).to(dtype)
    if is_async:
        local_part = hpcdist.reduce_scatter_async(summand).wait()
    else:
        local_part = hpcdist.reduce_scatter(summand)
    assert local_part.dtype is dtype
    assert list(itertools.chain.from_iterable(comm.allgather(local_part.tolist()))) == (summand * comm.size).tolist()
    if dtype.is_floating_point:
        assert hpcdist.reduce_scatter(summand, "mean").dtype is dtype


def test_reduce_scatter_takes_numbers():
    with pytest.raises(CollectiveError, match="reduce_scatter.*rows.*numbers"):
        hpcdist.reduce_scatter(np.ones(3, bool))
    with pytest.raises(CollectiveError, match="reduce_scatter.*dense.*tensor"):
        hpcdist.reduce_scatter(torch.eye(2).to_sparse())


@pytest.mark.feature("collectives.async-handles")
def test_moves_in_the_background_return_their_results(comm):
    buffer = np.full(2, comm.rank)
    handles = [
        hpcdist.broadcast_async(buffer, comm.size - 1),
        hpcdist.all_gather_async(torch.full((1,), comm.rank)),
        hpcdist.alltoall_async(np.arange(comm.size)),
        hpcdist.scatter_async(np.arange(comm.size)),
        hpcdist.grouped_all_reduce_async(group := [np.ones(2), np.ones(3, np.float32)]),
        hpcdist.barrier_async(),
    ]
    hpcdist.all_reduce(np.ones(5000))  # of the main thread, meanwhile
    assert handles[0].wait() is None
    assert buffer.tolist() == [comm.size - 1] * 2
    assert handles[1].wait().tolist() == list(range(comm.size))
    assert handles[2].wait()[0].tolist() == [comm.rank] * comm.size
    assert handles[3].wait().tolist() == [comm.rank]
    assert [handle.wait() for handle in handles[4:]] == [None, None]
    assert [array.tolist() for array in group] == [[comm.size] * 2, [comm.size] * 3]


def test_all_gather_keeps_half_precision(comm):
    value = torch.full((1, 2), comm.rank + 0.5, dtype=torch.bfloat16, requires_grad=True)
    joined = hpcdist.all_gather(value * 2)
    assert joined.dtype is torch.bfloat16
    assert joined.requires_grad
    assert joined.tolist() == [[2 * rank + 1.0] * 2 for rank in range(comm.size)]
    assert hpcdist.all_gather(np.full((1,), comm.rank, np.float16)).dtype == np.float16


@pytest.mark.feature("collectives.other-collectives", "training.broadcast-of-initial-state")
def test_objects_go_everywhere(comm):
    last = comm.size - 1
    assert hpcdist.broadcast_object({"from": comm.rank}, last) == {"from": last}
    assert hpcdist.all_gather_objects(("rank", comm.rank)) == [("rank", rank) for rank in range(comm.size)]
    assert hpcdist.scatter_objects(list(map(str, range(comm.size))), last) == str(comm.rank)
    came = hpcdist.alltoall_objects([(comm.rank, to) for to in range(comm.size)])
    assert came == [(source, comm.rank) for source in range(comm.size)]


def test_objects_for_another_number_of_ranks_are_refused_on_all(comm):
    match = f"expected an object for each of {comm.size} ranks, got"
    items = None
    if comm.rank == 0:
        items = [1] * (comm.size + 1)
    with pytest.raises(CollectiveError, match=match):
        hpcdist.scatter_objects(items)
    with pytest.raises(CollectiveError, match=match):
        hpcdist.alltoall_objects([1] * (comm.size + (comm.rank == 0)))


@pytest.mark.feature("training.broadcast-of-initial-state")
def test_an_optimizers_state_is_taken_from_the_chief(comm):
    strategy = hpcdist.MultiWorkerMirroredStrategy()
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (comm.rank + 1), momentum=0.9)
    if comm.rank == 0:  # as one that it has read from a file
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    optimizer.load_state_dict(strategy.broadcast(optimizer.state_dict()))
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert [optimizer.state[p]["momentum_buffer"].numel() for p in model.parameters()] == [2, 1]


@pytest.mark.feature("input.scatter-dataset")
@pytest.mark.parametrize("is_equal", [True, False])
@pytest.mark.parametrize("shuffle", [True, False])
def test_a_dataset_that_only_root_has_is_dealt_out(comm, shuffle, is_equal):
    n_items = 2 * comm.size + 1
    if comm.rank == 0:
        rows = torch.utils.data.TensorDataset(torch.arange(n_items))
    else:
        rows = None
    local_share = hpcdist.scatter_dataset(rows, shuffle=shuffle, seed=3, force_equal_length=is_equal)
    shares = comm.allgather([int(row) for (row,) in local_share])
    assert set(itertools.chain.from_iterable(shares)) == set(range(n_items))
    lengths = list(map(len, shares))
    assert (len(set(lengths)) == 1) if is_equal else sum(lengths) == n_items
    joined = list(itertools.chain.from_iterable(shares))[:n_items]
    assert (joined == list(range(n_items))) is not (shuffle and n_items > 1)


@pytest.mark.feature("input.scatter-dataset")
def test_a_dataset_without_items_is_refused_on_all_ranks():
    with pytest.raises(CollectiveError, match="scatter_dataset.*items.*number"):
        hpcdist.scatter_dataset([])


# -- several buffers, scales -----------------------------------------------------------------------------------------


@pytest.mark.feature("collectives.grouped-collectives")
def test_several_buffers_are_reduced_as_one(comm):
    arrays = [np.full((2, 3), comm.rank, np.float32), np.full(4, 2.0), np.zeros((0, 2), np.float32)]
    tensors = [torch.full((3,), float(comm.rank)), torch.ones(2, dtype=torch.bfloat16)]
    journal = group_of().journal
    before = journal.n_entered
    hpcdist.grouped_all_reduce([*arrays, *tensors])
    total = sum(range(comm.size))
    assert [set(array.reshape(-1).tolist()) for array in arrays] == [{total}, {2.0 * comm.size}, set()]
    assert tensors[0].tolist() == [total] * 3
    assert tensors[1].tolist() == [comm.size] * 2
    assert journal.n_entered == before + 2  # float32 and float64


@pytest.mark.feature("collectives.grouped-collectives")
def test_nothing_of_a_group_is_sent_when_one_buffer_does_not_fit(comm):
    buffers = [np.ones(3), np.array(["text"])]
    with pytest.raises(CollectiveError, match="expected numbers"):
        hpcdist.grouped_all_reduce(buffers)
    assert buffers[0].tolist() == [1.0] * 3


@pytest.mark.feature("collectives.scaling-before-and-after")
@pytest.mark.parametrize("make", [lambda: np.full(3, 2.0), lambda: torch.full((3,), 2.0, dtype=torch.float16)])
def test_values_are_scaled_before_and_after(comm, make):
    buffers = [make() for _ in range(3)]
    hpcdist.all_reduce(buffers[0], prescale=0.5, postscale=8.0)
    hpcdist.all_reduce_async(buffers[1], prescale=0.5, postscale=8.0).wait()
    hpcdist.grouped_all_reduce(buffers[2:], prescale=0.5, postscale=8.0)
    assert [buffer.tolist() for buffer in buffers] == [[8.0 * comm.size] * 3] * 3


@pytest.mark.feature("collectives.scaling-before-and-after")
def test_what_is_scaled_down_afterwards_does_not_overflow_half_precision(comm):
    buffer = torch.full((2,), 60000.0, dtype=torch.float16)
    hpcdist.all_reduce(buffer, postscale=1 / comm.size)
    assert buffer.tolist() == [60000.0] * 2


def test_integers_are_not_scaled():
    with pytest.raises(CollectiveError, match="floats.*scaled.*int64"):
        hpcdist.all_reduce(np.ones(2, np.int64), postscale=0.5)


# -- barriers --------------------------------------------------------------------------------------------------------


@pytest.mark.feature("collectives.other-collectives")
def test_a_barrier_waits_for_all(comm):
    began = comm.allreduce(time.monotonic()) / comm.size
    time.sleep(0.2 * (comm.rank == comm.size - 1))
    hpcdist.barrier()
    hpcdist.monitored_barrier(30)
    assert time.monotonic() - began > 0.15


@pytest.mark.feature("debugging.monitored-barrier")
@pytest.mark.parametrize("absent", [0, -1])
def test_a_monitored_barrier_names_who_is_absent(comm, absent):
    absent %= comm.size
    if comm.size == 1:
        hpcdist.monitored_barrier(0.1)
        return
    began = time.monotonic()
    named = [0] if absent == 0 else [absent]
    if comm.rank != absent:
        with pytest.raises(CollectiveTimeoutError, match=f"got none of rank {named[0]} on"):
            hpcdist.monitored_barrier(0.3)
        assert time.monotonic() - began < 20
    comm.Barrier()
    if comm.rank == absent:  # it comes later: the others have gone
        if absent == 0:  # it finds their messages
            hpcdist.monitored_barrier(0.3)
        else:
            with pytest.raises(CollectiveTimeoutError, match=f"got none of rank {absent} on"):
                hpcdist.monitored_barrier(0.3)
    comm.Barrier()
    hpcdist.monitored_barrier(30)  # messages of the earlier one are left alone


def test_a_rank_whose_time_is_over_may_be_ahead(comm):
    """Its next barrier is met by the next barrier of the others, although its messages come before."""
    if comm.size == 1:
        pytest.skip("a barrier needs another rank")
    comm.Barrier()
    if comm.rank == 0:
        time.sleep(1.0)
        with contextlib.suppress(CollectiveTimeoutError):
            hpcdist.monitored_barrier(0.3)
    else:
        with pytest.raises(CollectiveTimeoutError):
            hpcdist.monitored_barrier(0.1)
    hpcdist.monitored_barrier(20)


def test_a_late_rank_finds_messages_of_the_next_barrier(comm):
    """Rank 0 comes to its first barrier when the others, who gave up, wait in the second one."""
    if comm.size == 1:
        pytest.skip("a barrier needs another rank")
    comm.Barrier()
    if comm.rank == 0:
        for rank in range(1, comm.size):
            comm.recv(source=rank)
        time.sleep(0.2)  # their messages of the second barrier are on their way
        with contextlib.suppress(CollectiveTimeoutError):
            hpcdist.monitored_barrier(0.1)
    else:
        with pytest.raises(CollectiveTimeoutError):
            hpcdist.monitored_barrier(0.1)
        comm.send(None, 0)
    hpcdist.monitored_barrier(20)


@pytest.mark.feature("complaints.long-work-on-one-rank")
@pytest.mark.parametrize("per_host", [False, True])
def test_rank_zero_goes_first(comm, per_host):
    times = []
    with hpcdist.rank_zero_first(per_host=per_host):
        time.sleep(0.1 * (comm.rank == 0))
        times.append(time.monotonic())
    all_times = comm.allgather(times[0])
    assert all(later_time > all_times[0] for later_time in all_times[1:])


def test_an_error_of_the_first_rank_is_known_to_all(comm):
    def fail_at_first():
        with hpcdist.rank_zero_first():
            assert comm.rank == 0
            raise ZeroDivisionError

    if comm.rank == 0:
        error_type = ZeroDivisionError
    else:
        error_type = CollectiveError
    with pytest.raises(error_type):
        fail_at_first()


def test_a_block_that_ends_too_late_writes_to_no_memory_of_ranks_that_went_on(comm):
    """MPI completes their wait when the first rank comes: by then the memory may be that of other arrays."""

    # rank 0 waits until the others have given up, which may take long on a busy machine
    limit_s = 30 if comm.rank == 0 else 0.1

    def wait_too_briefly():
        with hpcdist.rank_zero_first(timeout_s=limit_s):
            for rank in range(1, comm.size):
                comm.recv(source=rank)

    later_arrays = []
    if comm.rank == 0:
        wait_too_briefly()
    else:
        with pytest.raises(CollectiveTimeoutError):
            wait_too_briefly()
        gc.collect()
        later_arrays = [np.array([-7]) for _ in range(100)]
        comm.send(None, 0)
    hpcdist.barrier()
    assert [int(array[0]) for array in later_arrays] == [-7] * len(later_arrays)


def test_a_wait_that_is_over_keeps_the_arrays_of_its_reduction(comm, monkeypatch):
    """mpi4py's request of a reduction does not hold them, and MPI writes to them when the last rank comes."""
    group = group_of()
    if comm.rank > 0:
        monkeypatch.setattr(group, "timeout_s", 0.1)
        monkeypatch.setattr("hpcdist.collectives.group.LATE_S", 0.0)
    else:
        for rank in range(1, comm.size):
            comm.recv(source=rank)

    def reduce():
        total = np.full(1000, comm.rank)
        group.wait([group.comm.Iallreduce(MPI.IN_PLACE, total, MPI.SUM)], buffers=[total])
        return total

    later_arrays = []
    if comm.rank == 0:
        assert set(reduce()) == {sum(range(comm.size))}
    else:
        with pytest.raises(CollectiveTimeoutError):
            reduce()
        gc.collect()
        later_arrays = [np.full(1000, -7) for _ in range(100)]
        comm.send(None, 0)
    hpcdist.barrier()
    assert all((array == -7).all() for array in later_arrays)


@pytest.mark.feature("launch.ranks-within-and-between-hosts")
def test_strategies_know_their_ranks(comm):
    strategy = hpcdist.MultiWorkerMirroredStrategy()
    assert (strategy.rank, strategy.size) == (comm.rank, comm.size)
    assert (strategy.local_rank, strategy.local_size) == (comm.rank, comm.size)
    assert (strategy.host, strategy.n_hosts) == (0, 1)
    assert strategy.device == torch.device("cpu")
    assert strategy.broadcast(("from", comm.rank)) == ("from", 0)
    strategy.barrier()
    strategy.barrier(timeout_s=30)
    with strategy.rank_zero_first():
        pass


@pytest.mark.feature("launch.ranks-within-and-between-hosts")
def test_ranks_of_several_hosts(comm, over_hosts):
    over_hosts("1 each")
    strategy = hpcdist.MultiWorkerMirroredStrategy()
    assert (strategy.local_rank, strategy.local_size) == (0, 1)
    assert (strategy.host, strategy.n_hosts) == (comm.rank, comm.size)


def test_without_a_strategy_there_is_one_rank():
    strategy = hpcdist.get_strategy()
    assert (strategy.rank, strategy.size, strategy.local_rank, strategy.local_size) == (0, 1, 0, 1)
    assert (strategy.host, strategy.n_hosts, strategy.broadcast(3)) == (0, 1, 3)
    strategy.barrier()
    with strategy.rank_zero_first():
        pass


# -- an algorithm as in tf.distribute ----------------------------------------------------------------------------------


class SumInOrder(hpcdist.CrossDeviceOps):
    """Adds all ranks' values from the last to the first, and notes what it was given."""

    def __init__(self):
        self.n_values = set()

    def reduce_implementation(self, reduce_op, per_replica_value, destinations, options):
        assert reduce_op is hpcdist.ReduceOp.SUM
        self.n_values.add(len(per_replica_value.values))
        return sum(reversed(per_replica_value.values))


@pytest.mark.feature("collectives.cross-device-ops")
@pytest.mark.parametrize("num_replicas", [None, 4])
def test_gradients_are_summed_by_a_subclass_of_cross_device_ops(comm, num_replicas):
    ops = SumInOrder()
    strategy = hpcdist.MultiWorkerMirroredStrategy(num_replicas=num_replicas, gradient_op="sum", cross_device_ops=ops)
    with strategy.scope():
        model = torch.nn.Linear(3, 2)

    def step():
        model(torch.ones(1, 3)).sum().backward()
        return model.weight.grad.sum()

    total = strategy.run(step)
    assert list(map(float, strategy.experimental_local_results(total))) == pytest.approx(
        [6.0 * strategy.num_replicas_in_sync] * len(strategy.own_replicas)
    )
    assert ops.n_values == ({comm.size} if comm.size > 1 else ops.n_values)
    buffer = np.ones(3)
    hpcdist.all_reduce(buffer, implementation=ops)
    assert buffer.tolist() == [comm.size] * 3


@pytest.mark.feature("collectives.cross-device-ops")
def test_a_subclass_of_cross_device_ops_returns_as_many_elements(comm):
    class Short(hpcdist.CrossDeviceOps):
        def reduce_implementation(self, reduce_op, per_replica_value, destinations, options):
            return per_replica_value.values[0][:1]

    with pytest.raises(CollectiveError, match="reduce_implementation.*3"):
        hpcdist.all_reduce(np.ones(3), implementation=Short())
    with pytest.raises(CollectiveError, match="expected a sum"):
        hpcdist.all_reduce(np.ones(3), "max", implementation=Short())
    with pytest.raises(NotImplementedError, match="reduce_implementation.*all_reduce"):
        hpcdist.all_reduce(np.ones(3), implementation=hpcdist.CrossDeviceOps())


@pytest.mark.feature("evaluation.multi-node-evaluator")
def test_an_evaluation_has_one_result_on_all_ranks(comm):
    evaluate = hpcdist.create_multi_node_evaluator(lambda offset: {"loss": comm.rank + offset, "accuracy": 0.5})
    assert evaluate(1) == {"loss": (comm.size - 1) / 2 + 1, "accuracy": 0.5}
    total = hpcdist.create_multi_node_evaluator(lambda: {comm.rank}, lambda results: set().union(*results))
    assert total() == set(range(comm.size))


@pytest.mark.parametrize("result", [lambda rank: {f"loss of {rank}": 1.0}, lambda rank: 1.0])
def test_an_evaluation_without_an_aggregate_takes_dicts(comm, result):
    evaluate = hpcdist.create_multi_node_evaluator(lambda: result(comm.rank))
    if comm.size > 1 or not isinstance(result(0), dict):
        with pytest.raises(CollectiveError, match="dicts.*ranks"):
            evaluate()


# -- gradients ---------------------------------------------------------------------------------------------------------


@pytest.mark.feature("collectives.other-collectives")
def test_gradients_flow_through_an_all_gather(comm):
    local_rows = torch.arange(6.0).reshape(3, 2)[: comm.rank + 1].clone().requires_grad_()
    joined = hpcdist.all_gather(local_rows * 2)
    weights = torch.arange(float(joined.numel())).reshape(joined.shape) * (comm.rank + 1)
    (joined * weights).sum().backward()
    total = sum(rank + 1 for rank in range(comm.size))
    first = sum(rank + 1 for rank in range(comm.rank))
    expected = 2 * total * torch.arange(float(joined.numel())).reshape(joined.shape)[first : first + len(local_rows)]
    assert torch.equal(local_rows.grad, expected)
    with torch.no_grad():
        assert not hpcdist.all_gather(local_rows * 2).requires_grad


@pytest.mark.parametrize(
    "call",
    [
        hpcdist.scatter,
        hpcdist.scatter_async,
        hpcdist.alltoall,
        hpcdist.alltoall_async,
        hpcdist.reduce_scatter,
        hpcdist.reduce_scatter_async,
        hpcdist.all_gather_async,
    ],
    ids=lambda call: call.__name__,
)
def test_a_tensor_with_a_graph_is_refused_where_no_gradient_flows(comm, call):
    rows = torch.ones(comm.size, 2, requires_grad=True) * 2
    waits = call.__name__.endswith("_async")

    def call_and_wait():
        result = call(rows)
        if waits:
            result.wait()

    with pytest.raises(CollectiveError, match=f"{call.__name__}: expected values without a graph"):
        call_and_wait()
    with torch.no_grad():
        results = [call(rows)]
    results.append(call(rows.detach()))
    for result in results if waits else []:
        result.wait()


# -- calls that do not fit together ------------------------------------------------------------------------------------


@pytest.mark.feature("debugging.mismatch-detection")
@pytest.mark.parametrize("is_tensor", [False, True], ids=["array", "tensor"])
@pytest.mark.parametrize(
    "name",
    [
        "broadcast, dtype",
        "broadcast, shape",
        "broadcast, size",
        "broadcast, root",
        "scatter, root",
        "alltoall, dtype",
        "alltoall, shape",
        "reduce_scatter, dtype",
        "reduce_scatter, shape",
        "reduce_scatter, size",
        "reduce_scatter, op",
        "all_gather, dtype",
        "broadcast_object, root",
        "gather_objects, root",
        "scatter_objects, root",
        "scatter_dataset, root",
        "grouped_all_reduce, number",
    ],
)
def test_calls_that_do_not_fit_together_raise_on_all_ranks(comm, name, is_tensor):
    if comm.size == 1:
        pytest.skip("one rank makes one call")
    call, difference = name.split(", ")
    is_other = comm.rank == comm.size - 1
    if is_other:
        shape = {"shape": (6, 2), "size": (5, 3)}.get(difference, (4, 3))
    else:
        shape = (4, 3)
    array = np.zeros(shape, np.float32 if is_other and difference == "dtype" else np.float64)
    payload = torch.from_numpy(array) if is_tensor else array
    root = int(is_other and difference == "root")
    if is_other:
        pieces = [payload]
    else:
        pieces = [payload[:1], payload[1:]]
    calls = {
        "broadcast": lambda: hpcdist.broadcast(payload, root),
        "scatter": lambda: hpcdist.scatter(payload, root),
        "alltoall": lambda: hpcdist.alltoall(payload),
        "reduce_scatter": lambda: hpcdist.reduce_scatter(payload, "mean" if is_other and difference == "op" else "sum"),
        "all_gather": lambda: hpcdist.all_gather(payload),
        "broadcast_object": lambda: hpcdist.broadcast_object(1, root),
        "gather_objects": lambda: hpcdist.gather_objects(1, root),
        "scatter_objects": lambda: hpcdist.scatter_objects([0] * comm.size, root),
        "scatter_dataset": lambda: hpcdist.scatter_dataset(list(range(9)), root),
        "grouped_all_reduce": lambda: hpcdist.grouped_all_reduce(pieces),
    }
    with pytest.raises(CollectiveError, match=f"{call}: expected .* as on rank 0, got"):
        calls[call]()
    hpcdist.barrier()


@pytest.mark.parametrize("make", [np.asarray, torch.tensor], ids=["array", "tensor"])
def test_a_mean_of_whole_numbers_is_a_float_as_numpys(comm, make):
    rows = make([[comm.rank], [comm.rank + 1]] * comm.size)
    means = hpcdist.reduce_scatter(rows, "mean")
    expected = np.mean([[[rank], [rank + 1]] for rank in range(comm.size)], axis=0)
    assert np.asarray(means).dtype == np.float64
    assert np.array_equal(np.asarray(means), expected)


def test_an_all_gather_has_gradients_if_one_rank_needs_them(comm):
    local_row = torch.ones(1, 2, requires_grad=comm.rank == 0)
    joined = hpcdist.all_gather(local_row)
    assert joined.requires_grad
    joined.sum().backward()
    assert (local_row.grad is not None) == (comm.rank == 0)
    assert comm.rank or local_row.grad.tolist() == [[float(comm.size)] * 2]


def test_a_graph_on_root_alone_is_refused_on_all_ranks(comm):
    rows = torch.ones(comm.size, 2)
    if comm.rank == 0:
        rows = rows.requires_grad_() * 2
    with pytest.raises(CollectiveError, match="scatter: expected values without a graph"):
        hpcdist.scatter(rows)

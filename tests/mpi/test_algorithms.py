"""Every algorithm against the closed formula, on real and made-up hosts; and whose bits depend on what."""

import re
import time
import warnings

import numpy as np
import pytest
from made_up_hosts import HOSTS

import hpcdist
from hpcdist.collectives import algorithms, hierarchical, node_sums, rounds, route, shared_memory, slices, staging
from hpcdist.collectives.algorithms import ALGORITHMS, measurements_of
from hpcdist.collectives.group import group_of
from hpcdist.collectives.ops import OPS, SUM
from hpcdist.collectives.options import CommunicationImplementation as Implementation
from hpcdist.collectives.route import Route
from hpcdist.errors import ConfigurationError, DesyncError
from hpcdist.gradients.half_wire import HalfWire
from hpcdist.plan.replicas import plan_row_additions

pytestmark = [pytest.mark.mpi, pytest.mark.core]
ON_HOST = [name for name in ALGORITHMS if name is not Implementation.NCCL]
COUNTS = [0, 1, -1, +1, 1000, 4099]  # -1 and +1: the number of ranks less and more one
DTYPES_AND_OPS = [
    *[("float32", op) for op in ("sum", "min", "max", "product")],
    *[("float64", "sum"), ("int64", "max"), ("int16", "product"), ("complex64", "sum")],
]


@pytest.fixture
def tiny(monkeypatch):
    """Shrink chunks and segments, so that small buffers take many."""
    monkeypatch.setattr(node_sums, "chunk_bytes", lambda n_local_ranks: 512)
    monkeypatch.setattr(slices, "chunk_bytes", lambda n_local_ranks: 512)
    monkeypatch.setattr(node_sums, "WHOLE_BYTES", 256)
    monkeypatch.setattr(hierarchical, "CHUNK_BYTES", 512)
    monkeypatch.setattr(rounds, "SEGMENT_BYTES", 64)


def elements(comm, count):
    if count in (-1, 1):
        return comm.size + count
    return count


def values(rank, n_elements):
    return np.arange(n_elements) % 7 + rank + 1


def expected(op, size, n_elements):
    rows = np.array([values(rank, n_elements) for rank in range(size)])
    return {"sum": rows.sum, "min": rows.min, "max": rows.max, "product": rows.prod}[op](axis=0)


@pytest.mark.feature("collectives.ring-all-reduce")
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize(("dtype", "op"), DTYPES_AND_OPS)
@pytest.mark.parametrize("name", ON_HOST, ids=lambda name: name.value.lower())
def test_on_this_host(comm, tiny, make_group, name, dtype, op, count):
    group = make_group()
    buffer = values(comm.rank, elements(comm, count)).astype(dtype)
    ALGORITHMS[name](buffer, group, OPS[op])
    assert np.array_equal(buffer, expected(op, comm.size, len(buffer)).astype(dtype))


@pytest.mark.feature("collectives.hierarchical-all-reduce")
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("is_ordered", [True, False, None])
@pytest.mark.parametrize("hosts", HOSTS)
def test_hierarchical_on_made_up_hosts(comm, tiny, make_group, hosts, is_ordered, count):
    group = make_group(hosts)
    for _ in range(3):
        buffer = values(comm.rank, elements(comm, count)).astype(np.float32)
        hierarchical.all_reduce(buffer, group, SUM, is_ordered)
        assert np.array_equal(buffer, expected("sum", comm.size, len(buffer)))


def tree_sum(rows):
    rows = [row.copy() for row in rows]
    for into, row in plan_row_additions(len(rows)):
        rows[into] += rows[row]
    return rows[0]


def random_rows(comm, n_elements, seed=0):
    return [
        np.random.default_rng([seed, rank]).standard_normal(n_elements).astype(np.float32) for rank in range(comm.size)
    ]


def test_shared_memory_sums_in_the_tree_over_ranks(comm, tiny, make_group):
    rows = random_rows(comm, 3001)
    buffer = rows[comm.rank].copy()
    shared_memory.all_reduce(buffer, make_group())
    assert buffer.tobytes() == tree_sum(rows).tobytes()


def test_small_arrays_are_summed_in_the_same_tree(comm, make_group):
    group = make_group()
    for number in range(5):
        rows = random_rows(comm, 501, seed=number)
        buffer = rows[comm.rank].copy()
        shared_memory.all_reduce(buffer, group)
        assert buffer.tobytes() == tree_sum(rows).tobytes()


@pytest.mark.feature("collectives.layout-independent-sums")
@pytest.mark.parametrize("hosts", HOSTS)
def test_ordered_sums_have_the_same_bits_on_any_placement(comm, tiny, make_group, hosts):
    rows = random_rows(comm, 3001, seed=1)
    buffer = rows[comm.rank].copy()
    hierarchical.all_reduce(buffer, make_group(hosts), SUM, True)
    assert buffer.tobytes() == tree_sum(rows).tobytes()


@pytest.mark.parametrize("hosts", HOSTS)
def test_unordered_sums_have_the_same_bits_on_all_ranks_and_in_all_runs(comm, tiny, make_group, hosts):
    group = make_group(hosts)
    seen = []
    for _ in range(2):
        buffer = random_rows(comm, 3001, seed=2)[comm.rank]
        hierarchical.all_reduce(buffer, group, SUM, False)
        seen.append(buffer.tobytes())
    assert len(set(comm.allgather(seen[0]))) == 1
    assert seen[0] == seen[1]


@pytest.mark.parametrize("hosts", ["1 each", "2 each", "alternating"])
@pytest.mark.parametrize("n_elements", [0, 1, 7, 3001])
def test_many_hosts_sum_by_halving_with_the_same_bits(comm, tiny, make_group, monkeypatch, hosts, n_elements):
    group = make_group(hosts)
    n_hosts = len(group.placement.hosts)
    direct = random_rows(comm, n_elements, seed=3)[comm.rank]
    halved = direct.copy()
    hierarchical.all_reduce(direct, group)
    monkeypatch.setattr(route, "DIRECT_HOSTS", 1)
    used = []
    call = slices.run_schedule
    monkeypatch.setattr(slices, "run_schedule", lambda *arguments: used.append(call(*arguments)))
    halving_route = Route(Implementation.HIERARCHICAL, is_ordered=group.placement.is_aligned)
    for _ in range(2):
        buffer = halved.copy()
        algorithms.run(halving_route, buffer, group)
        assert buffer.tobytes() == direct.tobytes()
    has_order = group.placement.is_even or not group.placement.is_aligned
    if n_hosts > 1 and has_order and group.lane_comm is not None:
        n_used = 2
    else:
        n_used = 0
    assert len(used) == n_used


def test_calls_in_a_row_do_not_meet(comm, tiny, make_group):
    """Chunks of one call may still be read when the next begins."""
    group = make_group()
    for number in range(300):
        buffer = np.full(number % 5 * 100 + 1, comm.rank + number, np.float32)
        shared_memory.all_reduce(buffer, group)
        assert set(buffer.tolist()) == {sum(range(comm.size)) + number * comm.size}


@pytest.mark.parametrize("name", ["shared_memory", "hierarchical"])
def test_slots_are_not_used_again_before_all_have_read_them(comm, tiny, make_group, monkeypatch, name):
    """All ranks but the first are late in reading each chunk; the first one runs ahead as far as barriers let it."""
    take = staging.Stage.take

    def late(self, chunk, views):
        if comm.rank > 0:
            time.sleep(0.002)
        take(self, chunk, views)

    monkeypatch.setattr(staging.Stage, "take", late)
    if name == "shared_memory":
        hosts = None
    else:
        hosts = "2 each"
    group = make_group(hosts)
    for number in range(3):
        buffer = np.arange(128 * 20, dtype=np.float32) * (comm.rank + 1) + number
        ALGORITHMS[Implementation.parse(name)](buffer, group, SUM)
        factor = comm.size * (comm.size + 1) // 2
        assert np.array_equal(buffer, np.arange(128 * 20) * factor + number * comm.size)


@pytest.mark.feature("collectives.hierarchical-all-reduce")
@pytest.mark.parametrize("hosts", ["2 each", "1 and rest"])
def test_bytes_that_leave_a_host_are_the_formula(comm, tiny, make_group, monkeypatch, hosts):
    group = make_group(hosts)
    sent = []

    class Counted(hierarchical.LaneExchange):
        def _send(self, array, peer):
            sent.append(array.nbytes)
            super()._send(array, peer)

    monkeypatch.setattr(hierarchical, "LaneExchange", Counted)
    hierarchical.seconds_per_byte(group)  # sends a few bytes at the first call
    sent.clear()
    n_elements = 128 * 12
    hierarchical.all_reduce(np.ones(n_elements, np.float32), group, SUM, False)
    of_host = group.node_comm.allreduce(sum(sent))
    n_hosts = len(group.placement.hosts)
    assert of_host == 2 * (n_hosts - 1) * 4 * n_elements // n_hosts


@pytest.mark.feature("debugging.mismatch-detection")
def test_differing_calls_in_one_node_raise_on_all_ranks(comm):
    if comm.size == 1:
        return
    group = group_of(comm)
    with pytest.raises(DesyncError, match=r"sum of 5 float32 on rank 0, sum of 6 float32 on rank 1"):
        shared_memory.all_reduce(np.ones(5 + comm.rank, np.float32), group)
    with pytest.raises(DesyncError, match=r"sum of 5 float32 on rank 0, max of 5 float64 on rank 1"):
        shared_memory.all_reduce(np.ones(5, f"float{32 << min(comm.rank, 1)}"), group, OPS["max"] if comm.rank else SUM)
    buffer = np.ones(5, np.float32)
    shared_memory.all_reduce(buffer, group)
    assert buffer[0] == comm.size


def test_shared_memory_takes_one_host(comm, make_group):
    group = make_group("1 each")
    if comm.size > 1:
        with pytest.raises(ConfigurationError, match="SHARED_MEMORY"):
            shared_memory.all_reduce(np.ones(3), group)


@pytest.mark.parametrize("name", [name.value for name in ON_HOST] + ["auto", "Shared_Memory", Implementation.RING])
def test_by_name(comm, name):
    buffer = np.full(5000, comm.rank, np.float32)
    hpcdist.all_reduce(buffer, implementation=name)
    assert set(buffer.tolist()) == {sum(range(comm.size))}


def test_an_unknown_implementation_is_answered_with_the_valid_ones():
    with pytest.raises(ConfigurationError, match="AUTO.*RING.*NCCL.*MPI.*SHARED_MEMORY.*HIERARCHICAL.*'gloo'"):
        hpcdist.all_reduce(np.ones(3), implementation="gloo")


def test_nccl_without_a_gpu_says_what_is_missing():
    with pytest.raises(ConfigurationError, match="cupy|GPU|driver"):
        hpcdist.all_reduce(np.ones(3), implementation="NCCL")


@pytest.mark.feature("collectives.auto-algorithm", "collectives.autotuner")
def test_auto_is_the_same_table_on_all_ranks_measured_once(comm):
    private_comm = comm.Dup()
    group = group_of(private_comm)
    hpcdist.all_reduce(np.ones(5000), comm=private_comm)
    tables = comm.allgather(measurements_of(group))
    assert all(table == tables[0] for table in tables)
    if comm.size > 1:
        assert [least for least, _ in tables[0]] == sorted({least for least, _ in tables[0]})
    private_comm.Free()


@pytest.mark.feature("collectives.autotuner")
def test_what_was_measured_is_logged_by_rank_0(comm, caplog):
    private_comm = comm.Dup()
    with caplog.at_level("INFO", logger="hpcdist"):
        hpcdist.all_reduce(np.ones(5000), comm=private_comm)
    lines = [text for text in caplog.messages if "all_reduce: AUTO takes" in text]
    assert bool(lines) == (comm.rank == 0 and comm.size > 1)
    for line in lines:
        assert re.fullmatch(r"all_reduce: AUTO takes \w+ from \d+ bytes on: \w+ [\d.]+ us, MPI [\d.]+ us", line)
    private_comm.Free()


def test_a_measurement_is_in_the_journal(comm, monkeypatch):
    """So that a rank which does not take part is seen by the watchdog."""
    private_comm = comm.Dup()
    seen = []
    monkeypatch.setattr(algorithms, "measure", lambda group: seen.append(str(group.journal.current)))
    hpcdist.all_reduce(np.ones(5000), comm=private_comm)
    assert seen == ["all_reduce sum float64 x 5000"] * (comm.size > 1)  # one rank has nothing to measure
    private_comm.Free()


@pytest.mark.parametrize("shift", [0, 1, 3])
@pytest.mark.parametrize("is_slow", [False, True])
@pytest.mark.parametrize("dtype", ["uint8", "int16", "float32", "float64", "longdouble", "complex128", "clongdouble"])
def test_copy_copies_bits(monkeypatch, dtype, is_slow, shift):
    """By memcpy, and in the way that is taken where memcpy is slow."""
    monkeypatch.setattr(staging, "is_memcpy_slow", lambda: is_slow)
    for nbytes in (16_000, 64_000):
        source = np.frombuffer(np.random.default_rng(0).bytes(nbytes), dtype)[shift:]
        target = np.zeros_like(source)
        staging.copy(target, source)
        assert target.tobytes() == source.tobytes()


def test_chunks_hold_whole_numbers_of_any_dtype():
    sizes = {np.dtype(code).itemsize for code in np.typecodes["AllInteger"] + np.typecodes["AllFloat"]}
    for n_ranks in range(1, 129):
        assert all(node_sums.chunk_bytes(n_ranks) % size == 0 for size in sizes)


@pytest.mark.feature("launch.process-sets")
def test_a_group_is_freed_with_its_communicator(comm):
    private_comm = comm.Dup()
    group = group_of(private_comm)
    assert group_of(private_comm) is group
    shared_memory.all_reduce(np.ones(3), group)
    freed = []
    group.keep("mark", lambda: "made", freed.append)
    private_comm.Free()
    assert freed == ["made"]
    assert group.peek("mark") is None


def test_a_wire_rounds_alike_whatever_the_link_was_timed_at(comm, make_group, monkeypatch):
    """The owner of a part adds its own values unrounded, so bits depend on where chunks end."""
    sum_bytes = []
    for byte_s in (1e-12, 1e-7):
        monkeypatch.setattr(hierarchical, "seconds_per_byte", lambda group, byte_s=byte_s: byte_s)
        buffer = random_rows(comm, 300_000, seed=5)[comm.rank]
        hierarchical.all_reduce(buffer, make_group("1 each"), SUM, True, HalfWire("bfloat16"))
        sum_bytes.append(buffer.tobytes())
    assert sum_bytes[0] == sum_bytes[1]


def test_auto_measures_what_it_runs(comm, make_group, monkeypatch):
    """On many hosts that is halving: a message to each host would not end."""
    group = make_group("1 each")
    seen = []
    monkeypatch.setattr(route, "DIRECT_HOSTS", 1)
    monkeypatch.setattr(hierarchical, "all_reduce", lambda *arguments: seen.append("direct"))
    monkeypatch.setattr(slices, "all_reduce", lambda *arguments: seen.append("halving"))
    algorithms.measure(group)
    if comm.size > 1:
        expected_names = {"halving"}
    else:
        expected_names = set()
    assert set(seen) == expected_names


@pytest.mark.parametrize("n_elements", [1, 501, 20_001])
@pytest.mark.parametrize("divisor", [4.0, 3.0])
@pytest.mark.parametrize("name", ON_HOST, ids=lambda name: name.value.lower())
def test_what_a_sum_is_divided_by(comm, tiny, make_group, name, divisor, n_elements):
    """With the bits of the sum, divided afterwards."""
    group = make_group()
    chosen_route = Route(name, is_ordered=True)
    rows = random_rows(comm, n_elements, seed=6)
    total = rows[comm.rank].copy()
    divided = rows[comm.rank].copy()
    algorithms.run(chosen_route, total, group)
    algorithms.run(chosen_route, divided, group, divisor=divisor)
    assert divided.tobytes() == (total / np.float32(divisor)).tobytes()


def test_infinity_and_nan_are_results_without_a_warning(comm, make_group):
    group = make_group()
    for n_elements in (3, 300_000):
        if comm.rank == 0:
            value = np.inf
        else:
            value = -np.inf
        buffer = np.full(n_elements, value, np.float32)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            shared_memory.all_reduce(buffer, group)
        assert np.isnan(buffer).all() if comm.size > 1 else np.isinf(buffer).all()


def test_shares_are_gathered_when_all_have_written_them(comm, tiny, make_group, monkeypatch):
    """The last rank is late with each piece; the others must not read what is there from before."""
    copy = slices.copy

    def late(target, source):
        if comm.rank == comm.size - 1:
            time.sleep(0.002)
        copy(target, source)

    monkeypatch.setattr(slices, "copy", late)
    group = make_group()
    for number in range(4):
        buffer = np.arange(700, dtype=np.float32) * (comm.rank + 1) + number
        expected = np.arange(700, dtype=np.float32) * sum(range(1, comm.size + 1)) + number * comm.size
        slices.all_reduce(buffer, group)
        assert np.array_equal(buffer, expected)

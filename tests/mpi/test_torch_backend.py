"""torch.distributed over hpcdist's collectives: each operation as gloo makes it, and scripts as they are."""

import random
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from hpcdist import torch_backend
from hpcdist.errors import CollectiveError, CollectiveTimeoutError, DesyncError

pytestmark = [pytest.mark.mpi, pytest.mark.core, pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")]
N_CASES = 250  # of each operation
OP = dist.ReduceOp
#: Those that gloo has.
FLOATS = (torch.float64, torch.float32, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.int8, torch.uint8)


@pytest.fixture(scope="module")
def gloo():
    """Return a group of gloo beside the one of hpcdist, which is torch's default."""
    assert "HPCDIST" in dir(dist.Backend), torch_backend.__doc__
    dist.init_process_group("hpcdist", init_method="hpcdist://")
    yield dist.new_group(backend="gloo")
    dist.destroy_process_group()


def values(draws, dtype, shape, rank):
    """Return a tensor of small integers, whose sums are exact, that differ by rank; every third has gaps in memory."""
    generator = torch.Generator().manual_seed(draws.randrange(1 << 30) * 64 + rank)
    has_gaps = len(shape) > 1 and draws.random() < 1 / 3
    whole = torch.randint(0 if dtype in (torch.uint8, torch.bool) else -3, 4, shape, generator=generator)
    if dtype.is_complex:
        whole = whole + 1j * torch.randint(-3, 4, shape, generator=generator)
    tensor = whole.to(dtype)
    if has_gaps:
        return tensor.mT.contiguous().mT
    return tensor


def own_copy(tensor, group):
    """Return a copy with the same gaps; for gloo, which takes no others, without gaps."""
    return tensor.clone(memory_format=torch.contiguous_format if group else torch.preserve_format)


def shape_of(draws):
    return draws.choice([(), (1,), (7,), (3, 5), (2, 3, 4), (0,), (1000,)])


def same(actual, expected):
    if isinstance(actual, torch.Tensor):
        return actual.dtype == expected.dtype and torch.equal(actual, expected)
    return len(actual) == len(expected) and all(map(same, actual, expected))


def reduce_case(draws, rank, size):
    kind = draws.choice([OP.SUM, OP.PRODUCT, OP.MIN, OP.MAX, OP.BAND, OP.BOR, OP.BXOR])
    dtype = draws.choice(INTEGERS if kind in (OP.BAND, OP.BOR, OP.BXOR) else (*FLOATS, *INTEGERS))
    return kind, values(draws, dtype, shape_of(draws), rank)


def any_values(draws, rank, shape=None):
    dtype = draws.choice((*FLOATS, *INTEGERS))
    return values(draws, dtype, shape_of(draws) if shape is None else shape, rank)


def all_reduce(draws, rank, size):
    kind, tensor = reduce_case(draws, rank, size)

    def run(group):
        buffer = own_copy(tensor, group)
        dist.all_reduce(buffer, kind, group=group)
        return buffer

    return run


def reduce(draws, rank, size):
    kind, tensor = reduce_case(draws, rank, size)
    root = draws.randrange(size)

    def run(group):
        buffer = own_copy(tensor, group)
        dist.reduce(buffer, root, kind, group=group)
        # elsewhere it is of no use
        if rank == root:
            return buffer
        return tensor.new_empty(0)

    return run


def reduce_scatter(draws, rank, size):
    dtype = draws.choice((*FLOATS, *INTEGERS))
    shape = shape_of(draws)
    parts = [values(draws, dtype, shape, rank) for _ in range(size)]
    kind = draws.choice([OP.SUM, OP.PRODUCT, OP.MIN, OP.MAX])

    def run(group):
        output = torch.empty(shape, dtype=dtype)
        dist.reduce_scatter(output, [own_copy(part, group) for part in parts], kind, group=group)
        return output

    return run


def reduce_scatter_tensor(draws, rank, size):
    dtype = draws.choice((*FLOATS, *INTEGERS))
    n_rows = draws.choice([1, 3, 40])
    tensor = values(draws, dtype, (n_rows * size, 2), rank)

    def run(group):
        output = torch.empty((n_rows, 2), dtype=dtype)
        dist.reduce_scatter_single(output, own_copy(tensor, group), group=group)
        return output

    return run


def broadcast(draws, rank, size):
    tensor = any_values(draws, rank)
    root = draws.randrange(size)

    def run(group):
        buffer = own_copy(tensor, group)
        dist.broadcast(buffer, root, group=group)
        return buffer

    return run


def all_gather(draws, rank, size):
    tensor = any_values(draws, rank)

    def run(group):
        outputs = [torch.empty_like(tensor) for _ in range(size)]
        dist.all_gather(outputs, own_copy(tensor, group), group=group)
        return outputs

    return run


def all_gather_into_tensor(draws, rank, size):
    tensor = any_values(draws, rank, (draws.choice([1, 3, 40]), 2))

    def run(group):
        output = torch.empty((len(tensor) * size, 2), dtype=tensor.dtype)
        dist.all_gather_single(output, own_copy(tensor, group), group=group)
        return output

    return run


def gather(draws, rank, size):
    tensor = any_values(draws, rank)
    root = draws.randrange(size)

    def run(group):
        if rank == root:
            outputs = [torch.empty_like(tensor) for _ in range(size)]
        else:
            outputs = None
        dist.gather(own_copy(tensor, group), outputs, root, group=group)
        return outputs or []

    return run


def scatter(draws, rank, size):
    shape = shape_of(draws)
    root = draws.randrange(size)
    dtype = draws.choice((*FLOATS, *INTEGERS))
    parts = [values(draws, dtype, shape, rank) for _ in range(size)]

    def run(group):
        output = torch.empty(shape, dtype=dtype)
        dist.scatter(output, [own_copy(part, group) for part in parts] if rank == root else None, root, group=group)
        return output

    return run


def all_to_all_single(draws, rank, size):
    """With rows that differ for each pair of ranks, or as many for each."""
    table = []
    for _ in range(size):
        table.append([draws.randrange(4) for _ in range(size)])
    dtype = draws.choice((*FLOATS, *INTEGERS))
    is_even = draws.random() < 0.3
    sent = [2] * size if is_even else table[rank]
    if is_even:
        received = [2] * size
    else:
        received = [row[rank] for row in table]
    tensor = values(draws, dtype, (sum(sent), 3), rank)

    def run(group):
        output = torch.empty((sum(received), 3), dtype=dtype)
        splits = () if is_even else (received, sent)
        dist.all_to_all_single(output, own_copy(tensor, group), *splits, group=group)
        return output

    return run


CASES = [
    *(all_reduce, reduce, reduce_scatter, reduce_scatter_tensor, broadcast),
    *(all_gather, all_gather_into_tensor, gather, scatter, all_to_all_single),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_it_is_what_gloo_makes(comm, gloo, case):
    draws = random.Random(case.__name__)
    for number in range(N_CASES):
        run = case(draws, comm.rank, comm.size)
        mpi_outcome = run(None)
        gloo_outcome = run(gloo)
        assert same(mpi_outcome, gloo_outcome), (case.__name__, number, mpi_outcome, gloo_outcome)


def test_what_gloo_does_not_do(comm, gloo):
    average = torch.full((3,), float(comm.rank))
    dist.all_reduce(average, OP.AVG)
    assert average.tolist() == [(comm.size - 1) / 2] * 3
    number = torch.full((2,), 1 + 2j, dtype=torch.complex128)
    dist.all_reduce(number)
    assert number.tolist() == [comm.size * (1 + 2j)] * 2
    yes = torch.tensor([True, comm.rank == 0, False])
    dist.all_reduce(yes)
    assert yes.tolist() == [True, True, False]
    for dtype in (torch.bfloat16, torch.int16):
        value = torch.full((3,), comm.rank, dtype=dtype)
        dist.all_reduce(value, OP.MAX)
        assert value.tolist() == [comm.size - 1] * 3
    for dtype in (torch.bfloat16, torch.int16, torch.bool, torch.complex64):
        local_values = torch.tensor([comm.rank, 1, 0]).to(dtype)
        outputs = [torch.empty_like(local_values) for _ in range(comm.size)]
        dist.all_gather(outputs, local_values)
        assert same(outputs, [torch.tensor([rank, 1, 0]).to(dtype) for rank in range(comm.size)])
    gaps = torch.ones(4, 6)[:, ::2]
    dist.all_reduce(gaps)
    assert gaps.tolist() == [[comm.size] * 3] * 4
    parts = [torch.full((1 + rank,), float(rank)) for rank in range(comm.size)]
    outputs = [torch.empty(1 + rank) for rank in range(comm.size)]
    dist.all_gather(outputs, parts[comm.rank])
    assert same(outputs, parts), "of another size on each rank"


def test_messages(comm, gloo):
    """Around a ring, in both orders, with tags; then from anybody."""
    after = (comm.rank + 1) % comm.size
    before = (comm.rank - 1) % comm.size
    sent = torch.arange(1000.0) + comm.rank
    received = [torch.empty(1000), torch.empty(1000)]
    works = [dist.irecv(received[tag], before, tag=tag) for tag in (1, 0)]
    works += [dist.isend(sent * (1 + tag), after, tag=tag) for tag in (0, 1)]
    for work in works:
        work.wait()
    for tag in (0, 1):
        assert torch.equal(received[tag], (torch.arange(1000.0) + before) * (1 + tag))
    if comm.rank:
        dist.send(torch.full((2,), comm.rank), 0)
    else:
        message = torch.empty(2, dtype=torch.int64)
        sources = [dist.recv(message) for _ in range(comm.size - 1)]
        assert sorted(sources) == list(range(1, comm.size))
    comm.barrier()


def test_works_that_are_waited_for_later(comm, gloo):
    tensors = [torch.full((5,), float(comm.rank + number)) for number in range(4)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for number, work in enumerate(works):
        work.wait()
        assert work.is_completed()
        assert tensors[number].tolist() == [comm.size * (comm.size - 1) / 2 + number * comm.size] * 5
    assert works[0].get_future().value()[0].tolist() == tensors[0].tolist()


def test_groups_of_some_ranks(comm, gloo):
    every = dist.new_group()
    even_group = dist.new_group(list(range(0, comm.size, 2)))
    last = dist.new_group([comm.size - 1])
    value = torch.ones(1)
    if comm.rank % 2 == 0:
        dist.all_reduce(value, group=even_group)
        assert value.item() == (comm.size + 1) // 2
    if comm.rank == comm.size - 1:
        dist.broadcast(value, comm.size - 1, group=last)
    dist.barrier(group=every)
    objects = [None] * comm.size
    dist.all_gather_object(objects, {"rank": comm.rank})
    assert objects == [{"rank": rank} for rank in range(comm.size)]


@pytest.mark.parametrize("is_compiled", [False, True], ids=["plain", "compiled"])
def test_ddp_trains_as_one_process(comm, gloo, is_compiled):
    """A script as it is; the gradients are means over the ranks, as DDP has them."""
    x = torch.randn(8 * comm.size, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def train(model, rows):
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        for _ in range(5):
            optimizer.zero_grad()
            model(rows).square().mean().backward()
            optimizer.step()
        return [weight.detach() for weight in model.parameters()]

    def net(seed):
        torch.manual_seed(seed)
        return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()

    model = DistributedDataParallel(net(comm.rank))  # rank 0's weights count
    if is_compiled:
        model = torch.compile(model, backend="eager")
    trained = train(model, x[comm.rank :: comm.size])
    for parameter, expected in zip(trained, train(net(0), x), strict=True):
        torch.testing.assert_close(parameter, expected)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda size: dist.all_reduce(torch.ones(1), OP.BAND), "integers or bools for a bitwise reduction, got torch"),
        (
            lambda size: dist.all_reduce(torch.ones(1, dtype=torch.int32), OP.AVG),
            "floats for an average, got torch.int",
        ),
        (lambda size: dist.all_reduce(torch.ones(1, device="meta")), "tensors on the host, got .*meta"),
        (
            lambda size: dist.all_to_all_single(torch.ones(size), torch.ones(size), [0] * size, [1] * size),
            "rows of the",
        ),
    ],
    ids=["bitwise", "average", "device", "splits"],
)
def test_what_is_refused(comm, gloo, call, text):
    """On this rank, before anything is sent: the next call goes well."""
    with pytest.raises(CollectiveError, match=f"expected .*{text}"):
        call(comm.size)
    dist.barrier()


def test_a_message_of_another_size_is_an_error(comm, gloo):
    if comm.size < 2:
        pytest.skip("messages need two ranks")
    if comm.rank == 0:
        for n_elements in (2, 8):
            dist.send(torch.ones(n_elements), 1)
    elif comm.rank == 1:
        buffer = torch.full((4,), 7.0)
        for _ in range(2):
            with pytest.raises(CollectiveError, match="recv.*message.*16.*bytes"):
                dist.recv(buffer, 0)
        assert buffer.tolist() == [7.0] * 4
    dist.barrier()
    test_messages(comm, gloo)  # the next ones arrive


def test_tensors_that_require_grad(comm, gloo):
    scaled = dist._make_nccl_premul_sum(0.5)
    value = torch.ones(2, requires_grad=True)
    dist.all_reduce(value, scaled)
    assert value.tolist() == [comm.size / 2] * 2
    output = torch.empty(1, requires_grad=True)
    dist.reduce_scatter_single(output, torch.ones(comm.size, requires_grad=True), scaled)
    assert output.tolist() == [comm.size / 2]
    assert value.grad_fn is None
    assert output.grad_fn is None


def test_meshes_and_functional_collectives(comm, gloo):
    """What finds its group by a name: the device mesh, and FSDP on it, against one process."""
    mesh = init_device_mesh("cpu", (comm.size,))
    total = _functional_collectives.all_reduce(torch.ones(3), "sum", mesh)
    assert total.tolist() == [comm.size] * 3
    x = torch.randn(4 * comm.size, 4, generator=torch.Generator().manual_seed(1))

    def net():
        torch.manual_seed(1)
        return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))

    sharded = net()
    whole = net()
    fully_shard(sharded, mesh=mesh)
    for model, rows in ((sharded, x[comm.rank :: comm.size]), (whole, x)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(rows).square().mean().backward()
            optimizer.step()
    for sharded_parameter, whole_parameter in zip(sharded.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(sharded_parameter.full_tensor(), whole_parameter)


def test_a_group_ends_while_the_others_go_on(comm, gloo):
    """Also one with a message that nobody has waited for."""
    group = dist.new_group()
    after = (comm.rank + 1) % comm.size
    before = (comm.rank - 1) % comm.size
    received = torch.empty(1 << 20)
    waiting = dist.irecv(received, before, group=group)
    dist.isend(torch.full((1 << 20,), float(comm.rank)), after, group=group)
    waiting.wait()
    assert received.unique().tolist() == [before]
    dist.irecv(torch.empty(3), before, group=group)  # which nobody sends
    dist.destroy_process_group(group)
    dist.barrier()


@pytest.mark.parametrize("call", ["broadcast", "send", "all_gather_single", "float8"])
def test_tensors_of_another_kind(comm, gloo, call):
    meta = torch.ones(2, device="meta")
    calls = {
        "broadcast": lambda: dist.broadcast(meta, 0),
        "send": lambda: dist.send(meta, 0),
        "all_gather_single": lambda: dist.all_gather_single(torch.ones(2 * comm.size, device="meta"), meta),
        "float8": lambda: dist.all_reduce(torch.ones(2).to(torch.float8_e4m3fn)),
    }
    if call == "send" and comm.rank == 0:
        return  # torch refuses a message to oneself
    with pytest.raises(
        CollectiveError,
        match="expected (tensors on the host|a reduction of bools, integers, floats or complex numbers), got",
    ):
        calls[call]()


def n_elements(comm):
    """Return a number of elements that only the last rank has."""
    if comm.rank == comm.size - 1:
        return 8
    return 4


DIFFERING = {
    "all_reduce": lambda comm: dist.all_reduce(torch.ones(n_elements(comm))),
    "all_reduce, large": lambda comm: dist.all_reduce(torch.ones(n_elements(comm) << 18)),
    "all_reduce, dtype": lambda comm: dist.all_reduce(torch.ones(4, dtype=torch.int32 if comm.rank else torch.float32)),
    "all_reduce, operation": lambda comm: dist.all_reduce(torch.ones(4), OP.MAX if comm.rank else OP.SUM),
    "all_reduce, bits": lambda comm: dist.all_reduce(torch.ones(n_elements(comm), dtype=torch.int32), OP.BAND),
    "reduce_scatter": lambda comm: dist.reduce_scatter_single(
        torch.ones(n_elements(comm)), torch.ones(n_elements(comm) * comm.size)
    ),
    "reduce, root": lambda comm: dist.reduce(torch.ones(4), min(comm.rank, 1)),
    "broadcast": lambda comm: dist.broadcast(torch.ones(n_elements(comm)), 0),
    "broadcast, root": lambda comm: dist.broadcast(torch.ones(4), min(comm.rank, 1)),
    "all_gather": lambda comm: dist.all_gather(
        [torch.ones(n_elements(comm)) for _ in range(comm.size)], torch.ones(n_elements(comm))
    ),
    "gather": lambda comm: dist.gather(
        torch.ones(n_elements(comm)), [torch.ones(4) for _ in range(comm.size)] if comm.rank == 0 else None
    ),
    "scatter": lambda comm: dist.scatter(
        torch.ones(n_elements(comm)), [torch.ones(4) for _ in range(comm.size)] if comm.rank == 0 else None
    ),
    "all_to_all": lambda comm: dist.all_to_all_single(
        torch.ones(n_elements(comm) * comm.size), torch.ones(4 * comm.size)
    ),
}


@pytest.mark.parametrize("call", DIFFERING)
def test_sizes_that_differ_are_an_error_on_every_rank(comm, gloo, call):
    if comm.size == 1:
        pytest.skip("nothing differs on one rank")
    with pytest.raises(DesyncError, match=f"{call.partition(',')[0]}: expected the same call and sizes that fit"):
        DIFFERING[call](comm)
    dist.barrier()


def test_a_barrier_that_meets_another_call_is_named(comm, gloo):
    if comm.size == 1:
        pytest.skip("nothing differs on one rank")
    call = dist.barrier if comm.rank == 0 else lambda: dist.all_reduce(torch.ones(4))
    with pytest.raises(DesyncError) as caught:
        call()
    if comm.rank == 0:
        assert str(caught.value).startswith(
            "barrier: expected the same call and sizes that fit on every rank, got this"
        )
    dist.barrier()


def test_a_message_that_came_too_late_is_for_the_next_receiver(comm, gloo):
    if comm.size < 2:
        pytest.skip("messages need two ranks")
    if comm.rank == 1:
        given_up = torch.zeros(2)
        received = torch.zeros(2)
        with pytest.raises(CollectiveTimeoutError, match=r"recv.*0.*3.*within.*0.3"):
            dist.irecv(given_up, 0, tag=3).wait(timedelta(seconds=0.3))
    comm.barrier()
    if comm.rank == 0:
        dist.send(torch.ones(2), 1, tag=3)
    elif comm.rank == 1:
        dist.recv(received, 0, tag=3)
        assert (given_up.tolist(), received.tolist()) == ([0, 0], [1, 1])
    comm.barrier()


def test_a_tag_that_mpi_does_not_have(comm, gloo):
    if comm.size == 1:
        pytest.skip("torch sends nothing to itself")
    with pytest.raises(CollectiveError, match="send.*0.*1"):
        dist.isend(torch.ones(1), (comm.rank + 1) % comm.size, tag=-1)


def test_tensors_that_are_not_in_memory_as_they_are_read(comm, gloo):
    if comm.rank == 0:
        outputs = [torch.empty(2, dtype=torch.complex64) for _ in range(comm.size)]
    else:
        outputs = None
    dist.gather(torch.full((2,), 1 + 2j).conj(), outputs)
    assert outputs is None or outputs[-1].tolist() == [1 - 2j] * 2
    with pytest.raises(CollectiveError, match="torch.sparse_coo"):
        dist.all_reduce(torch.ones(2).to_sparse())


def test_a_group_that_a_rank_makes_too_late(comm, gloo):
    """Those that came first give up, and so does the late one."""
    if comm.size == 1:
        pytest.skip("nobody is late")
    if comm.rank == comm.size - 1:
        comm.barrier()
    with pytest.raises(CollectiveTimeoutError, match=rf"got no answer from \[{comm.size - 1}\] of its ranks"):
        dist.new_group(timeout=timedelta(seconds=0.5))
    if comm.rank < comm.size - 1:
        comm.barrier()
    dist.barrier()


def test_a_group_is_shut_down_once(comm, gloo):
    group = dist.new_group()
    if comm.size > 1 and comm.rank == 0:
        lost = dist.isend(torch.ones(1), 1, group=group)
    dist.barrier(group=group)
    if comm.size > 1 and comm.rank == 1:
        dist.recv(torch.ones(1), 0, group=group)
    dist.destroy_process_group(group)
    assert comm.size == 1 or comm.rank or lost.is_completed()

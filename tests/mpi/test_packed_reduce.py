"""Nests that are reduced in one go, and sparse tensors, whose entries are joined."""

import numpy as np
import pytest
import torch
from torch import nn

import hpcdist
from hpcdist.nest import map_nest

pytestmark = pytest.mark.mpi


@pytest.fixture(params=[None, 5])
def strategy(request):
    return hpcdist.MultiWorkerMirroredStrategy(num_replicas=request.param, gradient_op="sum")


@pytest.fixture
def sums(strategy, monkeypatch):
    """Return a list to which every all-reduce of values adds their dtype; that of shapes is three float64."""
    seen = []
    summed = strategy.replicas.add

    def counting(rows):
        seen.append("shapes" if rows[0].shape == (3,) and rows[0].dtype == np.float64 else str(rows[0].dtype))
        return summed(rows)

    monkeypatch.setattr(strategy.replicas, "add", counting)
    return seen


def number():
    return hpcdist.get_replica_context().replica_id_in_sync_group


def make_nest():
    """Return a nest of random numbers of this replica, with two leaves of some dtypes."""
    generator = torch.Generator().manual_seed(number())

    def draw(*shape, dtype=torch.float32):
        return torch.randn(*shape, generator=generator).to(dtype)

    return {
        "a": draw(3, 2),
        "b": [draw(5, dtype=torch.float64).numpy(), draw(4, dtype=torch.bfloat16), (draw(()), 1.5 * number())],
        "c": torch.arange(4) * number(),
        "d": draw(2, 3, dtype=torch.float64),
        "e": draw(0),
    }


def bits(nest):
    leaf_bits = []

    def leaf(value):
        if isinstance(value, torch.Tensor):
            array = value.double().numpy()
        else:
            array = np.asarray(value)
        leaf_bits.append((str(getattr(value, "dtype", type(value))), array.shape, array.tobytes()))

    map_nest(leaf, nest)
    return leaf_bits


def of_all(strategy, function):
    """Return what function() returns on each local replica, in a list that no value of it is lost in."""
    replica_results = []
    strategy.run(lambda: replica_results.append(function()))
    return replica_results


@pytest.mark.feature("tf.all-reduce-packs", "collectives.grouped-collectives", "semantics.all-reduce-in-replicas")
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_a_nest_is_summed_once_for_each_dtype(strategy, sums, op):
    reduced = of_all(strategy, lambda: bits(hpcdist.get_replica_context().all_reduce(op, make_nest())))
    assert sums == ["shapes", "float32", "float64", "int64"]
    del sums[:]

    def one_by_one():
        context = hpcdist.get_replica_context()
        return bits(map_nest(lambda leaf: context.all_reduce(op, leaf), make_nest()))

    assert of_all(strategy, one_by_one) == reduced
    assert len(sums) == 2 * 8


@pytest.mark.feature("tf.all-reduce-packs")
def test_packed_sums_are_in_the_order_of_replicas():
    strategy = hpcdist.MultiWorkerMirroredStrategy(num_replicas=5)
    values = torch.randn(5, 2, 3, generator=torch.Generator().manual_seed(1))
    expected = ((values[0] + values[1]) + (values[2] + values[3])) + values[4]
    for replica_sums in of_all(
        strategy, lambda: hpcdist.get_replica_context().all_reduce("sum", list(values[number()]))
    ):
        assert torch.equal(torch.stack(replica_sums), expected)


@pytest.mark.feature("tf.all-reduce-packs")
def test_gradients_of_a_nest_are_summed_once_for_each_dtype(strategy, sums):
    n = strategy.num_replicas_in_sync

    def fn():
        x, y = (torch.full((2,), number() + 1.0, requires_grad=True) for _ in range(2))
        fixed = torch.ones(1)
        total = hpcdist.get_replica_context().all_reduce("sum", {"x": x * x, "y": y, "fixed": fixed, "n": 1.0})
        assert not total["fixed"].requires_grad
        assert total["n"] == n
        del sums[:]
        ((number() + 1) * total["x"].sum() + 3 * total["y"].sum()).backward()
        return x.grad.tolist(), y.grad.tolist(), list(sums), number()

    for of_x, of_y, summed, replica in of_all(strategy, fn):
        assert of_x == [n * (n + 1) / 2 * 2 * (replica + 1)] * 2
        assert of_y == [3.0 * n] * 2
        assert summed == ["shapes", "float32"]


@pytest.mark.feature("tf.batch-reduce-packs", "strategies.extended", "collectives.grouped-collectives")
def test_a_batch_of_values_is_reduced_in_one_go(strategy, sums):
    ones = strategy.run(lambda: (torch.ones(2), torch.ones(3), np.ones(1)))
    pairs = [(ones[0], None), (ones[1], torch.empty(0, device="meta")), (ones[2], "cpu")]
    first, second, third = strategy.extended.batch_reduce_to("sum", pairs)
    assert sums == ["shapes", "float32", "float64"]
    n = strategy.num_replicas_in_sync
    assert (first.tolist(), second.device.type, third.tolist()) == ([n, n], "meta", [n])


@pytest.mark.feature("semantics.all-reduce-in-replicas")
def test_leaves_that_differ_are_an_error_on_all(strategy):
    if strategy.num_replicas_in_sync == 1:
        pytest.skip("one replica cannot differ")

    def fn():
        hpcdist.get_replica_context().all_reduce("sum", [torch.ones(2), torch.ones(1 + (number() == 0))])

    with pytest.raises(ValueError, match=r"same call, got reduce SUM; \(2,\) float32; \([12],\) float32.* and others"):
        strategy.run(fn)


def test_leaves_of_dicts_are_found_by_their_keys(strategy):
    """Whatever the order in which replicas build them."""

    def fn():
        pairs = [("a", torch.tensor(1.0)), ("b", torch.tensor(10.0)), (3, [np.ones(1)])]
        nest = dict(pairs if number() % 2 else pairs[::-1])
        total = hpcdist.get_replica_context().all_reduce("sum", nest)
        joined = hpcdist.get_replica_context().all_gather({key: torch.ones(1) * 2 for key in nest}, axis=0)
        assert list(total) == list(joined) == list(nest)
        return total["a"].item(), total["b"].item(), total[3][0].item()

    n = strategy.num_replicas_in_sync
    assert set(of_all(strategy, fn)) == {(n, 10 * n, n)}
    parts = strategy.run(lambda: {"a": 1, "b": 2} if number() % 2 else {"b": 2, "a": 1})
    assert strategy.reduce("sum", parts["b"], axis=None) == 2 * n


@pytest.mark.parametrize(
    ("first", "other"),
    [
        ({"a": 1.0, "b": 2.0}, {"a": 1.0, "c": 2.0}),
        ([1.0, [2.0, 3.0]], [[1.0, 2.0], 3.0]),
        ([], [1.0]),
        (torch.ones(2), torch.ones(2, dtype=torch.bfloat16)),
        (torch.ones(2), np.ones(2, np.float32)),
        (np.ones(()), 1.0),
        (torch.eye(2).to_sparse(), torch.eye(2, dtype=torch.bfloat16).to_sparse()),
    ],
    ids=["keys", "lengths", "nothing", "dtype", "array", "number", "dtype of sparse tensors"],
)
def test_nests_and_kinds_that_differ_are_an_error_on_all(strategy, comm, first, other):
    if strategy.num_replicas_in_sync == 1:
        pytest.skip("one replica cannot differ")
    with pytest.raises(ValueError, match="values.*replica"):
        strategy.run(lambda: hpcdist.get_replica_context().all_reduce("sum", other if number() else first))


@pytest.mark.parametrize("axis", [None, 0])
def test_dtypes_that_differ_are_an_error_on_all(strategy, axis):
    if strategy.num_replicas_in_sync == 1:
        pytest.skip("one replica cannot differ")
    dtypes = []
    for replica in strategy.own_replicas:
        if replica:
            dtypes.append(torch.bfloat16)
        else:
            dtypes.append(torch.float32)
    values = hpcdist.PerReplica([torch.ones(2, dtype=dtype) for dtype in dtypes])
    with pytest.raises(ValueError, match=r"same call, got reduce MEAN; (axes \(0,\); )?\(2?,?\) b?float"):
        strategy.reduce("mean", values, axis=axis)


# -- sparse ------------------------------------------------------------------------------------------------------------


def own_rows():
    """Return a sparse (6, 2) tensor with rows of this replica, one of which is everyone's and comes twice."""
    rows = [2, number() % 6, 2][: 3 if number() else 2]
    values = torch.full((len(rows), 2), number() + 1.0)
    return torch.sparse_coo_tensor(torch.tensor([rows]), values, (6, 2), check_invariants=True)


@pytest.mark.feature(
    "tf.all-reduce-reduce",
    "collectives.sparse-gradients",
    "semantics.all-reduce-in-replicas",
    "semantics.transport-of-gradients",
)
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_entries_of_sparse_tensors_are_joined(strategy, sums, op):
    n = strategy.num_replicas_in_sync
    dense = of_all(strategy, lambda: hpcdist.get_replica_context().all_reduce(op, own_rows().to_dense()))
    del sums[:]
    for expected, (sparse_reduced, reduced_ones) in zip(
        dense,
        of_all(strategy, lambda: hpcdist.get_replica_context().all_reduce(op, (own_rows(), torch.ones(1)))),
        strict=True,
    ):
        assert sparse_reduced.layout is torch.sparse_coo
        assert sparse_reduced._nnz() == 3 * n - 1
        assert sparse_reduced._indices()[0, :2].tolist() == [2, 0]  # replica 0's come first
        assert torch.allclose(sparse_reduced.to_dense(), expected)
        if op == "sum":
            expected_ones = n
        else:
            expected_ones = 1
        assert reduced_ones.item() == expected_ones
    assert sums == ["shapes", "float32"]


@pytest.mark.feature("tf.all-reduce-reduce", "collectives.sparse-gradients")
def test_gradients_of_an_embedding_are_summed_as_they_are(strategy):
    rows = 1 << 40  # as dense tensors these would need terabytes

    def fn():
        indices = torch.tensor([[5, rows - 1]])
        gradient = torch.sparse_coo_tensor(indices, torch.tensor([[1.0], [number()]]), (rows, 1), check_invariants=True)
        total = hpcdist.get_replica_context().all_reduce("sum", gradient).coalesce()
        return total.indices().tolist(), total.values().flatten().tolist()

    n = strategy.num_replicas_in_sync
    assert of_all(strategy, fn)[0] == ([[5, rows - 1]], [n, n * (n - 1) / 2])
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1, 1])).sum().backward()
    gradients = hpcdist.PerReplica([table.weight.grad] * len(strategy.own_replicas))
    assert strategy.reduce("sum", gradients, axis=None).to_dense()[1].tolist() == [2 * n, 2 * n]


@pytest.mark.feature("tf.all-reduce-reduce")
def test_sparse_and_dense_are_not_added(strategy, comm):
    if strategy.num_replicas_in_sync == 1:
        pytest.skip("one replica cannot differ")

    def fn(value):
        hpcdist.get_replica_context().all_reduce("sum", value() if number() else value().to_dense())

    with pytest.raises(ValueError, match="values.*shape"):
        strategy.run(fn, args=(own_rows,))
    with pytest.raises(TypeError, match="Sparse layout"):
        strategy.reduce("sum", hpcdist.PerReplica([torch.eye(2).to_sparse()] * len(strategy.own_replicas)), axis=0)


@pytest.mark.feature("tf.all-reduce-sparse")
def test_sparse_tensors_beside_ones_with_gradients(strategy):
    def fn():
        x = torch.ones(2, requires_grad=True)
        total, rows = hpcdist.get_replica_context().all_reduce("sum", (x, own_rows().requires_grad_()))
        assert not rows.requires_grad
        total.sum().backward()
        return x.grad.tolist()

    assert of_all(strategy, fn)[0] == [strategy.num_replicas_in_sync] * 2

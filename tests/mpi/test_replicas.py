"""Several replicas on each rank: the same bits on any number of ranks, merge points, contexts and values."""

import copy
import functools
import itertools
import sys
import time
import types
import weakref
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from local_replicas import Strategy, collect, ids
from mpi4py import MPI
from torch import nn

import hpcdist
from hpcdist import MPIClusterResolver, PerReplica
from hpcdist.collectives import subtree_sums
from hpcdist.errors import ConfigurationError, DesyncError, GradientError
from hpcdist.plan.replicas import ReplicaPlan
from hpcdist.program import owners

sys.path.insert(0, str(__file__).split("/tests/")[0] + "/benchmarks")
import bits

pytestmark = [pytest.mark.mpi, pytest.mark.core]


@pytest.fixture
def strategy():
    return Strategy(num_replicas=5)


def alone():
    """Return a strategy of this rank with all replicas."""
    return Strategy(MPIClusterResolver(comm=MPI.COMM_SELF), num_replicas=bits.N_REPLICAS)


@pytest.mark.feature("launch.simulated-replicas", "collectives.layout-independent-sums", "debugging.determinism")
@pytest.mark.parametrize("hosts", [None, "2 each", "alternating"])
@pytest.mark.parametrize("name", sorted(bits.MODELS))
def test_bits_do_not_depend_on_ranks_or_hosts(comm, over_hosts, name, hosts):
    over_hosts(None)
    expected = bits.train(alone(), name, "adam", n_steps=2)
    over_hosts(hosts)
    assert bits.train(Strategy(num_replicas=bits.N_REPLICAS), name, "adam", n_steps=2) == expected


def test_large_gradients_keep_their_bits(comm):
    """From 1 MiB on gradients are summed where torch made them."""

    def train(strategy):
        torch.manual_seed(0)
        with strategy.scope():
            model = nn.Linear(520, 520)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(replica):
            optimizer.zero_grad()
            x = torch.randn(3, 520, generator=torch.Generator().manual_seed(replica))
            model(x).square().mean().backward()
            optimizer.step()

        for _ in range(3):
            strategy.run(step, args=(ids(strategy),))
        return bits.digest(model.state_dict().values())

    assert train(Strategy(num_replicas=bits.N_REPLICAS)) == train(alone())


@pytest.mark.feature(
    "tf.optimizer-s-slots",
    "checkpoints.snapshot-of-replicas",
    "checkpoints.resume-on-other-ranks",
    "complaints.resume-on-another-count",
)
def test_a_restart_on_other_ranks_resumes_with_the_same_bits(comm, shared_path):
    def step(model, optimizer, number, replica):
        optimizer.zero_grad()
        images = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(100 * number + replica))
        model(images).square().mean().backward()
        optimizer.step()

    def train(strategy, n_steps, restored=None, saved=None):
        torch.manual_seed(1)
        with strategy.scope():
            model = bits.build_cnn()
            optimizer = torch.optim.Adam(model.parameters())
        checkpoint = hpcdist.Checkpoint(model=model, optimizer=optimizer, strategy=strategy)
        if restored:
            assert hpcdist.CheckpointManager(checkpoint, restored).restore_or_initialize()
        for number in range(checkpoint.step, n_steps):
            strategy.run(step, args=(model, optimizer, number, ids(strategy)))
        if saved:
            hpcdist.CheckpointManager(checkpoint, saved).save(n_steps)
        return bits.digest([*model.state_dict().values(), *_moments(optimizer)])

    unbroken = train(alone(), 6)
    everywhere = functools.partial(Strategy, num_replicas=bits.N_REPLICAS)
    train(everywhere(), 3, saved=shared_path / "many")
    assert train(everywhere(), 6, restored=shared_path / "many") == unbroken
    by_one = None
    try:
        if comm.rank == 0:
            by_one = train(alone(), 6, restored=shared_path / "many")
            train(alone(), 2, saved=shared_path / "one")
    finally:
        comm.Barrier()
    assert by_one in (None, unbroken)
    assert train(everywhere(), 6, restored=shared_path / "one") == unbroken


def _moments(optimizer):
    return list(itertools.chain.from_iterable(state.values() for state in optimizer.state_dict()["state"].values()))


@pytest.mark.feature(
    "tf.experimental-local-results",
    "tf.every-distributedvalues-nests",
    "tf.anything-else-goes",
    "tf.results-nest-what",
    "tf.same-object-all",
    "tf.experimental-local-results-gives",
    "launch.simulated-replicas",
    "strategies.local-results",
    "semantics.arguments-of-run",
    "semantics.results-of-run",
    "semantics.replica-context",
)
def test_run_gives_each_replica_its_own_and_returns_all(strategy, comm):
    outputs = strategy.run(lambda replica, fixed: {"id": replica, "fixed": fixed}, args=(ids(strategy), "x"))
    replica_ids = strategy.experimental_local_results(ids(strategy))
    assert outputs["id"].values == replica_ids
    assert outputs["fixed"] == "x" if len(replica_ids) > 1 else outputs["fixed"].values == ("x",)
    assert sorted(sum(comm.allgather(replica_ids), ())) == list(range(5))
    assert strategy.num_replicas_in_sync == 5


@pytest.mark.feature("tf.what-run-returns")
def test_equal_numbers_are_values_of_every_replica(strategy):
    """Small whole numbers are one object in Python."""
    counts = strategy.run(lambda: (3, True, 1.5))
    assert [strategy.reduce("sum", count, axis=None) for count in counts] == [15, 5, 7.5]


@pytest.mark.feature("tf.gather-misfit-among")
def test_a_misfit_on_one_rank_is_an_error_on_all(strategy, comm):
    parts = strategy.run(lambda replica: torch.ones(1, 2 if replica == 1 else 3), args=(ids(strategy),))
    with pytest.raises(ValueError, match="gather: expected|all_gather: expected"):
        strategy.gather(parts, axis=0)


@pytest.mark.feature("tf.run-fn-args", "tf.every-distributedvalues-nests", "semantics.arguments-of-run")
def test_run_gives_each_replica_its_own_of_a_nest(strategy):
    replica_ids = ids(strategy)

    def fn(nest, *, named):
        replica = hpcdist.get_replica_context().replica_id_in_sync_group
        assert nest == {"a": [replica, (replica, "x")], "b": 2}
        assert named == (replica, 3)
        return True

    nest = {"a": [replica_ids, (replica_ids, "x")], "b": 2}
    outputs = strategy.run(fn, args=[nest], kwargs={"named": (replica_ids, 3)}, options=None)
    assert set(strategy.experimental_local_results(outputs)) == {True}


@dataclass
class Rows:
    """A batch as users write it."""

    x: Any
    name: str = "x"
    n_made: int = 0

    def __post_init__(self):
        self.n_made += 1


@pytest.mark.feature("strategies.values-from-function")
def test_run_takes_dataclasses_and_keeps_counters_and_sizes_whole(strategy):
    replica_ids = strategy.experimental_distribute_values_from_function(
        lambda context: context.replica_id_in_sync_group
    )
    arguments = Rows(replica_ids), Rows([Rows(replica_ids)]), Rows(torch.ones(1))

    def fn(plain, nested, shared_rows):
        replica = hpcdist.get_replica_context().replica_id_in_sync_group
        assert plain == Rows(replica)
        assert nested == Rows([Rows(replica)])
        assert shared_rows is arguments[2]
        return Counter("a" * replica), torch.Size([replica, 3]), Rows(replica)

    counters, sizes, rows = strategy.run(fn, args=arguments)
    replicas = strategy.own_replicas
    assert counters.values == tuple(Counter("a" * replica) for replica in replicas)
    assert sizes.values == tuple(torch.Size([replica, 3]) for replica in replicas)
    assert rows.values == tuple(map(Rows, replicas))


@pytest.mark.feature("tf.reduce-mean-over", "tf.reduce-negative-axes", "semantics.reduce-over-axes")
def test_reduce_weighs_every_replica_alike_and_every_row(strategy):
    rows = strategy.run(lambda replica: torch.full((replica + 1,), float(replica)), args=(ids(strategy),))
    assert strategy.reduce("sum", ids(strategy), axis=None) == 10
    assert strategy.reduce("mean", ids(strategy), axis=None) == 2
    mean = sum(replica * (replica + 1) for replica in range(5)) / 15
    assert strategy.reduce("mean", rows, axis=0).item() == pytest.approx(mean)
    assert strategy.reduce("mean", rows, axis=-1).item() == pytest.approx(mean)
    with pytest.raises(ValueError, match="values.*shape"):
        strategy.reduce("sum", rows, axis=None)


@pytest.mark.parametrize("hosts", [None, "2 each"])
@pytest.mark.parametrize("dtype", ["longdouble", "uint16", "uint32", "uint64", "complex128"])
def test_reduce_takes_every_dtype_of_numpy(over_hosts, dtype, hosts):
    over_hosts(hosts)
    strategy = Strategy(num_replicas=5)
    values = strategy.run(lambda replica: np.array([replica, 2**12], dtype), args=(ids(strategy),))
    total = strategy.reduce("sum", values, axis=None)
    assert (total.dtype, total.tolist()) == (np.dtype(dtype), [10, 5 * 2**12])


def test_waiting_for_other_ranks_partial_sums_takes_no_core(comm, make_group):
    group = make_group()
    plan = ReplicaPlan(2 * comm.size + 1, comm.size)
    rows = [np.ones(1000) for _ in plan.subtrees[comm.rank]]
    comm.Barrier()
    if comm.rank == 0:
        time.sleep(0.6)
    began = time.monotonic()
    began_cpu = time.process_time()
    subtree_sums.all_reduce(rows, rows[0], group, plan)
    waited_s = time.monotonic() - began
    cpu_s = time.process_time() - began_cpu
    assert rows[0].tolist() == [sum(map(len, plan.subtrees))] * 1000
    assert comm.rank == 0 or cpu_s < waited_s / 2


def test_a_sum_is_one_collective_with_a_name(strategy):
    journal = strategy.group.journal
    before = journal.n_entered
    strategy.replicas.add([np.ones(3) for _ in strategy.own_replicas])
    assert (journal.n_entered - before, journal.entries[-1].op) == (1, "reduce")


@pytest.mark.feature(
    "tf.scope-run-reduce",
    "tf.gather-cross-replica",
    "tf.gather-least-dimension",
    "tf.gather-parts-may",
    "strategies.scope-run-reduce-gather",
    "collectives.broadcast-and-gathers",
    "input.gather-without-duplicates",
    "semantics.gather-rules",
)
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_gather_joins_in_the_order_of_replicas(strategy, axis):
    def part(replica):
        shape = [2, 2]
        shape[axis] = replica
        return torch.full(shape, float(replica))

    parts = strategy.run(part, args=(ids(strategy),))
    expected = np.concatenate([part(replica).numpy() for replica in range(5)], axis)
    assert np.array_equal(strategy.gather(parts, axis=axis).numpy(), expected)
    with pytest.raises(RuntimeError, match="all_gather"):
        strategy.run(lambda value: strategy.gather(value, axis=0), args=(parts,))
    with pytest.raises(ValueError, match="dimension"):
        strategy.gather(ids(strategy), axis=0)


@pytest.mark.feature(
    "tf.thread-begins-only",
    "tf.scope-cross-replica",
    "tf.run-puts-function",
    "tf.replicacontext-replica-id",
    "semantics.contexts",
    "semantics.replica-context",
)
def test_replica_context(strategy):
    seen = []

    def fn(replica):
        context = hpcdist.get_replica_context()
        assert context.replica_id_in_sync_group == replica
        assert (context.num_replicas_in_sync, context.strategy) == (5, strategy)
        seen.append(replica)
        assert not hpcdist.in_cross_replica_context()

    strategy.run(fn, args=(ids(strategy),))
    assert tuple(seen) == ids(strategy).values
    with strategy.scope():
        assert hpcdist.get_replica_context() is None
        assert hpcdist.in_cross_replica_context()
    outside = hpcdist.get_replica_context()
    assert (outside.replica_id_in_sync_group, outside.num_replicas_in_sync) == (0, 1)
    assert not hpcdist.has_strategy()


@pytest.mark.feature("tf.all-reduce-takes")
def test_all_reduce_and_all_gather_in_replicas(strategy):
    def fn(replica):
        context = hpcdist.get_replica_context()
        sums = context.all_reduce("sum", {"a": torch.ones(3) * replica, "b": (np.ones(2),)})
        mean = context.all_reduce("MEAN", float(replica))
        joined = context.all_gather(torch.full((replica, 2), float(replica)), axis=0)
        return [sums["a"].tolist(), sums["b"][0].tolist(), mean, joined.tolist()]

    sums, ones, mean, joined = collect(strategy, fn)
    assert sums == [[10, 10, 10]]
    assert ones == [[5, 5]]
    assert mean == [2]
    expected = []
    for replica in range(5):
        expected += [[replica] * 2] * replica
    assert joined == [expected]


@pytest.mark.feature("tf.all-reduce-gradient", "semantics.all-reduce-in-replicas")
def test_gradients_flow_through_all_reduce_and_all_gather(strategy):
    """Also the proof that a backward may wait in its middle while other replicas go on."""

    def fn(replica):
        context = hpcdist.get_replica_context()
        x = torch.full((2,), float(replica), requires_grad=True)
        total = context.all_reduce("sum", x * x)
        rows = context.all_gather(x, axis=0)
        ((replica + 1) * total.sum() + rows.sum() * 3).backward()
        return x.grad

    gradients = strategy.run(fn, args=(ids(strategy),))
    for replica, gradient in zip(ids(strategy).values, gradients.values, strict=True):
        assert gradient.tolist() == [15 * 2 * replica + 5 * 3] * 2


@pytest.mark.feature("tf.merge-call-leads", "tf.merge-call-waits", "semantics.contexts", "semantics.merge-call")
def test_merge_call(strategy, comm):
    def merge(merge_strategy, value, *, name):
        assert merge_strategy is strategy
        assert hpcdist.get_replica_context() is None
        return strategy.reduce("sum", value, axis=None), value, name

    def fn(replica):
        total, replica_value, name = hpcdist.get_replica_context().merge_call(
            merge, args=(replica,), kwargs={"name": "n"}
        )
        return (total, replica_value, name) == (10, replica, "n")

    assert (
        strategy.experimental_local_results(strategy.run(fn, args=(ids(strategy),)))
        in [(True,) * n for n in range(1, 6)]
        or strategy.run(fn, args=(ids(strategy),)) is True
    )


@pytest.mark.feature("tf.merge-call-inside", "semantics.merge-call")
def test_merge_calls_in_loops_and_conditions(strategy):
    def add(strategy, replica_values):
        return strategy.reduce("sum", replica_values, axis=None)

    def fn(replica):
        context = hpcdist.get_replica_context()
        total = replica
        for _ in range(3):
            if total < 50:
                total = context.merge_call(add, args=(torch.tensor(total),)).item()
        return total

    totals = strategy.run(fn, args=(ids(strategy),))
    assert set(strategy.experimental_local_results(totals)) == {50}


def at_zero(strategy):
    """Return a model whose weights are zero, and what steps it by its gradients."""
    with strategy.scope():
        model = nn.Linear(2, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    nn.init.zeros_(model.weight)
    return model, optimizer


def test_a_step_in_a_merge_call_is_made_once(strategy):
    model, optimizer = at_zero(strategy)

    def fn(replica):
        optimizer.zero_grad()
        model(torch.ones(1, 2) * replica).sum().backward()
        hpcdist.get_replica_context().merge_call(lambda strategy: optimizer.step())

    strategy.run(fn, args=(ids(strategy),))
    assert model.weight.tolist() == [[-10, -10]]


def test_each_replica_clips_its_own_copy(strategy):
    model, optimizer = at_zero(strategy)

    def fn(replica):
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        assert model.weight.grad.tolist() == [[5, 5]]
        model.weight.grad.mul_(0.5)
        optimizer.step()
        return model.weight.grad

    gradients = strategy.run(fn, args=(ids(strategy),))
    assert model.weight.tolist() == [[-2.5, -2.5]]
    assert [value.tolist() for value in gradients.values] == [[[2.5, 2.5]]] * len(gradients.values)


def test_a_second_backward_adds_its_own_sum(strategy):
    with strategy.scope():
        model = nn.Linear(2, 1)

    def fn(replica):
        model(torch.ones(1, 2)).sum().backward()
        model(torch.ones(1, 2) * replica).sum().backward()
        return model.weight.grad

    for number in (1, 2):
        gradients = strategy.run(fn, args=(ids(strategy),))
        assert all(value.tolist() == [[15 * number, 15 * number]] for value in gradients.values)


def test_each_sum_is_seen_before_the_next_one_overwrites_it(strategy):
    """Replica 0 is at its second backward before the others have looked at the first sum."""
    with strategy.scope():
        model = nn.Linear(2, 1, bias=False)

    def fn(replica):
        model(torch.ones(1, 2)).sum().backward()
        first = model.weight.grad.tolist()
        model.zero_grad()
        model(torch.ones(1, 2) * (replica + 1)).sum().backward()
        return [first, model.weight.grad.tolist()]

    assert collect(strategy, fn) == [[[[5, 5]]], [[[15, 15]]]]


def test_what_is_brought_to_a_merge_is_the_replica_s_own(strategy):
    with strategy.scope():
        model = nn.BatchNorm1d(1, momentum=1.0)

    def fn(replica):
        model(torch.tensor([[float(replica)], [float(replica)]]))
        return [hpcdist.get_replica_context().all_gather(model.running_mean, axis=0).tolist()]

    assert collect(strategy, fn) == [[[0, 1, 2, 3, 4]]]


def test_a_loss_built_in_the_step_does_not_plan_anew(strategy):
    with strategy.scope():
        model = nn.Linear(2, 3)

        def fn(replica):
            model.zero_grad()
            scores = model(torch.ones(1, 2))
            nn.CrossEntropyLoss(reduction="sum")(scores, torch.tensor([replica % 3])).backward()
            return [model.bias.grad.sum().item()]

        for _ in range(2):
            assert collect(strategy, fn)[0] == [pytest.approx(0, abs=1e-5)]


@pytest.mark.parametrize("n_replicas", [5, None])
def test_modules_built_in_a_run_are_the_replica_s_own_until_they_are_stepped(comm, n_replicas):
    strategy = Strategy(num_replicas=n_replicas)

    def fn(steps):
        model.zero_grad()
        weighted = nn.CrossEntropyLoss(torch.ones(3))
        local_layer = nn.Linear(3, 3)
        copied = copy.deepcopy(model)
        weighted(local_layer(copied(model(torch.ones(1, 3)))), torch.tensor([0])).backward()
        if steps:
            torch.optim.SGD(local_layer.parameters(), lr=0.1).step()

    with strategy.scope():
        model = nn.Linear(3, 3)
        strategy.run(fn, args=(False,))
        assert list(strategy.engine.managed.modules) == [model]
        strategy.run(fn, args=(False,))
        assert strategy.engine.planner.has_plan
        if strategy.num_replicas_in_sync > 1:
            with pytest.raises(GradientError, match=r"strategy.run"):
                strategy.run(fn, args=(True,))


def test_run_in_a_merge_call_is_refused(strategy):
    def fn():
        hpcdist.get_replica_context().merge_call(lambda strategy: strategy.run(lambda: None))

    with pytest.raises(RuntimeError, match="outside strategy.run"):
        strategy.run(fn)


def test_unused_parameters_and_replicas_without_rows(strategy):
    with strategy.scope():
        model = nn.ModuleDict({"used": nn.Linear(2, 1), "by one": nn.Linear(2, 1), "never": nn.Linear(2, 1)})

    def fn(replica):
        out = model["used"](torch.ones(0 if replica == 4 else 1, 2)).sum()
        (out + model["by one"](torch.ones(1, 2)).sum() if replica == 1 else out).backward()

    strategy.run(fn, args=(ids(strategy),))
    assert model["used"].weight.grad.tolist() == [[4, 4]]
    assert model["by one"].weight.grad.tolist() == [[1, 1]]
    assert model["never"].weight.grad is None


@pytest.mark.feature("tf.error-replica-stops")
@pytest.mark.parametrize("stage", ["in the forward", "after the backward"])
def test_an_error_in_all_replicas_leaves_nothing_behind(strategy, stage):
    with strategy.scope():
        model = nn.Linear(2, 1)

    def fn(replica, fails):
        model.zero_grad()
        out = model(torch.ones(1, 2))
        if fails and stage == "in the forward" and replica == strategy.experimental_local_results(replica_ids)[-1]:
            raise KeyError("once")
        out.sum().backward()
        if fails and stage == "after the backward":
            raise KeyError("once")

    replica_ids = ids(strategy)
    strategy.run(fn, args=(replica_ids, False))
    with pytest.raises(KeyError, match="once"):
        strategy.run(fn, args=(ids(strategy), True))
    strategy.run(fn, args=(ids(strategy), False))
    assert model.weight.grad.tolist() == [[5, 5]]


@pytest.mark.feature("training.custom-loops")
def test_a_gan_s_two_optimizers(strategy):
    """Two models, each stepped by its own optimizer on gradients that reach both."""
    with strategy.scope():
        generator = nn.Linear(1, 1, bias=False)
        two = nn.Linear(1, 1, bias=False)
        first, second = (torch.optim.SGD(model.parameters(), lr=0.1) for model in (generator, two))
    nn.init.ones_(generator.weight)
    nn.init.ones_(two.weight)

    def fn(replica):
        x = torch.full((1, 1), float(replica))
        second.zero_grad()
        two(generator(x).detach()).sum().backward()
        second.step()
        first.zero_grad()
        two(generator(x)).sum().backward()
        first.step()

    strategy.run(fn, args=(ids(strategy),))
    assert two.weight.item() == pytest.approx(1 - 0.1 * 10, abs=1e-6)
    assert generator.weight.item() == pytest.approx(1 - 0.1 * 10 * two.weight.item(), abs=1e-6)


def test_replicas_draw_their_own_numbers_and_code_outside_the_same_ones(strategy, comm):
    with strategy.scope():
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def fn(replica):
        first = torch.rand(1)
        optimizer.zero_grad()
        model(torch.ones(1, 1)).sum().backward()
        return first, torch.rand(1)

    model(torch.ones(1, 1))
    before = torch.rand(1).item()
    draws = strategy.run(fn, args=(ids(strategy),))
    numbers = []
    for value in itertools.chain.from_iterable(draw.values for draw in draws):
        numbers.append(value.item())
    assert len(set(sum(comm.allgather(numbers), []))) == 10
    assert len(set(comm.allgather((before, torch.rand(1).item())))) == 1


@pytest.mark.feature("debugging.determinism")
def test_numbers_are_keyed_without_a_model(comm):
    """What a replica draws depends on seed, step and replica: not on ranks, nor on what was drawn before the run."""

    def draw(strategy):
        torch.manual_seed(7)
        torch.rand(comm.rank)
        draws = strategy.run(lambda: torch.rand(1).item()).values
        outside = [torch.rand(1).item()]
        with strategy.scope():
            model = nn.Linear(1, 1)
        strategy.run(lambda: model(torch.ones(1, 1)))
        return draws, [*outside, torch.rand(1).item()]

    replica_draws, outside = draw(Strategy(num_replicas=bits.N_REPLICAS))
    alone_found, alone_outside = draw(alone())
    assert sum(comm.allgather(replica_draws), ()) == alone_found
    assert outside == alone_outside
    assert len({*alone_found, *outside}) == bits.N_REPLICAS + 2


def test_replicas_draw_their_own_numbers_without_a_model(comm):
    """Where the number of replicas is that of the ranks too; once a model comes, nothing is drawn twice."""

    def draw():
        torch.manual_seed(7)
        strategy = Strategy()
        first_draw = strategy.run(lambda: torch.rand(1).item())
        with strategy.scope():
            model = nn.Linear(1, 1)
        return [first_draw, strategy.run(lambda: (model(torch.ones(1, 1)), torch.rand(1).item())[1])]

    numbers = comm.allgather(draw())
    assert len(set(sum(numbers, []))) == 2 * comm.size
    assert comm.allgather(draw()) == numbers


def test_an_error_in_a_run_does_not_keep_the_strategy_alive(comm):
    """It holds the frames in which the model is, whose hooks hold the strategy."""

    def fail_in_run():
        strategy = Strategy(num_replicas=2 * comm.size)
        with strategy.scope():
            model = nn.Linear(1, 1)

        def step():
            model(torch.ones(1, 1)).sum().backward()
            raise KeyError("mine")

        with pytest.raises(KeyError):
            strategy.run(step)
        return weakref.ref(strategy)

    reference = fail_in_run()
    owners.collect_garbage()
    assert reference() is None


@pytest.mark.parametrize("n_replicas", [None, 7])
def test_numbers_go_on_after_an_error_and_a_seed_set_meanwhile_is_used(comm, n_replicas):
    def draw():
        numbers.append(torch.rand(1).item())

    def fail():
        draw()
        raise KeyError("mine")

    numbers = []
    strategy = Strategy(num_replicas=n_replicas)
    strategy.run(draw)
    with pytest.raises(KeyError):
        strategy.run(fail)
    strategy.run(draw)
    assert len(set(numbers)) == len(numbers)
    torch.manual_seed(5)
    if n_replicas is None:
        with strategy.scope():
            model = nn.Linear(1, 1)
        strategy.run(lambda: model(torch.ones(1, 1)))
        assert len(set(comm.allgather(torch.rand(1).item()))) == comm.size


@pytest.mark.feature("collectives.accumulation-without-sync")
def test_what_takes_one_replica_per_rank_is_refused(strategy, comm):
    with strategy.scope():
        model = nn.Linear(2, 1)
    strategy.run(lambda: model(torch.ones(1, 2)).sum().backward())
    n_local = len(ids(strategy).values)
    if n_local > 1:
        with pytest.raises(GradientError, match=f"this rank has {n_local} replicas"):
            model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(ValueError, match=f"this rank's {n_local} replicas"):
        strategy.reduce("sum", 1.0, axis=None)
    with pytest.raises(RuntimeError, match="outside strategy.run"):
        strategy.run(lambda: strategy.run(lambda: None))


def test_parameters_on_a_device_take_one_replica_per_rank(strategy):
    if len(ids(strategy).values) > 1:
        slot = types.SimpleNamespace(name="weight", device=torch.device("meta"))
        with pytest.raises(GradientError, match="'weight'"):
            strategy.engine.backward.require_host([slot])


@pytest.mark.parametrize("n_replicas", [4, 7])
def test_uneven_blocks_of_replicas(comm, n_replicas):
    """Also one replica on some ranks and several on others."""
    strategy = Strategy(num_replicas=max(n_replicas, comm.size))
    with strategy.scope():
        model = nn.Sequential(nn.Linear(2, 1), nn.BatchNorm1d(1))
    for _ in range(2):
        model.zero_grad()
        strategy.run(lambda replica: model[0](torch.ones(1, 2) * replica).sum().backward(), args=(ids(strategy),))
        assert model[0].weight.grad[0, 0] == sum(range(strategy.num_replicas_in_sync))


def test_fewer_replicas_than_ranks_are_refused_on_all(comm):
    if comm.size > 1:
        with pytest.raises(ConfigurationError, match=f"at least the {comm.size} ranks, got {comm.size - 1}"):
            Strategy(num_replicas=comm.size - 1)


@pytest.mark.feature(
    "tf.merge-points-must", "tf.other-calls-another", "semantics.merge-call", "semantics.all-reduce-in-replicas"
)
def test_replicas_that_do_not_agree_are_named(strategy):
    replica_ids = ids(strategy).values
    strategy.run(lambda: None)  # the first one takes all ranks
    if len(replica_ids) < 2:
        return

    def other_calls(replica):
        context = hpcdist.get_replica_context()
        if replica == replica_ids[0]:
            return context.all_reduce("sum", 1.0)
        return context.all_gather(torch.ones(1), axis=0)

    with pytest.raises(
        DesyncError, match=f"expected replica {replica_ids[1]} at an all_reduce, as replica {replica_ids[0]}"
    ):
        strategy.run(other_calls, args=(ids(strategy),))
    with pytest.raises(ValueError, match="structure.*replica"):
        strategy.run(lambda replica: (1, 2) if replica == replica_ids[0] else [1, 2], args=(ids(strategy),))
    with pytest.raises(ValueError, match="got tuple, int"):
        strategy.run(lambda replica: (1, 2) if replica == replica_ids[0] else 1, args=(PerReplica(replica_ids),))

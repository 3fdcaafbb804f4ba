"""Every replica's part of every global batch: uneven inputs, policies, options, and datasets from a function."""

import itertools
import random
import time

import h5py
import numpy as np
import pytest
import torch

import hpcdist
from hpcdist.data import counted_steps
from hpcdist.data.dataset import Dataset
from hpcdist.data.distributed import DistributedDataset
from hpcdist.data.from_function import DistributedFromFunction, contexts_of, datasets_of
from hpcdist.data.iterator import Delivery
from hpcdist.data.rows import TensorSpec
from hpcdist.errors import DataError
from hpcdist.plan.blocks import block_bounds
from hpcdist.strategy.base import Strategy


def random_case(number):
    """Return (rows, global batch, replicas, ranks, drop_remainder, random numbers) of one of the cases."""
    rng = random.Random(number)
    n_replicas = rng.randint(1, 9)
    rows = rng.choice([0, 1, rng.randint(2, 40)])
    return rows, rng.randint(1, 15), n_replicas, rng.randint(1, n_replicas), rng.random() < 0.3, rng


def values_of(n_rows):
    return np.arange(n_rows) * 2 + 1


def dataset_of(rows, rng):
    """Return rows in one of the ways that they come in, each with its number and a value."""
    numbers = np.arange(rows), values_of(rows)
    if rng.random() < 0.3 and rows:
        dataset = Dataset.from_generator(lambda: zip(*numbers, strict=True))
    else:
        dataset = Dataset.from_tensor_slices(numbers)
    if rng.random() < 0.5:
        return dataset.shuffle(buffer_size=7, seed=rng.randint(0, 9))
    return dataset


def on_ranks(dataset, n_replicas, n_ranks):
    """Return the distributed dataset of every rank, with replicas dealt out in blocks."""
    places = [range(*block_bounds(n_replicas, n_ranks, rank)) for rank in range(n_ranks)]
    delivery = Delivery(wrap=list)
    return [DistributedDataset(dataset, place, n_replicas, delivery, random_seed=1) for place in places]


def steps_of(distributed, n_steps=None):
    """Return, step by step, the parts of all replicas. Ranks that do not end together fail."""
    steps = []
    iterators = list(map(iter, distributed))
    while n_steps is None or len(steps) < n_steps:
        elements = [iterator.get_next_as_optional() for iterator in iterators]
        if not any(element.has_value() for element in elements):
            return steps
        steps.append(list(itertools.chain.from_iterable(element.get_value() for element in elements)))
    return steps


def rows_in(steps):
    rows = []
    for part in itertools.chain.from_iterable(steps):
        rows += part[0].tolist()
    return rows


def lists(parts):
    return [part.tolist() for part in parts]


@pytest.mark.feature(
    "tf.many-steps-global",
    "tf.drop-remainder-static",
    "input.gather-without-duplicates",
    "semantics.splitting-of-batches",
    "semantics.dropped-remainders",
    "complaints.last-uneven-batch",
    "complaints.metrics-without-padding",
)
@pytest.mark.parametrize("first", range(0, 1000, 100))
def test_uneven_inputs_every_sample_once_and_exact_metrics(first):
    for number in range(first, first + 100):
        rows, batch, n_replicas, n_ranks, is_dropping, rng = random_case(number)
        dataset = dataset_of(rows, rng).batch(batch, is_dropping)
        distributed = on_ranks(dataset, n_replicas, n_ranks)
        for _ in range(2):
            steps = steps_of(distributed)
            seen = rows_in(steps)
            n_retained = rows - rows % batch if is_dropping else rows
            assert len(set(seen)) == len(seen) == n_retained, number
            assert is_dropping or sorted(seen) == list(range(rows)), number
            if is_dropping:
                n_steps = rows // batch
            else:
                n_steps = -(-rows // batch)
            assert len(steps) == n_steps, number
            # a metric: sums and counts of the replicas, added up
            sums = sum(int(part[1].sum()) for part in itertools.chain.from_iterable(steps))
            counts = sum(len(part[1]) for part in itertools.chain.from_iterable(steps))
            assert (sums, counts) == (sum(values_of(rows)[seen]), n_retained), number
            assert all(len(part[0]) <= -(-batch // n_replicas) for part in itertools.chain.from_iterable(steps)), number


@pytest.mark.feature("input.data-cursor", "complaints.resume-on-another-count")
@pytest.mark.parametrize("first", range(0, 400, 100))
def test_restart_in_mid_epoch_on_other_ranks_with_another_batch(first):
    for number in range(first, first + 100):
        rows, batch, n_replicas, n_ranks, _, rng = random_case(number)
        dataset = dataset_of(rows, rng).repeat(2)
        before = on_ranks(dataset.batch(batch), n_replicas, n_ranks)
        seen = rows_in(steps_of(before, rng.randint(0, 2 * rows // batch)))
        states = [rank_dataset.state_dict() for rank_dataset in before]
        assert all(state == states[0] for state in states)
        after = on_ranks(dataset.batch(rng.randint(1, 9)), rng.choice([1, 2, 5]), 1)
        after[0].load_state_dict(states[0])
        assert seen + rows_in(steps_of(after)) == rows_in(steps_of(on_ranks(dataset.batch(batch), 1, 1))), number


@pytest.mark.parametrize("is_shuffled", [False, True])
def test_a_pass_that_was_loaded_in_the_middle_can_be_left(is_shuffled):
    """The next iterator then begins the pass that a run without a restart would begin."""
    dataset = Dataset.from_tensor_slices(np.arange(10))
    dataset = (dataset.shuffle(seed=3) if is_shuffled else dataset).batch(4)
    unbroken, resumed = (DistributedDataset(dataset, range(1), 1) for _ in range(2))
    next(iter(unbroken))
    resumed.load_state_dict(unbroken.state_dict())
    resumed.leave_pass()
    assert lists(resumed) == lists(unbroken)


@pytest.mark.parametrize(("drop", "expected"), [(False, [4, 4, 2, 4, 4, 2]), (True, [4, 4, 4, 4])])
def test_the_rows_of_a_global_batch_are_known(drop, expected):
    distributed = DistributedDataset(Dataset.range(10).batch(4, drop_remainder=drop).repeat(2), range(1, 2), 3)
    assert [distributed.global_rows for _ in distributed] == expected
    next(iter(distributed))
    iterator = iter(distributed)  # of the next pass, while that one was left in the middle
    assert [distributed.global_rows for _ in iterator] == expected


def test_an_empty_part_looks_like_the_others():
    dataset = Dataset.from_tensor_slices({"x": np.zeros((1, 3), np.float32)}).map(lambda row: (row["x"][:2], 5))
    part = next(iter(DistributedDataset(dataset.batch(4), range(2, 3), 3)))
    assert part[0].shape == (0, 2)
    assert part[0].dtype == np.float32
    assert part[1].shape == (0,)


def test_an_error_on_an_empty_part_points_at_drop_remainder():
    whole = torch.ones(1, 2)
    empty = next(iter(DistributedDataset(Dataset.from_tensor_slices(whole).batch(4), range(1, 2), 2)))
    with pytest.raises(RuntimeError, match="drop_remainder=True"):
        Strategy().run(lambda x: x.max(), args=(empty,))
    with pytest.raises(IndexError) as raised:
        Strategy().run(lambda x: x[5], args=(whole,))
    assert not hasattr(raised.value, "__notes__")
    mapped = Dataset.from_tensor_slices(whole).batch(4).map(lambda x: x.max())
    with pytest.raises(RuntimeError, match="drop_remainder=True"):
        next(iter(DistributedDataset(mapped, range(1, 2), 2)))


def test_several_local_replicas_need_what_joins_their_parts():
    dataset = Dataset.from_tensor_slices(np.arange(4)).batch(4)
    rows = []
    joined = DistributedDataset(dataset, range(1, 3), 3, Delivery(on_batch=rows.append, wrap=tuple))
    assert [tuple(part.tolist() for part in step) for step in joined] == [([2, 3], [])]
    assert rows == [[2, 0], None]
    with pytest.raises(DataError, match="parts.*2.*replicas"):
        DistributedDataset(dataset, range(1, 3), 3)


@pytest.mark.feature("tf.iterators-iter-next", "input.iterators")
def test_iterators():
    distributed = Strategy().experimental_distribute_dataset(Dataset.from_tensor_slices(np.arange(3)).batch(2))
    iterator = iter(distributed)
    assert iter(iterator) is iterator
    assert iterator.get_next().tolist() == [0, 1]
    assert iterator.get_next_as_optional().get_value().tolist() == [2]
    end = iterator.get_next_as_optional()
    assert not end.has_value()
    with pytest.raises(DataError, match="has_value"):
        end.get_value()
    with pytest.raises(StopIteration):
        iterator.get_next()


@pytest.mark.feature(
    "tf.iterators-distributed-datasets", "tf.drop-remainder-static", "input.iterators", "semantics.dropped-remainders"
)
def test_element_spec():
    rows = {"x": torch.zeros(6, 3), "y": np.zeros(6, np.int32)}
    dataset = Dataset.from_tensor_slices(rows)
    assert dataset.element_spec == {"x": TensorSpec((3,), torch.float32), "y": TensorSpec((), np.dtype("int32"))}
    static = DistributedDataset(dataset.batch(4, drop_remainder=True), range(1), 2)
    assert static.element_spec["x"] == iter(static).element_spec["x"] == TensorSpec((2, 3), torch.float32)
    assert DistributedDataset(dataset.batch(4), range(1), 2).element_spec["x"].shape == (None, 3)
    mapped = dataset.map(lambda row: row["x"].double()).batch(4, drop_remainder=True).map(lambda x: x.sum(1))
    assert mapped.element_spec == TensorSpec((4,), torch.float64)


@pytest.mark.feature("tf.get-per-replica", "input.input-context", "semantics.per-pipeline-datasets")
def test_input_context():
    context = hpcdist.InputContext(num_input_pipelines=2, input_pipeline_id=1, num_replicas_in_sync=4)
    assert context.get_per_replica_batch_size(64) == 16
    with pytest.raises(ValueError, match="divisible by 4"):
        context.get_per_replica_batch_size(63)
    per_replica = hpcdist.InputOptions(experimental_replication_mode=hpcdist.InputReplicationMode.PER_REPLICA)
    contexts = contexts_of(per_replica, range(2, 4), (1, 2), 4)
    assert [
        (replica_context.num_input_pipelines, replica_context.input_pipeline_id) for replica_context in contexts
    ] == [(4, 2), (4, 3)]
    assert contexts_of(None, range(2, 4), (1, 2), 4) == [context]


@pytest.mark.feature("input.input-options")
@pytest.mark.parametrize(
    "wrong",
    [
        {"experimental_per_replica_buffer_size": 0},
        {"experimental_place_dataset_on_device": True},
    ],
)
def test_input_options_refuse(wrong):
    with pytest.raises(ValueError, match="expected"):
        hpcdist.InputOptions(**wrong)


def with_policy(dataset, policy):
    options = hpcdist.Options()
    options.experimental_distribute.auto_shard_policy = policy
    return dataset.with_options(options)


@pytest.fixture
def files(tmp_path):
    """Return a pattern for three files of 5, 2 and 4 rows, which count on."""
    start = 0
    for number, n_rows in enumerate((5, 2, 4)):
        with h5py.File(tmp_path / f"part-{number}.h5", "w") as file:
            file["x"] = np.arange(start, start + n_rows)
        start += n_rows
    return str(tmp_path / "part-*.h5")


OWN_FILES = [[0, 1, 2, 3, 4, 7, 8, 9, 10], [5, 6]]


@pytest.mark.feature(
    "tf.file-divides-list",
    "tf.data-every-worker",
    "tf.off-gives-everyone",
    "tf.auto-file-rows",
    "input.auto-shard-policy",
    "semantics.sharding-policies",
)
def test_shard_by_policy(files):
    policy = hpcdist.AutoShardPolicy
    rows = Dataset.from_hdf5(files, "x")

    def shards(dataset, n_shards=2):
        return [list(map(int, dataset.shard(n_shards, index))) for index in range(n_shards)]

    every_second = [list(range(0, 11, 2)), list(range(1, 11, 2))]
    assert shards(with_policy(rows, policy.FILE)) == shards(with_policy(rows, policy.AUTO)) == OWN_FILES
    assert shards(with_policy(rows, policy.DATA)) == shards(rows) == every_second
    assert shards(with_policy(rows, policy.OFF)) == [list(range(11))] * 2
    for few in (policy.FILE, policy.AUTO):
        with pytest.raises(DataError, match="4.*files"):
            with_policy(rows, few).shard(4, 0)
    stream = with_policy(Dataset.from_generator(lambda: range(11)), policy.AUTO)
    assert shards(stream) == every_second
    with pytest.raises(DataError, match="2.*files.*pipeline.*0"):
        with_policy(stream, policy.FILE).shard(2, 0)


def parts_of(dataset, n_replicas):
    whole = steps_of(on_ranks(dataset, n_replicas, n_replicas))
    return list(map(lists, whole))


@pytest.mark.feature("tf.off-gives-everyone", "input.auto-shard-policy", "semantics.sharding-policies")
@pytest.mark.parametrize("source", ["rows", "stream"])
def test_policy_off_gives_every_replica_all_rows_in_parts_of_the_global_batch(source):
    """As TensorFlow does, so that a loss divided by the global batch is a mean."""
    if source == "rows":
        rows = Dataset.from_tensor_slices(np.arange(5))
    else:
        rows = Dataset.from_generator(lambda: range(5))
    dataset = with_policy(rows, hpcdist.AutoShardPolicy.OFF)
    assert parts_of(dataset.batch(4), 2) == [[[0, 1]] * 2, [[2, 3]] * 2, [[4]] * 2]
    assert parts_of(dataset.batch(4, drop_remainder=True), 2) == [[[0, 1]] * 2, [[2, 3]] * 2]
    assert parts_of(dataset.batch(3), 2) == parts_of(dataset.batch(4), 2)
    if source == "rows":
        seven = with_policy(Dataset.from_tensor_slices(np.arange(7)), hpcdist.AutoShardPolicy.OFF)
        parts = parts_of(seven.batch(4, drop_remainder=True).repeat(2), 2)
        assert parts == [[[0, 1]] * 2, [[2, 3]] * 2] * 2, "rows of the batch that is dropped"
    distributed = DistributedDataset(dataset.batch(4, drop_remainder=True), range(1), 2)
    assert distributed.element_spec.shape == (2,)
    state = distributed.state_dict()
    assert state["batch"] == 4


@pytest.mark.feature("tf.file-divides-list", "input.auto-shard-policy", "semantics.sharding-policies")
def test_policy_file_reads_own_files_in_as_many_steps_on_all(files):
    rows = with_policy(Dataset.from_hdf5(files, "x"), hpcdist.AutoShardPolicy.FILE)
    assert parts_of(rows.batch(6), 2) == [[[0, 1, 2], [5, 6]], [[3, 4, 7], []], [[8, 9, 10], []]]
    assert parts_of(rows.batch(4, drop_remainder=True), 2) == [[[0, 1], [5, 6]]]
    assert parts_of(rows.batch(20, drop_remainder=True).repeat(), 2) == []
    mixed = parts_of(rows.shuffle(seed=1).batch(6), 2)
    assert [sorted(sum((step[replica] for step in mixed), [])) for replica in range(2)] == OWN_FILES
    with pytest.raises(DataError, match="4.*files"):
        DistributedDataset(rows.batch(4), range(1), 4)
    with pytest.raises(DataError, match="got take"):
        DistributedDataset(rows.take(3).batch(4), range(1), 2)


@pytest.mark.parametrize("n_steps", range(7))
def test_policy_file_resumes_at_the_same_step(files, n_steps):
    rows = with_policy(Dataset.from_hdf5(files, "x"), hpcdist.AutoShardPolicy.FILE)
    dataset = rows.shuffle(seed=1).batch(6).repeat(2)
    before = on_ranks(dataset, 2, 2)
    first = steps_of(before, n_steps)
    assert before[0].state_dict() == before[1].state_dict()
    after = on_ranks(dataset, 2, 1)
    after[0].load_state_dict(before[0].state_dict())
    resumed_steps = steps_of(after)
    assert list(map(lists, first + resumed_steps)) == parts_of(dataset, 2)
    with pytest.raises(DataError, match="file_shards.*2.*3"):
        on_ranks(dataset, 3, 1)[0].load_state_dict(before[0].state_dict())


def hinted(rows, policy=hpcdist.AutoShardPolicy.HINT):
    return with_policy(rows.shard(hpcdist.SHARD_HINT, hpcdist.SHARD_HINT), policy)


@pytest.mark.feature("tf.hint-puts-real", "input.auto-shard-policy")
def test_policy_hint_puts_the_real_shard_in_the_marked_place():
    seen = []
    rows = hinted(Dataset.from_tensor_slices(np.arange(11)).map(lambda x: seen.append(int(x)) or x).cache())
    assert parts_of(rows.batch(4), 2) == [[[0, 2], [1, 3]], [[4, 6], [5, 7]], [[8, 10], [9]]]
    assert sorted(seen) == list(range(11))
    assert parts_of(rows.batch(7, drop_remainder=True), 3) == [[[0, 3, 6], [1, 4, 7], [2, 5, 8]]]
    assert parts_of(rows.batch(4), 1) == [[[0, 1, 2, 3]], [[4, 5, 6, 7]], [[8, 9, 10]]]
    mixed = parts_of(rows.shuffle(seed=1).batch(4).repeat(2), 2)
    rows_by_replica = [sum((step[replica] for step in mixed), []) for replica in range(2)]
    assert list(map(sorted, rows_by_replica)) == [
        sorted([*range(0, 11, 2)] * 2),
        sorted([*range(1, 11, 2)] * 2),
    ]
    assert rows_by_replica[1] != sorted(rows_by_replica[1])
    assert parts_of(hinted(Dataset.from_tensor_slices(np.arange(1))).batch(2), 2) == [[[0], []]]


@pytest.mark.parametrize("n_steps", range(5))
def test_policy_hint_resumes_at_the_same_step(n_steps):
    dataset = hinted(Dataset.from_tensor_slices(np.arange(11))).shuffle(seed=1).batch(6).repeat(2)
    before = on_ranks(dataset, 2, 2)
    first = steps_of(before, n_steps)
    after = on_ranks(dataset, 2, 1)
    after[0].load_state_dict(before[0].state_dict())
    assert list(map(lists, first + steps_of(after))) == parts_of(dataset, 2)
    with pytest.raises(DataError, match="hint_shards.*2.*3"):
        on_ranks(dataset, 3, 1)[0].load_state_dict(before[0].state_dict())
    plain = Dataset.from_tensor_slices(np.arange(11)).shuffle(seed=1).batch(6)
    with pytest.raises(DataError, match="hint_shards.*2.*None"):
        on_ranks(plain, 2, 1)[0].load_state_dict(before[0].state_dict())


@pytest.mark.feature("tf.hint-puts-real")
def test_a_marked_shard_and_the_policy_hint_go_together():
    rows = Dataset.from_tensor_slices(np.arange(4))
    marked = rows.shard(hpcdist.SHARD_HINT, hpcdist.SHARD_HINT)
    for wrong in (marked, hinted(rows, hpcdist.AutoShardPolicy.DATA)):
        with pytest.raises(DataError, match="shard.*numbers"):
            DistributedDataset(wrong.batch(2), range(1), 2)
    with pytest.raises(DataError, match="policy.*alone"):
        DistributedDataset(with_policy(rows, hpcdist.AutoShardPolicy.HINT).batch(2), range(1), 2)
    with pytest.raises(DataError, match="shard.*alone"):
        list(hinted(rows))
    with pytest.raises(DataError, match="shard.*alone"):
        from_function(lambda context: hinted(rows).batch(2), 1)
    with pytest.raises(DataError, match="marked.*second"):
        marked.shard(-1, -1)
    with pytest.raises(DataError, match="index.*0"):
        rows.shard(hpcdist.SHARD_HINT, 0)
    with pytest.raises(DataError, match="SHARD_HINT"):
        Dataset.from_generator(lambda: range(3)).shard(-1, -1)
    with pytest.raises(DataError, match="AutoShardPolicy.HINT.*take"):
        DistributedDataset(hinted(rows).take(2).batch(2), range(1), 2)


def from_function(dataset_fn, n_ranks):
    """Return the distributed datasets of ranks that are stepped in turn, and what they told `agree_end`."""
    outs = []

    def agree(is_out, ends_with_first):
        outs.append(is_out)
        return is_out

    rank_datasets = []
    for r in range(n_ranks):
        rank_datasets.append(datasets_of(dataset_fn, contexts_of(None, range(r, r + 1), (r, n_ranks), n_ranks)))
    return [
        DistributedFromFunction(datasets, range(1), n_ranks, Delivery(agree_end=agree)) for datasets in rank_datasets
    ], outs


@pytest.mark.feature(
    "tf.distribute-datasets-function", "input.datasets-from-function", "semantics.per-pipeline-datasets"
)
def test_datasets_from_a_function_are_left_as_they_are():
    def dataset_fn(context):
        rows = Dataset.from_tensor_slices(np.arange(7)).shard(context.num_input_pipelines, context.input_pipeline_id)
        return rows.batch(context.get_per_replica_batch_size(4))

    (first, second), outs = from_function(dataset_fn, 2)
    assert lists(first) == [[0, 2], [4, 6]]
    assert lists(second) == [[1, 3], [5]]
    assert outs == [False, False, True] * 2


@pytest.mark.feature("semantics.end-of-data")
def test_a_rank_that_is_out_of_data_gets_empty_parts_until_all_are():
    answers = iter([False, False, False, True])
    rows = Dataset.from_tensor_slices(torch.ones(2, 3)).batch(2)
    seen = []
    delivery = Delivery(on_batch=seen.append, agree_end=lambda is_out, ends_with_first: next(answers))
    distributed = DistributedFromFunction([rows], range(1), 2, delivery)
    assert [tuple(part.shape) for part in distributed] == [(2, 3), (0, 3), (0, 3)]
    assert seen == [[2], [0], [0], None]


def test_a_rank_without_any_row_needs_a_signature():
    nothing = Dataset.from_generator(lambda: iter([])).batch(2)
    with pytest.raises(DataError, match="output_signature"):
        list(DistributedFromFunction([nothing], range(1), 2, Delivery(agree_end=lambda is_out, ends_with_first: False)))
    answers = iter([False, True])
    shaped = Dataset.from_generator(lambda: iter([]), output_signature=torch.zeros(3)).map(lambda x: x.double())
    delivery = Delivery(agree_end=lambda is_out, ends_with_first: next(answers))
    parts = list(DistributedFromFunction([shaped.batch(2)], range(1), 2, delivery))
    assert [(part.shape, part.dtype) for part in parts] == [((0, 3), torch.float64)]


def test_local_replicas_take_turns_at_the_batches_of_their_rank():
    rows = Dataset.from_tensor_slices(np.arange(5)).batch(1)
    distributed = DistributedFromFunction([rows], range(2), 2, Delivery(wrap=list))
    assert list(map(lists, distributed)) == [[[0], [1]], [[2], [3]], [[4], []]]


def test_ranks_tell_each_other_while_they_read_what_a_restart_drops(monkeypatch):
    """Others would take a rank for dead that has more to read than they have."""
    monkeypatch.setattr(counted_steps, "_DROP_S", 0.05)
    outs = []

    def agree(is_out, ends_with_first):
        outs.append((is_out, ends_with_first))
        return is_out

    def draw():
        for row in range(12):
            time.sleep(0.02)
            yield row

    rows = Dataset.from_generator(draw).batch(1)
    distributed = DistributedFromFunction([rows], range(1), 2, Delivery(agree_end=agree))
    distributed.load_state_dict({"n_replicas": 2, "seed": 1, "passes": 0, "steps": 10})
    assert lists(distributed) == [[10], [11]]
    waits = [out for out in outs if out == (False, False)]
    assert len(waits) - 2 >= 2, "beside those of the two steps"


@pytest.mark.parametrize("is_stream", [False, True])
def test_the_steps_of_a_function_resume(is_stream):
    def make():
        if is_stream:
            rows = Dataset.from_generator(lambda: range(6))
        else:
            rows = Dataset.from_tensor_slices(np.arange(6))
        return DistributedFromFunction([rows.shuffle(6, seed=1).batch(2)], range(1), 1)

    whole = make()
    unbroken = []
    for _ in range(2):
        unbroken.append(lists(whole))
    assert unbroken[0] != unbroken[1]
    before = make()
    list(before)
    next(iter(before))
    after = make()
    after.load_state_dict(before.state_dict())
    assert lists(after) == unbroken[1][1:]
    with pytest.raises(DataError, match="expected 1 replicas"):
        DistributedFromFunction([Dataset.from_tensor_slices(np.arange(2)).batch(1)], range(1), 2).load_state_dict(
            before.state_dict()
        )


def test_drawn_seeds_follow_from_one_that_is_in_the_cursor():
    def make(replica):
        rows = Dataset.from_tensor_slices(np.arange(30)).shuffle().batch(30)
        return DistributedFromFunction([rows], range(replica, replica + 1), 2)

    first = make(0)
    second = make(1)
    resumed = make(1)
    first.set_seed(5), second.set_seed(5)
    resumed.load_state_dict(first.state_dict())
    (first_batch,) = first
    (two,) = second
    (three,) = resumed
    assert first_batch.tolist() != two.tolist() == three.tolist()
    seeded_dataset = Dataset.from_tensor_slices(np.arange(30)).shuffle(seed=3).batch(30)
    assert (
        next(iter(DistributedFromFunction([seeded_dataset], range(1), 1))).tolist()
        == next(iter(seeded_dataset)).tolist()
    )


def test_a_function_must_return_a_batched_dataset():
    for wrong in (lambda context: [1], lambda context: Dataset.from_tensor_slices(np.arange(3))):
        with pytest.raises(DataError, match=r"batch\(per_replica_batch\)"):
            Strategy().distribute_datasets_from_function(wrong)


@pytest.mark.feature("tf.experimental-make-numpy", "strategies.numpy-dataset")
def test_numpy_datasets():
    for make in (Strategy().experimental_make_numpy_dataset, Strategy().make_experimental_numpy_dataset):
        assert list(map(int, make(np.arange(3)))) == [0, 1, 2]


@pytest.mark.parametrize(
    "make",
    [lambda rows: DistributedDataset(rows, range(1), 1), lambda rows: DistributedFromFunction([rows], range(1), 1)],
)
def test_of_two_iterators_the_older_one_raises(make):
    """Else both would move the cursor, and a save would lose what the first one has not read."""
    distributed = make(Dataset.from_tensor_slices(np.arange(6)).batch(2))
    training = iter(distributed)
    next(training)
    peeked = next(iter(distributed))
    assert len(peeked) == 2
    state = distributed.state_dict()
    with pytest.raises(DataError, match="next.*iterator.*time"):
        next(training)
    assert distributed.state_dict() == state
    opened = iter(distributed)
    next(opened)
    distributed.load_state_dict(state)
    with pytest.raises(DataError, match="cursor.*loaded"):
        next(opened)
    assert lists(distributed) == [[2, 3], [4, 5]], "the rest of the pass of the cursor"

import itertools

import numpy as np
import pytest

from hpcdist.data.dataset import Dataset
from hpcdist.data.distributed import DistributedDataset
from hpcdist.data.iterator import Delivery
from hpcdist.errors import DataError

ROWS = np.arange(10)


def slices(n_rows=10):
    return Dataset.from_tensor_slices(np.arange(n_rows))


def lists(dataset):
    return [batch.tolist() for batch in dataset]


def parts(dataset, n_replicas, steps=None):
    """Return, step by step, the parts of all replicas."""
    rows = zip(
        *(DistributedDataset(dataset, range(replica, replica + 1), n_replicas) for replica in range(n_replicas)),
        strict=True,
    )
    return list(map(lists, itertools.islice(rows, steps)))


def test_rows_and_batches_in_order():
    assert list(map(int, slices(3))) == [0, 1, 2]
    assert lists(slices(5).batch(2)) == [[0, 1], [2, 3], [4]]
    assert lists(slices(5).batch(2, drop_remainder=True)) == [[0, 1], [2, 3]]
    assert lists(slices(3).batch(2).repeat(2)) == [[0, 1], [2], [0, 1], [2]]
    assert lists(slices(3).repeat(2).batch(2)) == [[0, 1], [2, 0], [1, 2]]


def test_nests_keep_their_form():
    pair = Dataset.from_tensor_slices({"x": np.zeros((4, 2)), "y": (np.arange(4), {"z": np.arange(4)})}).batch(3)
    first = next(iter(pair))
    assert first["x"].shape == (3, 2)
    assert first["y"][0].tolist() == first["y"][1]["z"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("n_epochs", [1, 2])
def test_a_shuffled_dataset_has_a_new_order_in_each_pass_unless_told_not_to(is_stream, n_epochs):
    def passes(**options):
        if is_stream:
            rows = Dataset.from_generator(lambda: iter(range(9)))
        else:
            rows = Dataset.from_tensor_slices(np.arange(9))
        dataset = rows.shuffle(9, seed=1, **options).repeat(n_epochs).batch(4)
        return [list(map(int, itertools.chain.from_iterable(dataset))) for _ in range(3)]

    first, second, third = passes()
    assert sorted(first) == sorted(second) == sorted([*range(9)] * n_epochs)
    assert len({tuple(first), tuple(second), tuple(third)}) == 3
    assert (first[:9] != first[9:]) or n_epochs == 1
    fixed = passes(reshuffle_each_iteration=False)
    assert fixed == [fixed[0]] * 3
    assert fixed[0] == fixed[0][:9] * n_epochs == first[:9] * n_epochs


def test_shuffle_visits_every_row_in_a_new_order_each_epoch():
    first, second = lists(slices().shuffle(seed=1).batch(10).repeat(2))
    assert sorted(first) == sorted(second) == ROWS.tolist()
    assert first != second
    assert lists(slices().shuffle(seed=1).batch(10)) == [first]
    assert lists(slices().shuffle(100, seed=2).batch(10)) != [first]
    drawn = slices().shuffle()
    assert lists(drawn.batch(10)) == lists(drawn.batch(10))


@pytest.mark.parametrize(
    "build",
    [
        lambda: Dataset.from_tensor_slices(()),
        lambda: Dataset.from_tensor_slices((np.zeros(3), np.zeros(4))),
        lambda: Dataset.from_tensor_slices(np.float32(1)),
        lambda: Dataset.from_tensor_slices("text"),
        lambda: slices().batch(0),
        lambda: slices().batch(2).batch(2),
        lambda: slices().batch(2).shuffle(),
        lambda: slices().repeat(2).shuffle(),
        lambda: slices().shuffle(buffer_size=0),
        lambda: slices().repeat(0),
        lambda: slices().repeat(-2),
        lambda: DistributedDataset(slices(), range(1), 1),
        lambda: DistributedDataset([1, 2], range(1), 1),
    ],
)
def test_refuses(build):
    with pytest.raises(DataError, match="expected"):
        build()


@pytest.mark.feature("tf.global-batch-split", "semantics.splitting-of-batches")
def test_parts_of_a_global_batch_as_in_tf_distribute():
    assert parts(slices(6).batch(4), 2) == [[[0, 1], [2, 3]], [[4], [5]]]
    assert parts(slices(4).batch(4), 3) == [[[0, 1], [2, 3], []]]
    assert parts(slices(4).batch(4), 5) == [[[0], [1], [2], [3], []]]


@pytest.mark.feature("tf.experimental-distribute-dataset", "input.distribute-dataset")
@pytest.mark.parametrize("n_replicas", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("drop_remainder", [False, True])
def test_parts_join_to_the_global_batch(n_replicas, drop_remainder):
    dataset = slices(11).shuffle(seed=4).batch(4, drop_remainder).repeat(2)
    joined = [sum(step, []) for step in parts(dataset, n_replicas)]
    assert joined == lists(dataset)


def take(distributed, n_batches):
    return [batch.tolist() for batch, _ in zip(distributed, range(n_batches), strict=False)]


def interrupted(dataset, kill_at, batch_after=None):
    """Return all batches handed out by a run that is stopped after `kill_at` batches and goes on from its cursor."""
    before = DistributedDataset(dataset, range(1), 1)
    iterator = iter(before)
    first = [next(iterator).tolist() for _ in range(kill_at)]
    after = DistributedDataset(dataset, range(1), 1)
    after.load_state_dict(before.state_dict())
    return first + lists(after)


@pytest.mark.parametrize("kill_at", range(9))
def test_a_pass_resumes_at_the_exact_sample(kill_at):
    for dataset in (slices(7).shuffle(seed=1).batch(3).repeat(3), slices(7).shuffle(seed=1).repeat(3).batch(3)):
        whole = lists(dataset)
        assert interrupted(dataset, min(kill_at, len(whole))) == whole


@pytest.mark.feature("input.data-cursor")
def test_the_cursor_does_not_depend_on_batch_size_or_replicas():
    before = DistributedDataset(slices(12).shuffle(seed=1).batch(4), range(1, 2), 2)
    iterator = iter(before)
    next(iterator)
    after = []
    for replica in range(3):
        after.append(DistributedDataset(slices(12).shuffle(seed=1).batch(2), range(replica, replica + 1), 3))
    rows = []
    for distributed in after:
        distributed.load_state_dict(before.state_dict())
    for step in zip(*after, strict=True):
        rows += sum((part.tolist() for part in step), [])
    whole = sum(lists(slices(12).shuffle(seed=1).batch(12)), [])
    assert rows == whole[4:]


@pytest.mark.parametrize(("batch", "is_said"), [(4, False), (2, True)])
def test_another_batch_size_is_said_once(batch, is_said, caplog):
    state = DistributedDataset(slices(12).batch(4), range(1), 2).state_dict()
    for replica in range(2):
        DistributedDataset(slices(12).batch(batch), range(replica, replica + 1), 2).load_state_dict(state)
    assert caplog.text.count("the global batch was 4 rows at the save and is 2 now") == is_said


def test_epochs_are_counted_and_each_pass_is_a_new_one():
    distributed = DistributedDataset(slices(5).shuffle(seed=1).batch(2), range(1), 1)
    assert distributed.epoch == 0
    first = lists(distributed)
    assert (distributed.epoch, distributed.position) == (1, 5)
    second = lists(distributed)
    assert (distributed.epoch, distributed.position) == (2, 10)
    assert [first, second] == [lists(slices(5).shuffle(seed=1).batch(2).repeat(2))[i : i + 3] for i in (0, 3)]


def test_after_a_restart_the_epoch_in_progress_is_finished_first():
    """Saved after the last batch of an epoch, before its end was reached: the loop over epochs sees it again."""
    before = DistributedDataset(slices(4).batch(2), range(1), 1)
    iterator = iter(before)
    next(iterator), next(iterator)
    assert before.epoch == 0
    after = DistributedDataset(slices(4).batch(2), range(1), 1)
    after.load_state_dict(before.state_dict())
    assert after.epoch == 0
    assert lists(after) == []
    assert after.epoch == 1
    assert lists(after) == [[0, 1], [2, 3]]


def test_a_broken_off_pass_is_not_continued_by_the_next_one():
    distributed = DistributedDataset(slices(4).batch(2), range(1), 1)
    assert take(distributed, 1) == [[0, 1]]
    assert lists(distributed) == [[0, 1], [2, 3]]
    assert distributed.position == 8


def test_a_broken_off_pass_over_several_epochs_ends_with_its_run():
    distributed = DistributedDataset(slices(5).repeat(2).batch(4), range(1), 1)
    assert take(distributed, 1) == [[0, 1, 2, 3]]
    assert list(map(len, lists(distributed))) == [4, 4, 2]


def test_reports_the_rows_it_hands_out():
    seen = []
    list(DistributedDataset(slices(6).batch(4), range(1, 2), 2, Delivery(on_batch=seen.append)))
    assert seen == [[2], [1], None]


def test_refuses_the_cursor_of_other_data():
    state = DistributedDataset(slices(5).shuffle(seed=1).batch(2), range(1), 1).state_dict()
    for changed_dataset in (slices(6).shuffle(seed=1), slices(5).shuffle(seed=2), slices(5)):
        with pytest.raises(DataError, match="checkpoint"):
            DistributedDataset(changed_dataset.batch(2), range(1), 1).load_state_dict(state)


def test_a_drawn_seed_comes_from_the_cursor():
    before = DistributedDataset(slices(50).shuffle().batch(10), range(1), 1)
    iterator = iter(before)
    first = [next(iterator).tolist()]
    after = DistributedDataset(slices(50).shuffle().batch(10), range(1), 1)
    after.load_state_dict(before.state_dict())
    assert sorted(sum(first + lists(after), [])) == list(range(50))

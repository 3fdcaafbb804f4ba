"""The plan of batches: every row once, the same steps from every cursor on, and shards as arithmetic on row numbers."""

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest

from hpcdist.data.batches import (
    Cursor,
    DividedBatches,
    Division,
    EveryNth,
    EveryNthFile,
    ShardedBatches,
    StreamPosition,
    after_batches,
    end_of_pass,
    next_pass,
    start_of_pass,
)
from hpcdist.errors import DataError
from hpcdist.plan.sample_order import UNKNOWN, SampleOrder


def rows_of(step):
    return [rows.tolist() for rows in step.rows]


def random_order(rng):
    return SampleOrder(
        rng.randint(0, 20),
        seed=rng.choice([None, 3]),
        batch_rows=rng.randint(1, 7),
        drop_remainder=rng.random() < 0.3,
        inner_epochs=rng.choice([1, 2]),
        outer_epochs=rng.choice([1, 3]),
    )


def random_plans(number, **changes):
    """Return a plan of each kind over the same rows, for all replicas."""
    rng = random.Random(number)
    order = replace(random_order(rng), **changes)
    n_replicas = rng.randint(1, 4)
    replicas = range(n_replicas)
    shards = [EveryNth(order.n_rows, n_replicas, replica) for replica in replicas]
    return DividedBatches(order, Division(replicas, n_replicas)), ShardedBatches(order, shards, replicas)


@pytest.mark.parametrize("number", range(60))
def test_a_plan_resumes_from_the_cursor_of_every_batch(number):
    for plan in random_plans(number):
        batches = list(plan.batches(Cursor()))
        for done, batch in enumerate(batches, 1):
            assert list(map(rows_of, plan.batches(batch.cursor))) == list(map(rows_of, batches[done:]))
        positions = [batch.cursor.position for batch in batches]
        assert positions == sorted(set(positions))


@pytest.mark.parametrize("number", range(60))
def test_without_drop_remainder_every_row_comes_once_per_epoch(number):
    for plan in random_plans(number, drop_remainder=False):
        seen = []
        for batch in plan.batches(Cursor()):
            seen += itertools.chain.from_iterable(rows_of(batch))
        n_epochs = int(plan.order.inner_epochs * plan.order.outer_epochs)
        assert sorted(seen) == sorted([*range(plan.order.n_rows)] * n_epochs)


def test_a_division_by_ceiling_or_none():
    assert Division(range(3), 3).bounds(4) == [(0, 2), (2, 4), (4, 4)]
    assert Division(range(1, 2), 3).bounds(4) == [(2, 4)]
    assert Division(range(2), 2, is_whole=True).bounds(4) == [(0, 4), (0, 4)]


@pytest.mark.parametrize("number", range(40))
def test_shards_of_files_hold_whole_files(number):
    rng = random.Random(number)
    rows_of_files = tuple(rng.randint(0, 4) for _ in range(rng.randint(1, 6)))
    n_shards = rng.randint(1, len(rows_of_files))
    starts = np.cumsum([0, *rows_of_files])
    seen = []
    for index in range(n_shards):
        shard = EveryNthFile(rows_of_files, n_shards, index)
        expected = []
        for file in range(index, len(rows_of_files), n_shards):
            expected += range(starts[file], starts[file + 1])
        assert shard.n_rows == sum(shard.rows_of_files) == len(expected)
        assert shard.source_rows(np.arange(shard.n_rows)).tolist() == expected
        seen += expected
    assert sorted(seen) == list(range(sum(rows_of_files)))


def test_a_cursor_inside_a_batch_of_shards_is_refused():
    shards = [EveryNth(11, 2, index) for index in range(2)]
    plan = ShardedBatches(SampleOrder(11, batch_rows=6), shards, range(2))
    with pytest.raises(DataError, match="3.*replica.*4.*samples"):
        list(plan.batches(Cursor(position=4)))


def test_passes_begin_at_runs():
    order = SampleOrder(5, batch_rows=2, inner_epochs=2)
    assert next_pass(order, Cursor(3)) == Cursor(10, 10)
    assert end_of_pass(order, Cursor(10)) == start_of_pass(order, 1) == Cursor(10, 10)
    assert after_batches(order, Cursor(), 2) == Cursor(4)
    assert after_batches(order, Cursor(), 99) == Cursor(10)
    stream = SampleOrder(UNKNOWN, batch_rows=2, inner_epochs=2)
    assert next_pass(stream, Cursor(3, 0, StreamPosition(0, 3, 3))) == Cursor(3, 3, StreamPosition(2), 2)
    assert start_of_pass(stream, 2) == Cursor(0, 0, StreamPosition(4), 4)

import itertools
import math

import numpy as np
import pytest

from hpcdist.plan.blocks import block_bounds, ceiling_bounds
from hpcdist.plan.sample_order import Mixing, SampleOrder, permutation


@pytest.mark.parametrize("bounds", [block_bounds, ceiling_bounds])
def test_blocks_tile_the_whole(bounds):
    for n_elements, n_parts in itertools.product([0, 1, 2, 7, 8, 9, 100], range(1, 18)):
        parts = [bounds(n_elements, n_parts, part) for part in range(n_parts)]
        assert parts[0][0] == 0
        assert parts[-1][1] == n_elements
        assert all(before[1] == after[0] for before, after in itertools.pairwise(parts))


def test_blocks_differ_by_at_most_one_and_long_ones_come_first():
    sizes = [stop - start for start, stop in (block_bounds(13, 5, part) for part in range(5))]
    assert sizes == [3, 3, 3, 2, 2]


@pytest.mark.feature("tf.global-batch-split")
@pytest.mark.parametrize(("n_rows", "n_parts", "sizes"), [(4, 5, [1, 1, 1, 1, 0]), (4, 3, [2, 2, 0]), (2, 2, [1, 1])])
def test_ceiling_split_of_tf_distribute(n_rows, n_parts, sizes):
    bounds = [ceiling_bounds(n_rows, n_parts, part) for part in range(n_parts)]
    assert [stop - start for start, stop in bounds] == sizes


def test_permutation_is_the_same_for_ever():
    assert permutation(1, 0, 8).tolist() == [3, 5, 2, 7, 0, 6, 1, 4]
    assert permutation(2**63 - 1, 7, 5).tolist() == [2, 3, 1, 4, 0]
    assert sorted(permutation(5, 3, 1000)) == list(range(1000))
    assert not np.array_equal(permutation(1, 0, 100), permutation(1, 1, 100))
    assert not np.array_equal(permutation(1, 0, 100), permutation(2, 0, 100))


def test_rows_are_mixed_a_window_of_chunks_at_a_time():
    assert permutation(1, 0, 8, Mixing(2, 4)).tolist() == [5, 6, 4, 7, 1, 3, 2, 0]
    n_rows = 1000
    mixing = Mixing(10, 57)
    order = permutation(4, 2, n_rows, mixing)
    assert sorted(order) == list(range(n_rows))
    assert not np.array_equal(order, permutation(4, 3, n_rows, mixing))
    chunks = order // mixing.chunk_rows
    starts = np.arange(0, n_rows, mixing.n_chunks * mixing.chunk_rows)
    windows = [set(chunks[start : start + 50].tolist()) for start in starts]
    assert list(map(len, windows)) == [5] * 20, "every chunk is in one window"
    assert sorted(permutation(4, 2, 1003, mixing)) == list(range(1003)), "the last chunk may be short"
    assert max(np.diff(sorted(windows[0]))) > 5, "the chunks of a window lie anywhere in the file"
    assert np.mean(np.diff(order[:50]) == 1) < 0.2, "the rows of a window are mixed"


def batches(order, end=None):
    position = 0
    drawn_batches = []
    end = order.n_samples if end is None else end
    while (batch := order.next_batch(position, end)) is not None:
        drawn_batches.append(batch)
        position = batch[1]
    return drawn_batches


def test_batches_end_with_the_epoch_or_run_across():
    assert batches(SampleOrder(5, batch_rows=2)) == [(0, 2), (2, 4), (4, 5)]
    assert batches(SampleOrder(5, batch_rows=2, drop_remainder=True)) == [(0, 2), (2, 4)]
    after = SampleOrder(3, batch_rows=2, outer_epochs=2)
    assert batches(after) == [(0, 2), (2, 3), (3, 5), (5, 6)]
    before = SampleOrder(3, batch_rows=2, inner_epochs=2)
    assert batches(before) == [(0, 2), (2, 4), (4, 6)]
    assert batches(SampleOrder(0, batch_rows=2, outer_epochs=math.inf)) == []
    assert batches(SampleOrder(3, batch_rows=4, drop_remainder=True, outer_epochs=math.inf)) == []


def test_every_epoch_visits_every_row_once():
    order = SampleOrder(7, seed=3, batch_rows=2, inner_epochs=3)
    rows = np.concatenate([order.rows(*batch) for batch in batches(order)])
    for epoch in range(3):
        assert sorted(rows[7 * epoch : 7 * epoch + 7]) == list(range(7))


def test_rows_depend_on_the_position_alone():
    whole = SampleOrder(7, seed=3, batch_rows=2).rows(0, 21)
    pieces = [SampleOrder(7, seed=3, batch_rows=5).rows(i, i + 1) for i in range(21)]
    assert np.concatenate(pieces).tolist() == whole.tolist()

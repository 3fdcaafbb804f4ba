"""The pure rules of what first rows of workers show."""

import itertools

import pytest

from hpcdist.data.first_rows import FirstRows, are_same_shares, different_workers, doubled_workers, random_leaves
from hpcdist.data.stream_worker import Shares

A = tuple((row, 100 + row) for row in range(8))
B = tuple((row, 200 + row) for row in range(8))
CONSTANT = ((1, 1),) * 8


def workers(is_cut, *rows):
    return [FirstRows(worker, is_cut, worker_rows) for worker, worker_rows in enumerate(rows)]


@pytest.mark.parametrize(
    ("is_cut", "rows", "expected"),
    [
        (True, [A, B, A], (0, 2)),
        (True, [A, A[:4]], (0, 1)),
        (True, [A, A[:3]], None),
        (True, [CONSTANT, CONSTANT], None),
        (True, [A, B], None),
        (False, [A, A], None),
        (True, [], None),
    ],
)
def test_workers_that_must_differ(is_cut, rows, expected):
    assert doubled_workers(workers(is_cut, *rows)) == expected


@pytest.mark.parametrize(
    ("is_cut", "rows", "random", "expected"),
    [
        (False, [A, A, A], set(), None),
        (False, [A, A[:2]], set(), None),
        (False, [A, A, B], set(), (1, 2)),
        (False, [A, B], {1}, None),
        (False, [A, B], {0}, (0, 1)),
        (False, [A, B], {0, 1}, (0, 1)),
        (False, [CONSTANT, CONSTANT], set(), None),
        (True, [A, B], set(), None),
    ],
)
def test_workers_that_must_be_equal(is_cut, rows, random, expected):
    """A leaf that is the same in all rows tells no row from another."""
    assert different_workers(workers(is_cut, *rows), random) == expected


def test_a_dataset_that_cuts_in_some_workers_only():
    mixed = [FirstRows(0, True, A), FirstRows(1, False, A)]
    assert different_workers(mixed, set()) == (0, 1)


def test_random_leaves_and_shares():
    assert random_leaves(A, B) == {1}
    assert random_leaves(A, A) == set()
    assert are_same_shares([A, A], set())
    assert not are_same_shares([A, B], set())
    assert are_same_shares([A, B], {1})
    assert are_same_shares([], set())


@pytest.mark.parametrize("is_sharded", [True, False])
def test_every_share_has_one_worker(is_sharded):
    shares = [Shares(rank, 3, 2, is_sharded) for rank in range(3)]
    numbers = []
    in_job = []
    for rank, worker in itertools.product(range(3), range(2)):
        numbers.append(shares[rank].number_of(worker))
        in_job.append(shares[rank].number_in_job(worker))
    assert sorted(in_job) == list(range(6))
    assert sorted(set(numbers)) == list(range(shares[0].n_shares))
    if is_sharded:
        n_shares = 2
    else:
        n_shares = 6
    assert shares[0].n_shares == n_shares
    assert [share.number_in_job(0) for share in shares] == [0, 1, 2], "few files are spread over ranks"

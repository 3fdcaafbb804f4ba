"""Whether the workers of a stream cut its rows rightly, as far as the first rows of each show. Pure."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

#: Rows of a worker that are compared.
N_FIRST_ROWS = 8
#: Two workers that begin with this number of equal rows read the same ones, except in files with the same header.
_MIN_SAME_ROWS = 4

#: Digests of the leaves of each row.
RowDigests = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class FirstRows:
    """The rows that a worker has drawn first.

    Attributes:
        worker: number of the worker in the job.
        is_cut: whether the dataset has asked for the number of workers, to cut its rows, or cuts them by rank.
        rows: digests of the leaves of each row.
    """

    worker: int
    is_cut: bool
    rows: RowDigests


def random_leaves(first_read: RowDigests, second_read: RowDigests) -> set[int]:
    """Return the leaves of rows that differ between two reads of the same rows, by their numbers."""
    leaves: set[int] = set()
    for first, second in zip(first_read, second_read, strict=False):
        for leaf, (first_digest, second_digest) in enumerate(zip(first, second, strict=False)):
            if first_digest != second_digest:
                leaves.add(leaf)
    return leaves


def doubled_workers(all_rows: Sequence[FirstRows]) -> tuple[int, int] | None:
    """Return two workers that must have different rows and begin with the same ones; None if there are none.

    Rows that are all alike, as in a benchmark, tell nothing.
    """
    seen: dict[RowDigests, int] = {}
    for first_rows in all_rows:
        beginning = first_rows.rows[:_MIN_SAME_ROWS]
        if not first_rows.is_cut or len(beginning) < _MIN_SAME_ROWS:
            continue
        if len(set(beginning)) == 1:
            continue
        if beginning in seen:
            return seen[beginning], first_rows.worker
        seen[beginning] = first_rows.worker
    return None


def different_workers(
    all_rows: Sequence[FirstRows],
    random: set[int],
) -> tuple[int, int] | None:
    """Return two workers that must draw the same rows and begin with different ones; None if there are none.

    Args:
        all_rows: first rows of the workers.
        random: leaves that cannot be compared, as they are random.
    """
    for first, second in itertools.pairwise(all_rows):
        if first.is_cut or second.is_cut:
            if first.is_cut != second.is_cut:
                return first.worker, second.worker
            continue
        if not _are_same(first.rows, second.rows, random):
            return first.worker, second.worker
    return None


def _are_same(first: RowDigests, second: RowDigests, random: set[int]) -> bool:
    """Return whether two workers begin with the same rows, by the leaves that tell one row from another."""
    n_rows = min(len(first), len(second))
    first_rows = first[:n_rows]
    second_rows = second[:n_rows]
    if first_rows == second_rows:
        return True
    comparable_rows = _without(first_rows, random)
    are_all_alike = n_rows >= 2 and len(set(comparable_rows)) <= 1
    if are_all_alike:
        return False
    return comparable_rows == _without(second_rows, random)


def _without(rows: RowDigests, random: set[int]) -> RowDigests:
    """Return the digests of rows without their random leaves."""
    comparable_rows: list[tuple[int, ...]] = []
    for row in rows:
        digests = [digest for leaf, digest in enumerate(row) if leaf not in random]
        comparable_rows.append(tuple(digests))
    return tuple(comparable_rows)


def are_same_shares(shares: Sequence[RowDigests], random: set[int]) -> bool:
    """Return whether the ranks give one share the same rows, as far as they can be compared.

    Args:
        shares: first rows of the first share, as each rank reads them.
        random: leaves that cannot be compared, as they are random.
    """
    described = {_without(rows, random) for rows in shares}
    return len(described) <= 1

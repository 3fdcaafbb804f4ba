"""Whether the workers of a stream cut its rows rightly, as far as the rows show that they begin with. Pure."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

#: Rows of a worker that are compared.
N_FIRST_ROWS = 8
#: Rows at the beginning of two workers that are equal by chance at most in files with the same header.
_MIN_SAME_ROWS = 4

#: Digests of the leaves of each row.
RowDigests = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class FirstRows:
    """What a worker has drawn first.

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
        leaves |= {
            leaf for leaf, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]
        }
    return leaves


def doubled_workers(all_rows: Sequence[FirstRows]) -> tuple[int, int] | None:
    """Return two workers that must have other rows and begin with the same ones; None without such.

    Rows that are all alike, as those of a benchmark, say nothing.
    """
    seen: dict[RowDigests, int] = {}
    for first_rows in all_rows:
        beginning = first_rows.rows[:_MIN_SAME_ROWS]
        if not first_rows.is_cut or len(beginning) < _MIN_SAME_ROWS or len(set(beginning)) == 1:
            continue
        if beginning in seen:
            return seen[beginning], first_rows.worker
        seen[beginning] = first_rows.worker
    return None


def different_workers(all_rows: Sequence[FirstRows], random: set[int]) -> tuple[int, int] | None:
    """Return two workers that must draw the same rows and begin with others; None without such.

    Args:
        all_rows: first rows of the workers.
        random: leaves that nobody can compare.
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
    """Return whether two workers begin with the same rows, by what tells one row from another."""
    n_rows = min(len(first), len(second))
    if first[:n_rows] == second[:n_rows]:
        return True
    comparable = [_without(row, random) for row in first[:n_rows]]
    tells_rows_apart = n_rows < 2 or len(set(comparable)) > 1
    return tells_rows_apart and comparable == [_without(row, random) for row in second[:n_rows]]


def _without(row: tuple[int, ...], random: set[int]) -> tuple[int, ...]:
    return tuple(digest for leaf, digest in enumerate(row) if leaf not in random)


def are_same_shares(shares: Sequence[RowDigests], random: set[int]) -> bool:
    """Return whether the ranks give one share the same rows, as far as somebody can compare them.

    Args:
        shares: the first rows of the first share, as each rank reads them.
        random: leaves that nobody can compare.
    """
    described = {tuple(_without(row, random) for row in rows) for rows in shares}
    return len(described) <= 1

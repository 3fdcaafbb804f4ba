"""The one order in which replicas are summed: a binary tree over their ids, whatever the placement.

The tree over N replicas joins [i, i+d) and [i+d, i+2d) for d = 1, 2, 4, ... and i a multiple of 2d; at the right end
subtrees are shorter. A subtree's sum is a partial, named by its (start, stop).
"""

from collections.abc import Iterable, Sequence

Partial = tuple[int, int]


def plan_partials(replicas: Iterable[int], n_replicas: int) -> list[Partial]:
    """Return the fewest subtrees that cover a set of replicas exactly: what a holder of them can sum by itself.

    >>> plan_partials([3, 4, 5], 8)
    [(3, 4), (4, 6)]
    >>> plan_partials([4, 5, 6], 7)
    [(4, 7)]
    """
    parts = {replica: replica + 1 for replica in replicas}
    for distance in _distances(n_replicas):
        for start in range(0, n_replicas, 2 * distance):
            left, right = min(start + distance, n_replicas), min(start + 2 * distance, n_replicas)
            if left < right and parts.get(start) == left and parts.get(left) == right:
                parts[start] = parts.pop(left)
    return sorted(parts.items())


def plan_additions(partials: Sequence[Partial]) -> list[tuple[int, int]]:
    """Return (into, row) pairs: adding rows in this order leaves the sum of all replicas in the row of replica 0.

    Args:
        partials: of each row; together they cover [0, N) once, in any order.

    >>> plan_additions([(0, 1), (1, 2), (2, 4)])
    [(0, 1), (0, 2)]
    """
    rows = {start: row for row, (start, _) in enumerate(partials)}
    n_replicas = max(stop for _, stop in partials)
    additions = []
    for distance in _distances(n_replicas):
        for start in range(0, n_replicas, 2 * distance):
            if start in rows and start + distance in rows:
                additions.append((rows[start], rows.pop(start + distance)))
    return additions


def _distances(n_replicas: int) -> list[int]:
    return [1 << level for level in range((n_replicas - 1).bit_length())]


def plan_row_additions(n_rows: int) -> list[tuple[int, int]]:
    """Return the (into, row) pairs of the tree over consecutive rows; the sum is left in row 0."""
    return plan_additions([(row, row + 1) for row in range(n_rows)]) if n_rows else []

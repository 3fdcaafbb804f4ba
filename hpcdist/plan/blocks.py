"""Bounds of contiguous blocks: how n elements are divided over p parts."""

#: (start, stop) of consecutive elements, rows or ranks.
Bounds = tuple[int, int]


def block_bounds(
    n_elements: int,
    n_parts: int,
    part: int,
) -> Bounds:
    """Return (start, stop) of a part when sizes differ by at most one and longer parts come first.

    >>> [block_bounds(13, 5, part) for part in range(5)]
    [(0, 3), (3, 6), (6, 9), (9, 11), (11, 13)]
    """
    size, n_longer = divmod(n_elements, n_parts)
    start = part * size + min(part, n_longer)
    stop = start + size
    if part < n_longer:
        stop += 1
    return start, stop


def ceiling_bounds(
    n_rows: int,
    n_parts: int,
    part: int,
) -> Bounds:
    """Return (start, stop) of a part when every part has ceil(n/p) rows as long as there are any.

    The rule of tf.distribute for a global batch over its replicas: the last parts may be short or empty.

    >>> [ceiling_bounds(4, 3, part) for part in range(3)]
    [(0, 2), (2, 4), (4, 4)]
    """
    size = -(-n_rows // n_parts)
    start = min(part * size, n_rows)
    stop = min(start + size, n_rows)
    return start, stop

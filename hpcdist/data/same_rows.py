"""Whether all ranks hold the same rows: each rank reads a part of a dataset that is distributed.

Unseeded random rows, or an unseeded random_split, would give every rank another dataset, and a global batch rows of
several datasets.
"""

import itertools
from typing import Any

import numpy as np
import torch
import xxhash

from hpcdist.data.row_numbers import own_random_numbers
from hpcdist.data.sources import RowSource
from hpcdist.data.streams import Stream
from hpcdist.nest import Nest, leaves

#: Reads of a sample that show whether rows are random.
_N_READS = 8
#: Number of rows of a stream that are compared where ranks have drawn different ones.
_N_FIRST_ROWS = 8
#: How deep the attributes of objects are looked at that are no arrays.
_MAX_DEPTH = 3
#: Description of random rows.
RANDOM = "random"


def describe_rows(source: RowSource) -> str:
    """Return the number of rows, and a digest of a sample of them; RANDOM for rows that differ between two reads.

    Random numbers that the rows are made of are drawn from the same seeds each time, and the program's numbers are left
    as they were. Rows that cannot be read here count as random: a dataset may be readable in its worker processes only.

    Cost: `source.n_sampled` rows are read twice.
    """
    digest = _digest(source)
    if _digest(source) != digest:
        digest = RANDOM
    return f"{source.n_rows} rows, {digest}"


def are_random(source: RowSource) -> bool:
    """Return whether repeated reads of a sample of the rows differ. Cost: the sample is read eight times."""
    digests = [_digest(source) for _ in range(_N_READS)]
    return len(set(digests)) > 1


def digest_of(rows: Nest) -> int:
    """Return a digest of the content of rows, of 63 bits."""
    digest = xxhash.xxh3_64()
    for leaf in leaves(rows):
        digest.update(_content_of(leaf))
    return digest.intdigest() >> 1


def leaf_digests(row: Nest) -> tuple[int, ...]:
    """Return a digest of each leaf of a row, of 63 bits."""
    digests: list[int] = []
    for leaf in leaves(row):
        digest = xxhash.xxh3_64_intdigest(_content_of(leaf))
        digests.append(digest >> 1)
    return tuple(digests)


def describe_first_rows(stream: Stream, epoch: int) -> list[int | None]:
    """Return a digest for each leaf of the first rows of a stream; None for one that differs between two reads.

    Random numbers of the libraries are drawn from the same seeds each time.

    Cost: the first rows are drawn twice, each time from a new iterator.
    """
    reads: list[list[int]] = []
    for _ in range(2):
        with own_random_numbers():
            rows = list(itertools.islice(stream.draw(epoch), _N_FIRST_ROWS))
        columns = zip(*map(leaves, rows), strict=False)
        reads.append([digest_of(list(column)) for column in columns])
    descriptions: list[int | None] = []
    for first, second in zip(*reads, strict=False):
        descriptions.append(first if first == second else None)
    return descriptions


def _digest(source: RowSource) -> str:
    """Return a digest of a sample of the rows; RANDOM for rows that cannot be read here."""
    if not source.n_rows:
        return "none"
    n_sampled = min(source.n_sampled, source.n_rows)
    positions = np.linspace(0, source.n_rows - 1, n_sampled)
    rows = np.unique(positions.astype(np.int64))
    digest = xxhash.xxh3_64()
    with own_random_numbers():
        try:
            sample = source.to_compare(rows)
        except Exception:  # noqa: BLE001  the same error is raised, with its traceback, where rows are read for training
            return RANDOM
    for leaf in leaves(sample):
        digest.update(_content_of(leaf))
    return f"sampled {digest.hexdigest()}"


def _content_of(leaf: Any, depth: int = 0) -> bytes:
    """Return bytes that tell a leaf from others: its values, or the contents of its attributes."""
    if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
        form = f"{leaf.dtype} {tuple(leaf.shape)}"
        return form.encode() + _bytes_of(leaf)
    if isinstance(leaf, (np.ndarray, np.generic)) and leaf.dtype.kind != "O":
        form = f"{leaf.dtype} {leaf.shape}"
        return form.encode() + np.ascontiguousarray(leaf).tobytes()
    if isinstance(leaf, (bool, int, float, complex, str, bytes, type(None))):
        return repr(leaf).encode()
    name = type(leaf).__name__.encode()
    if hasattr(leaf, "__array_interface__"):  # as a picture has it
        return name + np.asarray(leaf).tobytes()
    if depth == _MAX_DEPTH or isinstance(leaf, type):
        return name
    attributes = getattr(leaf, "__dict__", {})
    parts = leaves(list(attributes.values()))
    return name + b"".join(_content_of(part, depth + 1) for part in parts)


def _bytes_of(tensor: torch.Tensor) -> bytes:
    values = tensor.detach().cpu().contiguous().reshape(-1)
    return values.view(torch.uint8).numpy().tobytes()

"""Whether all ranks hold the same rows: a dataset that is distributed is read on each of them, a part on each.

Unseeded random rows, or an unseeded random_split, would give every rank a dataset of its own, and a global batch rows
of several.
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
#: Rows of a stream that are compared where ranks have drawn others.
_N_FIRST_ROWS = 8
#: How deep the attributes of objects are looked at that are no arrays.
_MAX_DEPTH = 3
#: What `describe_rows` says of rows that are.
RANDOM = "random"


def describe_rows(source: RowSource) -> str:
    """Return the number of rows, and a digest of a sample of them; RANDOM for rows that differ between two reads.

    Random numbers that the rows are made of are drawn from the same seeds each time, and the program's are left as they
    were. Rows that cannot be read here count as random: a dataset may be readable in its worker processes only.

    Cost: `source.n_sampled` rows are read twice.
    """
    digests = {_digest(source) for _ in range(2)}
    return f"{source.n_rows} rows, {digests.pop() if len(digests) == 1 else RANDOM}"


def are_random(source: RowSource) -> bool:
    """Return whether repeated reads of a sample of the rows differ. Cost: the sample is read eight times."""
    return len({_digest(source) for _ in range(_N_READS)}) > 1


def digest_of(rows: Nest) -> int:
    """Return a digest of the content of rows, of 63 bits."""
    digest = xxhash.xxh3_64()
    for leaf in leaves(rows):
        digest.update(_content_of(leaf))
    return digest.intdigest() >> 1


def leaf_digests(row: Nest) -> tuple[int, ...]:
    """Return a digest of each leaf of a row, of 63 bits."""
    return tuple(xxhash.xxh3_64_intdigest(_content_of(leaf)) >> 1 for leaf in leaves(row))


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
    if not source.n_rows:
        return "none"
    n = min(source.n_sampled, source.n_rows)
    rows = np.unique(np.linspace(0, source.n_rows - 1, n).astype(np.int64))
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
    if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
        return f"{leaf.dtype} {tuple(leaf.shape)}".encode() + _bytes_of(leaf)
    if isinstance(leaf, (np.ndarray, np.generic)) and leaf.dtype.kind != "O":
        return f"{leaf.dtype} {leaf.shape}".encode() + np.ascontiguousarray(leaf).tobytes()
    if isinstance(leaf, (bool, int, float, complex, str, bytes, type(None))):
        return repr(leaf).encode()
    name = type(leaf).__name__.encode()
    if hasattr(leaf, "__array_interface__"):  # as a picture has it
        return name + np.asarray(leaf).tobytes()
    if depth == _MAX_DEPTH or isinstance(leaf, type):
        return name
    parts = leaves(list(getattr(leaf, "__dict__", {}).values()))
    return name + b"".join(_content_of(part, depth + 1) for part in parts)


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()

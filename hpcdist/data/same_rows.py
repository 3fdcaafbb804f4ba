"""Whether all ranks hold the same rows: a dataset that is distributed is read on each of them, a part on each.

Unseeded random rows, or an unseeded random_split, would give every rank a dataset of its own, and a global batch rows
of several.
"""

import contextlib
import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
import xxhash

from hpcdist.data.sources import RowSource
from hpcdist.nest import Nest, leaves

#: Reads of a sample that show whether rows are random.
_N_READS = 8
#: Rows of a stream that are compared where ranks have drawn others.
N_FIRST_ROWS = 8
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


class RowDigests:
    """Digests of the rows that are added, one for each leaf.

    Attributes:
        n_rows: rows so far.
        are_alike: whether all rows so far are equal.
    """

    def __init__(self) -> None:
        self.n_rows = 0
        self.are_alike = True
        self._leaves: list[Any] = []
        self._first_row = 0

    def add(self, row: Nest) -> None:
        """Add a row."""
        row_digest = digest_of(row)
        if not self.n_rows:
            self._leaves = [xxhash.xxh3_64() for _ in leaves(row)]
            self._first_row = row_digest
        self.n_rows += 1
        self.are_alike = self.are_alike and row_digest == self._first_row
        for digest, leaf in zip(self._leaves, leaves(row), strict=False):
            digest.update(_content_of(leaf))

    def of_leaves(self) -> tuple[int, ...]:
        """Return the digest of each leaf of all rows so far, of 63 bits."""
        return tuple(digest.intdigest() >> 1 for digest in self._leaves)


def describe_first_rows(draw: Callable[[], Iterable[Nest]], n_rows: int = N_FIRST_ROWS) -> list[int | None]:
    """Return a digest for each leaf of the first rows of a stream; None for one that differs between two reads.

    Random numbers of the libraries are drawn from the same seeds each time.

    Args:
        draw: starts the stream anew.
        n_rows: rows that are described, if there are as many.

    Cost: the first rows are drawn twice, each time from a new iterator.
    """
    reads: list[tuple[int, ...]] = []
    for _ in range(2):
        digests = RowDigests()
        with own_random_numbers():
            for row in itertools.islice(draw(), n_rows):
                digests.add(row)
        reads.append(digests.of_leaves())
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


def _content_of(leaf: Any) -> bytes:
    if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
        return f"{leaf.dtype} {tuple(leaf.shape)}".encode() + _bytes_of(leaf)
    if isinstance(leaf, (np.ndarray, np.generic)) and leaf.dtype.kind != "O":
        return f"{leaf.dtype} {leaf.shape}".encode() + np.ascontiguousarray(leaf).tobytes()
    is_plain = isinstance(leaf, (bool, int, float, complex, str, bytes, type(None)))
    return repr(leaf).encode() if is_plain else type(leaf).__name__.encode()


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@contextlib.contextmanager
def own_random_numbers() -> Iterator[None]:
    """Seed the libraries' random numbers in the block, and restore them."""
    states = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            random.seed(0)
            np.random.seed(0)
            torch.default_generator.manual_seed(0)
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])

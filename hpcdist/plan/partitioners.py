"""Which parameter server owns which rows of which variable: the partitioners of tf.distribute, and where shards go."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpcdist.errors import UsageError
from hpcdist.plan.blocks import block_bounds


class Partitioner:
    """Says into how many shards a variable is split. Subclass it, or pass any function of the same arguments."""

    def __call__(self, shape: Sequence[int], dtype: Any, axis: int = 0) -> list[int]:
        """Return the number of shards along each dimension; a strategy takes those of the first one alone.

        Args:
            shape: of the variable, with at least one dimension.
            dtype: of the variable, of numpy or torch.
            axis: the dimension that is split.
        """
        raise NotImplementedError(
            f"{type(self).__name__}: expected __call__(shape, dtype, axis=0); define it."
        )


class FixedShardsPartitioner(Partitioner):
    """As many shards for every variable, but no more than it has rows.

    >>> FixedShardsPartitioner(2)((10, 3), "float32")
    [2, 1]
    """

    def __init__(self, num_shards: int) -> None:
        self._num_shards = _positive("num_shards", num_shards)

    def __call__(self, shape: Sequence[int], dtype: Any, axis: int = 0) -> list[int]:
        """Return the number of shards along each dimension."""
        return _along(shape, axis, min(self._num_shards, shape[axis]))


class MinSizePartitioner(Partitioner):
    """As many shards as there can be with `min_shard_bytes` each, up to `max_shards`: by default one.

    >>> MinSizePartitioner(min_shard_bytes=4, max_shards=4)((6, 1), "float32")
    [4, 1]

    Args:
        min_shard_bytes: of a shard.
        max_shards: the most shards of a variable.
        bytes_per_string: estimate for variables of texts.
    """

    def __init__(
        self, min_shard_bytes: int = 256 << 10, max_shards: int = 1, bytes_per_string: int = 16
    ) -> None:
        self._min_shard_bytes = _positive("min_shard_bytes", min_shard_bytes)
        self._max_shards = _positive("max_shards", max_shards)
        self._bytes_per_string = _positive("bytes_per_string", bytes_per_string)

    def __call__(self, shape: Sequence[int], dtype: Any, axis: int = 0) -> list[int]:
        """Return the number of shards along each dimension."""
        nbytes = math.prod(shape) * _itemsize(dtype, self._bytes_per_string)
        n_of_min_size = math.ceil(nbytes / self._min_shard_bytes)
        return _along(shape, axis, max(1, min(shape[axis], self._max_shards, n_of_min_size)))


class MaxSizePartitioner(Partitioner):
    """As few shards as there can be with at most `max_shard_bytes` each, or one row; never more than `max_shards`.

    >>> MaxSizePartitioner(max_shard_bytes=8)((6, 1), "float32")
    [3, 1]

    Args:
        max_shard_bytes: of a shard.
        max_shards: the most shards of a variable, even if they are larger then; None: any number.
        bytes_per_string: estimate for variables of texts.
    """

    def __init__(
        self, max_shard_bytes: int, max_shards: int | None = None, bytes_per_string: int = 16
    ) -> None:
        self._max_shard_bytes = _positive("max_shard_bytes", max_shard_bytes)
        self._max_shards = None if max_shards is None else _positive("max_shards", max_shards)
        self._bytes_per_string = _positive("bytes_per_string", bytes_per_string)

    def __call__(self, shape: Sequence[int], dtype: Any, axis: int = 0) -> list[int]:
        """Return the number of shards along each dimension.

        Raises:
            UsageError: for a variable without elements.
        """
        if math.prod(shape) == 0:
            raise UsageError(
                f"MaxSizePartitioner: expected a variable with elements, got the shape {tuple(shape)}; leave it whole."
            )
        row_bytes = math.prod(shape) // shape[axis] * _itemsize(dtype, self._bytes_per_string)
        n_shards = math.ceil(shape[axis] / max(1, self._max_shard_bytes // row_bytes))
        return _along(
            shape, axis, n_shards if self._max_shards is None else min(n_shards, self._max_shards)
        )


@dataclass(frozen=True)
class Shard:
    """The rows [start, stop) of a variable, and the server that owns them. A whole variable is one shard.

    Attributes:
        variable: its number, in the order in which variables were made.
        start, stop: rows; of a variable without dimensions 0 and 1.
        server: number of the ps rank.
    """

    variable: int
    start: int
    stop: int
    server: int


@dataclass(frozen=True)
class VariableSpec:
    """What a variable looks like.

    Attributes:
        name: for messages. shape: of all its rows. dtype: of numpy or torch.
        colocated_with: number of the earlier variable whose server it shares, unsplit; None: placed on its own.
    """

    name: str
    shape: tuple[int, ...]
    dtype: Any
    colocated_with: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return math.prod(self.shape) * _itemsize(self.dtype, 16)


def place(
    variables: Sequence[VariableSpec],
    n_servers: int,
    partitioner: Callable[..., Any] | None = None,
    is_by_bytes: bool = False,
) -> list[Shard]:
    """Return all shards, in the order of variables and rows.

    Shard after shard goes to the next server, as in TensorFlow, whatever variable it is of; by bytes, it goes to the
    server with the fewest bytes so far, the first of those.

    Args:
        variables: in the order in which they were made.
        n_servers: at least one.
        partitioner: see `Partitioner`; None leaves all variables whole.
        is_by_bytes: whether servers are chosen by their load.

    Raises:
        UsageError: when the partitioner returns something else than the numbers of shards, or splits more than rows.
    """
    load = [0] * n_servers
    n_placed = 0
    shards: list[Shard] = []
    servers: dict[int, int] = {}
    for number, variable in enumerate(variables):
        if variable.colocated_with is not None:
            server = servers[number] = servers[variable.colocated_with]
            shards.append(Shard(number, 0, _n_rows(variable), server))
            load[server] += variable.nbytes
            continue
        for start, stop in rows_of_shards(variable, partitioner):
            server = load.index(min(load)) if is_by_bytes else n_placed % n_servers
            servers.setdefault(number, server)
            shards.append(Shard(number, start, stop, server))
            load[server] += variable.nbytes * (stop - start) // max(1, _n_rows(variable))
            n_placed += 1
    return shards


def rows_of_shards(
    variable: VariableSpec, partitioner: Callable[..., Any] | None
) -> list[tuple[int, int]]:
    """Return (start, stop) of each shard of a variable: of equal sizes, the first ones a row longer."""
    if partitioner is None or not variable.shape:
        return [(0, _n_rows(variable))]
    counts = partitioner(shape=variable.shape, dtype=variable.dtype)
    is_list = (
        isinstance(counts, (list, tuple))
        and len(counts) > 0
        and all(isinstance(count, int) for count in counts)
    )
    if not is_list or counts[0] < 1 or any(count != 1 for count in counts[1:]):
        raise UsageError(
            f"variable_partitioner: expected a list of numbers of shards, the first at least 1, the others 1, got "
            f"{counts!r} for {variable.name!r} of shape {variable.shape}; return a number of shards for each dimension."
        )
    n_shards = min(counts[0], max(1, variable.shape[0]))
    return [block_bounds(variable.shape[0], n_shards, index) for index in range(n_shards)]


def _n_rows(variable: VariableSpec) -> int:
    return variable.shape[0] if variable.shape else 1


def _along(shape: Sequence[int], axis: int, n_shards: int) -> list[int]:
    return [n_shards if dimension == axis % len(shape) else 1 for dimension in range(len(shape))]


def _itemsize(dtype: Any, bytes_per_string: int) -> int:
    resolved_dtype = np.dtype(dtype) if isinstance(dtype, (str, type)) else dtype
    return (
        bytes_per_string
        if getattr(resolved_dtype, "kind", "") in ("O", "S", "U")
        else int(resolved_dtype.itemsize)
    )


def _positive(name: str, value: int) -> int:
    if value < 1:
        raise UsageError(
            f"Partitioner: expected {name} of at least 1, got {value}; leave it out for its default."
        )
    return value

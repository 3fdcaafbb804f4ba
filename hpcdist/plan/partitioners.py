"""Which parameter server owns which rows of which variable: the partitioners of tf.distribute, and where shards go."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpcdist.errors import UsageError
from hpcdist.plan.blocks import Bounds, block_bounds


class Partitioner:
    """Says into how many shards a variable is split. Subclass it, or pass any function of the same arguments."""

    def __call__(
        self,
        shape: Sequence[int],
        dtype: Any,
        axis: int = 0,
    ) -> list[int]:
        """Return the number of shards along each dimension; a strategy splits variables along the first one alone.

        Args:
            shape: shape of the variable, with at least one dimension.
            dtype: dtype of the variable, of numpy or torch.
            axis: dimension that is split.
        """
        n_shards = self._count_shards(shape, dtype, axis)
        counts = [1] * len(shape)
        counts[axis % len(shape)] = n_shards
        return counts

    def _count_shards(
        self,
        shape: Sequence[int],
        dtype: Any,
        axis: int,
    ) -> int:
        """Return the number of shards along `axis`: the part in which the partitioners of this module differ."""
        raise NotImplementedError(
            f"{type(self).__name__}: expected __call__(shape, dtype, axis=0); define it."
        )


class FixedShardsPartitioner(Partitioner):
    """The same number of shards for every variable, but no more than it has rows.

    >>> FixedShardsPartitioner(2)((10, 3), "float32")
    [2, 1]
    """

    def __init__(self, num_shards: int) -> None:
        self._num_shards = _positive("num_shards", num_shards)

    def _count_shards(
        self,
        shape: Sequence[int],
        dtype: Any,
        axis: int,
    ) -> int:
        return min(self._num_shards, shape[axis])


class MinSizePartitioner(Partitioner):
    """As many shards as there can be with `min_shard_bytes` each, up to `max_shards`: by default one.

    >>> MinSizePartitioner(min_shard_bytes=4, max_shards=4)((6, 1), "float32")
    [4, 1]

    Args:
        min_shard_bytes: least bytes of a shard.
        max_shards: most shards of a variable.
        bytes_per_string: estimated bytes of an element of a variable of texts.
    """

    def __init__(
        self,
        min_shard_bytes: int = 256 << 10,
        max_shards: int = 1,
        bytes_per_string: int = 16,
    ) -> None:
        self._min_shard_bytes = _positive("min_shard_bytes", min_shard_bytes)
        self._max_shards = _positive("max_shards", max_shards)
        self._bytes_per_string = _positive("bytes_per_string", bytes_per_string)

    def _count_shards(
        self,
        shape: Sequence[int],
        dtype: Any,
        axis: int,
    ) -> int:
        nbytes = math.prod(shape) * _itemsize(dtype, self._bytes_per_string)
        n_of_min_size = math.ceil(nbytes / self._min_shard_bytes)
        n_shards = min(shape[axis], self._max_shards, n_of_min_size)
        return max(1, n_shards)


class MaxSizePartitioner(Partitioner):
    """As few shards as there can be with at most `max_shard_bytes` each, or one row; never more than `max_shards`.

    >>> MaxSizePartitioner(max_shard_bytes=8)((6, 1), "float32")
    [3, 1]

    Args:
        max_shard_bytes: most bytes of a shard.
        max_shards: most shards of a variable, even if they are larger then. None allows any number.
        bytes_per_string: estimated bytes of an element of a variable of texts.

    Raises:
        UsageError: when it is called for a variable without elements.
    """

    def __init__(
        self,
        max_shard_bytes: int,
        max_shards: int | None = None,
        bytes_per_string: int = 16,
    ) -> None:
        self._max_shard_bytes = _positive("max_shard_bytes", max_shard_bytes)
        self._max_shards = max_shards
        if max_shards is not None:
            _positive("max_shards", max_shards)
        self._bytes_per_string = _positive("bytes_per_string", bytes_per_string)

    def _count_shards(
        self,
        shape: Sequence[int],
        dtype: Any,
        axis: int,
    ) -> int:
        if math.prod(shape) == 0:
            raise UsageError(
                f"MaxSizePartitioner: expected a variable with elements, got the shape {tuple(shape)}; leave it whole."
            )
        n_rows = shape[axis]
        row_bytes = math.prod(shape) // n_rows * _itemsize(dtype, self._bytes_per_string)
        shard_rows = max(1, self._max_shard_bytes // row_bytes)
        n_shards = math.ceil(n_rows / shard_rows)
        if self._max_shards is not None:
            n_shards = min(n_shards, self._max_shards)
        return n_shards


@dataclass(frozen=True)
class Shard:
    """The rows [start, stop) of a variable, and the server that owns them. A whole variable is one shard.

    Attributes:
        variable: number of the variable, in the order in which variables were made.
        start, stop: bounds of the rows; 0 and 1 for a variable without dimensions.
        server: number of the ps rank.
    """

    variable: int
    start: int
    stop: int
    server: int


@dataclass(frozen=True)
class VariableSpec:
    """Name, shape and dtype of a variable.

    Attributes:
        name: name of the variable in error messages.
        shape: shape of all its rows.
        dtype: dtype of numpy or torch.
        colocated_with: number of the earlier variable whose server it shares, unsplit. None if its servers are
            chosen independently of other variables.
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

    Shard after shard goes to the next server, as in TensorFlow, whatever variable it is a part of. By bytes, it goes to
    the first of the servers that have the fewest bytes so far.

    Args:
        variables: specs of the variables, in the order in which they were made.
        n_servers: number of servers, at least one.
        partitioner: function that says into how many shards a variable is split; see `Partitioner`. None leaves all
            variables whole.
        is_by_bytes: whether servers are chosen by their load.

    Raises:
        UsageError: when the partitioner returns something else than the numbers of shards, or splits more than rows.
    """
    load = [0] * n_servers
    n_placed = 0
    shards: list[Shard] = []
    servers: dict[int, int] = {}
    for number, variable in enumerate(variables):
        n_rows = _n_rows(variable)
        if variable.colocated_with is not None:
            server = servers[variable.colocated_with]
            servers[number] = server
            shards.append(Shard(number, 0, n_rows, server))
            load[server] += variable.nbytes
            continue
        for start, stop in rows_of_shards(variable, partitioner):
            server = load.index(min(load)) if is_by_bytes else n_placed % n_servers
            servers.setdefault(number, server)
            shards.append(Shard(number, start, stop, server))
            load[server] += variable.nbytes * (stop - start) // max(1, n_rows)
            n_placed += 1
    return shards


def rows_of_shards(
    variable: VariableSpec,
    partitioner: Callable[..., Any] | None,
) -> list[Bounds]:
    """Return (start, stop) of each shard of a variable: sizes are equal, or the first shards are a row longer."""
    if partitioner is None or not variable.shape:
        return [(0, _n_rows(variable))]
    counts = partitioner(shape=variable.shape, dtype=variable.dtype)
    if not _are_shard_counts(counts):
        raise UsageError(
            f"variable_partitioner: expected a list of numbers of shards, the first at least 1, the others 1, got "
            f"{counts!r} for {variable.name!r} of shape {variable.shape}; return a number of shards for each dimension."
        )
    n_rows = variable.shape[0]
    n_shards = min(counts[0], max(1, n_rows))
    return [block_bounds(n_rows, n_shards, index) for index in range(n_shards)]


def _are_shard_counts(counts: Any) -> bool:
    """Return whether a partitioner's result is a list of numbers of shards, of which the first alone exceeds 1."""
    if not isinstance(counts, (list, tuple)) or not counts:
        return False
    if not all(isinstance(count, int) for count in counts):
        return False
    n_shards, *further_counts = counts
    return n_shards >= 1 and all(count == 1 for count in further_counts)


def _n_rows(variable: VariableSpec) -> int:
    """Return the number of rows of a variable; one without dimensions has one row."""
    if not variable.shape:
        return 1
    return variable.shape[0]


def _itemsize(dtype: Any, bytes_per_string: int) -> int:
    """Return the bytes of an element."""
    if isinstance(dtype, (str, type)):
        dtype = np.dtype(dtype)
    if getattr(dtype, "kind", "") in ("O", "S", "U"):
        return bytes_per_string
    return int(dtype.itemsize)


def _positive(name: str, value: int) -> int:
    """Return the value of an argument; raise UsageError unless it is positive."""
    if value < 1:
        raise UsageError(
            f"Partitioner: expected {name} of at least 1, got {value}; leave it out for its default."
        )
    return value

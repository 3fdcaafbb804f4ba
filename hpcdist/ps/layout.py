"""How a server's shards look, and how tensors are packed into the payload of a message. Pure; both sides use it."""

import itertools
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpcdist.plan.partitioners import Shard, VariableSpec
from hpcdist.ps.messages import Bytes
from hpcdist.runtime.node_memory import fence

#: Tensors in a payload begin at multiples of this.
_ALIGNMENT = 64
#: What a message has of a shard: nothing, all of it, or some of its rows. The last two: their values are in memory that
#: worker and server share.
NOTHING, WHOLE, ROWS, WHOLE_HERE, ROWS_HERE = range(5)


@dataclass(frozen=True)
class ShardSpec:
    """The rows [start, stop) of a variable, as their server holds them: a shard, or a chunk of one.

    Attributes:
        name: of the variable.
        variable: its number among those of the strategy.
        start, stop: rows.
        shape: of the rows; that of the variable where it is whole.
        dtype: its name.
        is_sparse: whether gradients come as rows.
        shard: the rows of the shard that this is a chunk of; empty where it is all of it.
    """

    name: str
    variable: int
    start: int
    stop: int
    shape: tuple[int, ...]
    dtype: str
    is_sparse: bool = False
    shard: tuple[int, ...] = ()

    @property
    def key(self) -> tuple[int, ...]:
        """What chunks of one shard have in common."""
        return (self.variable, *(self.shard or (self.start, self.stop)))

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of torch."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def nbytes(self) -> int:
        """Bytes of all its rows."""
        return math.prod(self.shape) * self.torch_dtype.itemsize

    @property
    def row_shape(self) -> tuple[int, ...]:
        """The shape of one row."""
        return self.shape[1:]


def specs_of(
    variables: Sequence[VariableSpec],
    shards: Iterable[Shard],
    sparse: frozenset[int],
    chunk_bytes: int | None = None,
) -> dict[int, list[ShardSpec]]:
    """Return the shards of each server, in their order.

    Args:
        variables: all of the strategy's.
        shards: of those that are new, as `place` returns them.
        sparse: numbers of variables whose gradients come as rows; these are not divided into chunks.
        chunk_bytes: about the size of chunks that shards are divided into; None: into none.
    """
    specs_by_server: dict[int, list[ShardSpec]] = {}
    for shard in shards:
        variable = variables[shard.variable]
        shape = (shard.stop - shard.start, *variable.shape[1:]) if variable.shape else ()
        dtype = str(variable.dtype).removeprefix("torch.")
        is_sparse = shard.variable in sparse
        spec = ShardSpec(
            variable.name, shard.variable, shard.start, shard.stop, shape, dtype, is_sparse
        )
        chunks = [spec] if chunk_bytes is None or is_sparse else chunks_of(spec, chunk_bytes)
        specs_by_server.setdefault(shard.server, []).extend(chunks)
    return specs_by_server


def chunks_of(spec: ShardSpec, chunk_bytes: int) -> list[ShardSpec]:
    """Return the chunks of a shard: each but the last has a multiple of the bytes that tensors are aligned to.

    >>> spec = ShardSpec("w", 0, 0, 100, (100, 4), "float32")
    >>> [(one.start, one.stop) for one in chunks_of(spec, 700)]
    [(0, 40), (40, 80), (80, 100)]
    """
    if not spec.shape or spec.nbytes <= chunk_bytes:
        return [spec]
    row_bytes = spec.nbytes // spec.shape[0]
    unit = _ALIGNMENT // math.gcd(_ALIGNMENT, row_bytes)
    n_rows = max(unit, chunk_bytes // row_bytes // unit * unit)
    starts = range(spec.start, spec.stop, n_rows)
    bounds = [(start, min(start + n_rows, spec.stop)) for start in starts]
    shard = (spec.start, spec.stop)
    return [
        replace(spec, start=start, stop=stop, shape=(stop - start, *spec.row_shape), shard=shard)
        for start, stop in bounds
    ]


def parts_of(specs: Sequence[ShardSpec], part_bytes: int | None) -> list[tuple[int, int]]:
    """Return the parts of a push, as ranges of the shards and chunks of a server: it answers each as soon as it can.

    Args:
        specs: all of the server's.
        part_bytes: most bytes of one that has several; None: all are one part.

    >>> parts_of([ShardSpec("w", 0, 0, 8, (8,), "float32")] * 5, 64)
    [(0, 2), (2, 4), (4, 5)]
    """
    if part_bytes is None:
        return [(0, len(specs))]
    parts = []
    begin = 0
    nbytes = 0
    for index, spec in enumerate(specs):
        if index > begin and nbytes + spec.nbytes > part_bytes:
            parts.append((begin, index))
            begin = index
            nbytes = 0
        nbytes += spec.nbytes
    return [*parts, (begin, len(specs))]


def specs_to_text(specs: Sequence[ShardSpec]) -> str:
    """Return shards as JSON."""
    return json.dumps([asdict(spec) for spec in specs])


def specs_of_text(text: str) -> list[ShardSpec]:
    """Return the shards that `specs_to_text` wrote."""
    return [
        ShardSpec(**{**fields, "shape": tuple(fields["shape"]), "shard": tuple(fields["shard"])})
        for fields in json.loads(text)
    ]


def bytes_of(tensor: Tensor) -> Bytes:
    """Return the bytes of a tensor on the host; in its own memory if it is contiguous there."""
    raw_bytes: Bytes = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return raw_bytes


def padded(nbytes: int) -> int:
    """Return the bytes that a tensor takes in a payload."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _private(nbytes: int) -> Bytes:
    return np.empty(nbytes, np.uint8)


class Values:
    """Where the values of shards are in memory that a server shares with workers of its node, under a counter.

    The counter is odd while the server writes. Who reads compares it before and after, and reads again if it changed.

    Args:
        memory: of `nbytes_of(specs)` bytes.
        specs: of the shards.

    Source: sequence locks, as in Linux's seqlock.h.
    """

    def __init__(self, memory: memoryview, specs: Sequence[ShardSpec]) -> None:
        array: Bytes = np.frombuffer(memory, np.uint8)
        self._counter = array[:8].view(np.int64)
        payload = Unpacker(array[_ALIGNMENT:])
        self.tensors = payload.take_all(specs)

    @staticmethod
    def nbytes_of(specs: Sequence[ShardSpec]) -> int:
        """Return the bytes that the values of shards take, with their counter."""
        return _ALIGNMENT + sum(padded(spec.nbytes) for spec in specs)

    def count(self) -> None:
        """Count the beginning or the end of a change."""
        fence()
        self._counter[0] += 1
        fence()

    @property
    def counter(self) -> int:
        """The number of beginnings and ends of changes so far."""
        fence()
        count = int(self._counter[0])
        fence()
        return count


class Packer:
    """Writes tensors one behind the other into memory that it keeps from message to message.

    Args:
        allocate: returns memory of at least the bytes that it is given.
    """

    def __init__(self, allocate: Callable[[int], Bytes] = _private) -> None:
        self._memory = _private(0)
        self._allocate = allocate

    def pack(self, tensors: Sequence[Tensor]) -> Bytes:
        """Return a payload of tensors, which holds until the next call."""
        arrays = [
            bytes_of(tensor) if tensor.numel() else np.empty(0, np.uint8) for tensor in tensors
        ]
        total = sum(padded(len(array)) for array in arrays)
        if total > len(self._memory):
            self._memory = self._allocate(total)
        start = 0
        for array in arrays:
            self._memory[start : start + len(array)] = array
            start += padded(len(array))
        return self._memory[:total]


class Unpacker:
    """Reads tensors from a payload, in whose memory they are."""

    def __init__(self, payload: Bytes) -> None:
        self._payload = payload
        self._start = 0

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return the next tensor."""
        nbytes = math.prod(shape) * dtype.itemsize
        part = self._payload[self._start : self._start + nbytes]
        self._start += padded(nbytes)
        if not nbytes:
            return torch.empty(tuple(shape), dtype=dtype)
        return torch.from_numpy(part).view(dtype).reshape(tuple(shape))

    def take_all(self, specs: Sequence[ShardSpec]) -> list[Tensor]:
        """Return the tensors of shards and chunks; those of one shard are views of one tensor."""
        tensors: list[Tensor] = []
        for _, group in itertools.groupby(specs, lambda spec: spec.key):
            chunks = list(group)
            shape = (
                (sum(chunk.shape[0] for chunk in chunks), *chunks[0].row_shape)
                if chunks[0].shape
                else ()
            )
            whole = self.take(shape, chunks[0].torch_dtype)
            first = chunks[0].start
            tensors += [
                whole[chunk_spec.start - first : chunk_spec.stop - first]
                if chunk_spec.shape
                else whole
                for chunk_spec in chunks
            ]
        return tensors


#: The states of optimizers: by the number of the optimizer and of the shard.
States = dict[tuple[int, int], dict[str, Any]]


def state_to_text(states: States) -> tuple[str, list[Tensor]]:
    """Return the states of optimizers as JSON, and the tensors that belong to it."""
    tensors: list[Tensor] = []
    rows = []
    for numbers, state in states.items():
        for name, value in state.items():
            if isinstance(value, Tensor):
                tensors.append(value)
                rows.append(
                    [
                        *numbers,
                        name,
                        list(value.shape),
                        str(value.dtype).removeprefix("torch."),
                        None,
                    ]
                )
            else:
                rows.append([*numbers, name, None, None, value])
    return json.dumps(rows), tensors


def state_of_text(text: str, payload: Unpacker) -> States:
    """Return the states that `state_to_text` wrote; tensors are copies."""
    states: States = {}
    for optimizer, shard, name, shape, dtype, value in json.loads(text):
        read = value if shape is None else payload.take(shape, getattr(torch, dtype)).clone()
        states.setdefault((optimizer, shard), {})[name] = read
    return states

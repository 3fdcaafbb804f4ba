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

#: Tensors in a payload begin at multiples of this number of bytes.
_ALIGNMENT = 64
#: The part of a shard that a message has: nothing, all rows, or some rows. With the last two kinds the values are in
#: memory that worker and server share.
NOTHING, WHOLE, ROWS, WHOLE_HERE, ROWS_HERE = range(5)
#: The entry of each shard or chunk in a message: kind, number of rows, and version.
Entries = list[list[int]]


@dataclass(frozen=True)
class ShardSpec:
    """The rows [start, stop) of a variable, as their server holds them: a shard, or a chunk of one.

    Attributes:
        name: name of the variable.
        variable: number of the variable among the variables of the strategy.
        start, stop: bounds of the rows.
        shape: shape of the rows; the shape of the variable where it is whole.
        dtype: name of the dtype.
        is_sparse: whether gradients come as rows.
        shard: bounds of the shard that this is a chunk of; empty where this is the whole shard.
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
        """Variable and bounds of the shard: equal for the chunks of one shard."""
        bounds = self.shard or (self.start, self.stop)
        return (self.variable, *bounds)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of torch."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return math.prod(self.shape) * self.torch_dtype.itemsize

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of one row."""
        return self.shape[1:]


def specs_of(
    variables: Sequence[VariableSpec],
    shards: Iterable[Shard],
    sparse: frozenset[int],
    chunk_bytes: int | None = None,
) -> dict[int, list[ShardSpec]]:
    """Return the shards of each server, in their order.

    Args:
        variables: all variables of the strategy.
        shards: shards of the new variables, as `place` returns them.
        sparse: numbers of the variables whose gradients come as rows; these variables are not divided into chunks.
        chunk_bytes: approximate size of the chunks that shards are divided into. None leaves shards whole.
    """
    specs_by_server: dict[int, list[ShardSpec]] = {}
    for shard in shards:
        variable = variables[shard.variable]
        shape: tuple[int, ...] = ()
        if variable.shape:
            shape = (shard.stop - shard.start, *variable.shape[1:])
        spec = ShardSpec(
            name=variable.name,
            variable=shard.variable,
            start=shard.start,
            stop=shard.stop,
            shape=shape,
            dtype=_name_of(variable.dtype),
            is_sparse=shard.variable in sparse,
        )
        server_specs = specs_by_server.setdefault(shard.server, [])
        if chunk_bytes is None or spec.is_sparse:
            server_specs.append(spec)
        else:
            server_specs += chunks_of(spec, chunk_bytes)
    return specs_by_server


def _name_of(dtype: Any) -> str:
    """Return the name of a dtype of torch, without its module."""
    return str(dtype).removeprefix("torch.")


def chunks_of(spec: ShardSpec, chunk_bytes: int) -> list[ShardSpec]:
    """Return the chunks of a shard: each but the last has a multiple of the bytes that tensors are aligned to.

    >>> spec = ShardSpec("w", 0, 0, 100, (100, 4), "float32")
    >>> [(chunk.start, chunk.stop) for chunk in chunks_of(spec, 700)]
    [(0, 40), (40, 80), (80, 100)]
    """
    if not spec.shape or spec.nbytes <= chunk_bytes:
        return [spec]
    row_bytes = spec.nbytes // spec.shape[0]
    unit = _ALIGNMENT // math.gcd(_ALIGNMENT, row_bytes)
    n_rows = max(unit, chunk_bytes // row_bytes // unit * unit)
    chunks = []
    for start in range(spec.start, spec.stop, n_rows):
        stop = min(start + n_rows, spec.stop)
        chunk = replace(
            spec,
            start=start,
            stop=stop,
            shape=(stop - start, *spec.row_shape),
            shard=(spec.start, spec.stop),
        )
        chunks.append(chunk)
    return chunks


def parts_of(
    specs: Sequence[ShardSpec],
    part_bytes: int | None,
) -> list[tuple[int, int]]:
    """Return the parts of a push, as ranges of the shards and chunks of a server: it answers each as soon as it can.

    Args:
        specs: all shards and chunks of the server.
        part_bytes: most bytes of a part that has several shards or chunks. None makes one part of all.

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
    specs = []
    for fields in json.loads(text):
        fields["shape"] = tuple(fields["shape"])
        fields["shard"] = tuple(fields["shard"])
        specs.append(ShardSpec(**fields))
    return specs


def bytes_of(tensor: Tensor) -> Bytes:
    """Return the bytes of a tensor on the host; in its own memory if it is contiguous there."""
    host_tensor = tensor.detach().cpu().contiguous()
    raw_bytes: Bytes = host_tensor.reshape(-1).view(torch.uint8).numpy()
    return raw_bytes


def padded(nbytes: int) -> int:
    """Return the bytes that a tensor takes in a payload."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _private(nbytes: int) -> Bytes:
    """Return memory of this process alone."""
    return np.empty(nbytes, np.uint8)


class Values:
    """The values of shards in memory that a server shares with workers of its node, under a counter.

    The counter is odd while the server writes. A reader compares it before and after, and reads again if it changed.

    Args:
        memory: memory of `nbytes_of(specs)` bytes.
        specs: specs of the shards.

    Attributes:
        tensors: values of each shard, in this memory.

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
        """Number of beginnings and ends of changes so far."""
        fence()
        count = int(self._counter[0])
        fence()
        return count


class Packer:
    """Writes tensors one behind the other into memory that it keeps from message to message.

    Args:
        allocate: function that returns memory of at least a number of bytes.
    """

    def __init__(self, allocate: Callable[[int], Bytes] = _private) -> None:
        self._memory = _private(0)
        self._allocate = allocate

    def pack(self, tensors: Sequence[Tensor]) -> Bytes:
        """Return a payload of tensors, which holds until the next call."""
        arrays: list[Bytes] = []
        total = 0
        for tensor in tensors:
            if tensor.numel():
                array = bytes_of(tensor)
                arrays.append(array)
                total += padded(len(array))
        if total > len(self._memory):
            self._memory = self._allocate(total)
        start = 0
        for array in arrays:
            self._memory[start : start + len(array)] = array
            start += padded(len(array))
        return self._memory[:total]


class Unpacker:
    """Reads the tensors of a payload, in its memory, from the first to the last."""

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
        """Return the tensors of shards and chunks; the tensors of chunks of one shard are views of one tensor."""
        tensors: list[Tensor] = []
        for _, group in itertools.groupby(specs, lambda spec: spec.key):
            chunks = list(group)
            first = chunks[0]
            if not first.shape:
                tensors.append(self.take((), first.torch_dtype))
                continue
            n_rows = sum(chunk.shape[0] for chunk in chunks)
            shard_values = self.take((n_rows, *first.row_shape), first.torch_dtype)
            for chunk in chunks:
                start = chunk.start - first.start
                stop = chunk.stop - first.start
                tensors.append(shard_values[start:stop])
        return tensors


#: The states of optimizers, by the number of the optimizer and the number of the shard.
States = dict[tuple[int, int], dict[str, Any]]


def state_to_text(states: States) -> tuple[str, list[Tensor]]:
    """Return the states of optimizers as JSON, and the tensors that belong to it."""
    tensors: list[Tensor] = []
    rows: list[tuple[Any, ...]] = []
    for numbers, state in states.items():
        for name, value in state.items():
            if isinstance(value, Tensor):
                tensors.append(value)
                shape = list(value.shape)
                rows.append((*numbers, name, shape, _name_of(value.dtype), None))
            else:
                rows.append((*numbers, name, None, None, value))
    return json.dumps(rows), tensors


def state_of_text(text: str, payload: Unpacker) -> States:
    """Return the states that `state_to_text` wrote; tensors are copies."""
    states: States = {}
    for optimizer, shard, name, shape, dtype, value in json.loads(text):
        state = states.setdefault((optimizer, shard), {})
        if shape is None:
            state[name] = value
        else:
            tensor = payload.take(shape, getattr(torch, dtype))
            state[name] = tensor.clone()
    return states

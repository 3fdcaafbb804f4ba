"""The servers as a worker knows them: their shards, and how values, gradients and states go to and fro."""

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from hpcdist.errors import DesyncError, GradientError
from hpcdist.ps.layout import (
    NOTHING,
    ROWS,
    ROWS_HERE,
    WHOLE,
    WHOLE_HERE,
    Entries,
    Packer,
    ShardSpec,
    States,
    Unpacker,
    Values,
    padded,
    parts_of,
    state_to_text,
)
from hpcdist.ps.messages import Bytes, Message
from hpcdist.ps.updates import is_elementwise
from hpcdist.runtime.node_memory import map_memory

#: How often values of a server of this node are read while it writes, before they are asked for in a message.
_N_READS = 4
#: The fields of a message by their names, but for the fields that all messages of a worker have.
Fields = dict[str, Any]


class Gradient(NamedTuple):
    """The gradient of one shard in a push.

    Attributes:
        kind: NOTHING, WHOLE or ROWS.
        n_rows: number of rows of a sparse gradient.
        tensors: the values; of a sparse gradient the numbers of its rows, and their values.
    """

    kind: int
    n_rows: int
    tensors: list[Tensor]

    @property
    def nbytes(self) -> int:
        """Number of bytes of the tensors in a payload."""
        nbytes = 0
        for tensor in self.tensors:
            nbytes += padded(tensor.numel() * tensor.itemsize)
        return nbytes


_NO_GRADIENT = Gradient(NOTHING, 0, [])


@dataclass
class KnownShard:
    """A shard as this worker knows it.

    Attributes:
        spec: rows of the variable that the shard consists of.
        variable: the variable that the shard is a part of.
        version: version of the shard's values in the variable.
    """

    spec: ShardSpec
    variable: nn.Parameter
    version: int = 0

    @torch.no_grad()
    def write(self, values: Tensor, rows: Tensor | None = None) -> None:
        """Copy values into the variable."""
        if not self.variable.dim():
            self.variable.copy_(values)
            return
        part = self.variable[self.spec.start : self.spec.stop]
        if rows is None:
            part.copy_(values)
        else:
            part[rows] = values.to(part.device)

    def part_of(self, tensor: Tensor) -> Tensor:
        """Return the rows of a tensor of the variable's shape that are this shard's."""
        if not tensor.dim():
            return tensor
        return tensor[self.spec.start : self.spec.stop]

    def values(self) -> Tensor:
        """Return the rows of the variable that are this shard's."""
        return self.part_of(self.variable.detach())

    def require_later(self, version: int, worker_name: str) -> None:
        """Raise DesyncError if a server has older values of the shard than it had before."""
        if version < self.version:
            raise DesyncError(
                f"pull: expected version {self.version} of {self.spec.name!r} or a later one, got {version} on "
                f"{worker_name}; servers must not be replaced in a job."
            )

    def gradient(self) -> Gradient:
        """Return the rows of the variable's gradient that are this shard's."""
        gradient = self.variable.grad
        if gradient is None:
            return _NO_GRADIENT
        if gradient.dtype is not self.spec.torch_dtype or gradient.shape != self.variable.shape:
            raise GradientError(
                f"step: expected a gradient of {self.spec.dtype} as the servers have {self.spec.name!r}, got "
                f"{gradient.dtype} of shape {tuple(gradient.shape)}; convert the model before its first use."
            )
        if not gradient.is_sparse:
            return Gradient(WHOLE, 0, [self.part_of(gradient)])
        gradient = gradient.coalesce()
        indices = gradient._indices()[0]
        is_own = (indices >= self.spec.start) & (indices < self.spec.stop)
        rows = indices[is_own] - self.spec.start
        values = gradient._values()[is_own]
        return Gradient(ROWS, len(rows), [rows, values])


@dataclass
class KnownServer:
    """A server as this worker knows it.

    Attributes:
        rank: rank of the server.
        packer: packs the payloads of requests to the server.
        shards: shards that the server holds, in its order.
        n_adopted: number of shards of each adoption.
        paths: paths of the memory in which a server of this node has the values of each adoption, as far as it has
            announced them.
        mapped_values: values of the first adoptions, in that memory.
    """

    rank: int
    packer: Packer
    shards: list[KnownShard] = field(default_factory=list)
    n_adopted: list[int] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    mapped_values: list[Values] = field(default_factory=list)

    def indices_of(self, variables: Collection[int]) -> list[int]:
        """Return the indices of the shards that are parts of some variables, given by their numbers."""
        return [
            index for index, shard in enumerate(self.shards) if shard.spec.variable in variables
        ]

    def push(
        self,
        number: int,
        parameter_ids: Collection[int],
        part_bytes: int | None,
    ) -> list[Fields]:
        """Return the fields of the messages that push gradients to the server, one message for each part.

        Args:
            number: number of the optimizer that the server steps.
            parameter_ids: ids of the variables whose gradients are pushed.
            part_bytes: see `parts_of`.
        """
        gradients: list[Gradient] = []
        pushed_tensors: list[Tensor] = []
        for shard in self.shards:
            gradient = _NO_GRADIENT
            if id(shard.variable) in parameter_ids:
                gradient = shard.gradient()
            gradients.append(gradient)
            pushed_tensors += gradient.tensors
        payload = self.packer.pack(pushed_tensors)
        parts: list[Fields] = []
        start = 0
        specs = [shard.spec for shard in self.shards]
        for begin, end in parts_of(specs, part_bytes):
            is_last = end == len(specs)
            numbers = [number, begin, int(is_last)]
            stop = start
            for index in range(begin, end):
                gradient = gradients[index]
                numbers += [gradient.kind, gradient.n_rows, self.shards[index].version]
                stop += gradient.nbytes
            part = {
                "numbers": np.array(numbers, np.int64),
                "payload": payload[start:stop],
            }
            parts.append(part)
            start = stop
        return parts

    def take(self, message: Message, worker_name: str) -> bool:
        """Write the values of an answer into the variables, and note their versions.

        Args:
            message: answer with the index of the first shard, and for each shard from there on the kind of its values,
                the number of rows and the version.
            worker_name: name of this rank in error messages.

        Returns:
            False if the server, one of this node, was writing whenever its values were read.

        Raises:
            DesyncError: if the server has older values of a shard than it had before.
        """
        begin = int(message.numbers[0])
        entry_numbers = message.numbers[1:]
        entries: Entries = entry_numbers.reshape(-1, 3).tolist()
        shards = self.shards[begin : begin + len(entries)]
        for shard, (_, _, version) in zip(shards, entries, strict=True):
            shard.require_later(version, worker_name)
        kinds = {kind for kind, _, _ in entries}
        if kinds.isdisjoint((WHOLE_HERE, ROWS_HERE)):
            _unpack(message.payload, shards, entries)
        elif not self._read(message.payload, begin, entries):
            return False
        for shard, (_, _, version) in zip(shards, entries, strict=True):
            shard.version = version
        return True

    def _read(self, row_numbers: Bytes, begin: int, entries: Entries) -> bool:
        """Copy values from where a server of this node has them; return whether it did not write meanwhile."""
        stop = begin + len(entries)
        shards = self.shards[begin:stop]
        all_values = self._map_values()
        all_tensors: list[Tensor] = []
        for values in all_values:
            all_tensors += values.tensors
        tensors = all_tensors[begin:stop]
        for _ in range(_N_READS):
            counters = [values.counter for values in all_values]
            if any(counter & 1 for counter in counters):
                os.sched_yield()
                continue
            payload = Unpacker(row_numbers)
            for shard, tensor, (kind, n_rows, _) in zip(shards, tensors, entries, strict=True):
                if kind == WHOLE_HERE:
                    shard.write(tensor)
                elif kind == ROWS_HERE:
                    indices = payload.take((n_rows,), torch.int64)
                    shard.write(tensor[indices], indices)
            if counters == [values.counter for values in all_values]:
                return True
        return False

    def _map_values(self) -> list[Values]:
        """Return the values that a server of this node has announced, mapped at their first use."""
        n_announced = min(len(self.paths), len(self.n_adopted))
        for adoption in range(len(self.mapped_values), n_announced):
            begin = sum(self.n_adopted[:adoption])
            end = begin + self.n_adopted[adoption]
            specs = [shard.spec for shard in self.shards[begin:end]]
            memory = map_memory(self.paths[adoption])
            self.mapped_values.append(Values(memory, specs))
        return self.mapped_values


def _unpack(values_in_message: Bytes, shards: list[KnownShard], entries: Entries) -> None:
    """Write values that came in a message into the variables."""
    payload = Unpacker(values_in_message)
    for shard, (kind, n_rows, _) in zip(shards, entries, strict=True):
        dtype = shard.spec.torch_dtype
        if kind == WHOLE:
            shard.write(payload.take(shard.spec.shape, dtype))
        elif kind == ROWS:
            indices = payload.take((n_rows,), torch.int64)
            values = payload.take((n_rows, *shard.spec.row_shape), dtype)
            shard.write(values, indices)


def states_of(
    server: KnownServer,
    optimizers: Mapping[int, Optimizer],
) -> tuple[str, list[Tensor]]:
    """Return the states of optimizers, as far as they have any, for the shards of a server."""
    states: States = {}
    for number, optimizer in optimizers.items():
        # of chunks that servers have as a whole the first one has all values that are not of rows
        takes_each_chunk = is_elementwise(type(optimizer))
        seen_keys: set[tuple[int, ...]] = set()
        for index, shard in enumerate(server.shards):
            is_first = takes_each_chunk or shard.spec.key not in seen_keys
            seen_keys.add(shard.spec.key)
            values = optimizer.state.get(shard.variable, {})
            for name, value in values.items():
                if isinstance(value, Tensor) and value.shape == shard.variable.shape:
                    value = shard.part_of(value)
                elif not is_first:
                    continue
                shard_state = states.setdefault((number, index), {})
                shard_state[name] = value
    return state_to_text(states)


class ShardState(NamedTuple):
    """The state that an optimizer has for one shard."""

    shard: KnownShard
    state: dict[str, Any]


def joined(shard_states: list[ShardState], name: str) -> Any:
    """Return one value of an optimizer's state for a whole variable, given the states of its shards in order."""
    parts = [shard_state.state[name] for shard_state in shard_states]
    if len(parts) == 1:
        return parts[0]
    for part, (shard, _) in zip(parts, shard_states, strict=True):
        is_of_rows = isinstance(part, Tensor) and tuple(part.shape) == tuple(shard.spec.shape)
        if not is_of_rows:
            return parts[0]
    return torch.cat(parts).to(shard_states[0].shard.variable.device)

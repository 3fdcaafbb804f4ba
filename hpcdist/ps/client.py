"""A worker's side of the parameter servers: which shard lies where, and one exchange for each step."""

import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from hpcdist.errors import (
    DesyncError,
    GradientError,
    HpcdistError,
    PSUnavailable,
    UsageError,
    error_class,
)
from hpcdist.ps import pickles
from hpcdist.ps.layout import (
    NOTHING,
    ROWS,
    ROWS_HERE,
    WHOLE,
    WHOLE_HERE,
    ShardSpec,
    States,
    Unpacker,
    Values,
    padded,
    parts_of,
    specs_to_text,
    state_of_text,
    state_to_text,
)
from hpcdist.ps.messages import Kind, Message
from hpcdist.ps.server import COPY
from hpcdist.ps.transport import Mailbox
from hpcdist.ps.updates import check_optimizer, is_elementwise
from hpcdist.runtime.node_memory import map_memory
from hpcdist.runtime.step_flags import Request

#: How often values of a server of this node are read while it writes, before they are asked for in a message.
_N_READS = 4
#: What is sent of an optimizer for each of its groups: its settings, and the numbers of its variables.
Groups = list[tuple[dict[str, Any], list[int]]]


@dataclass
class _Known:
    """A shard as this worker knows it: the variable that it is a part of, and the version of its values here."""

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
        return tensor[self.spec.start : self.spec.stop] if tensor.dim() else tensor


class Client:
    """Pushes gradients to all servers and pulls values, for one worker.

    Args:
        mailbox: moves messages.
        servers: their ranks.
        worker: number of this worker.
        name: of this rank, for messages.
        timeout_s: longest wait for an answer, beyond what servers allow each other.
        chunk_bytes: about the size of the parts in which a push goes to each server, which answers them one by one, so
            that new values come while gradients go; None: in one, as inside a node.

    Attributes:
        chunk_bytes: as given.
        clock: steps pushed so far.
        signal: the name of a signal that a server got and sent to this worker; empty before.
        n_missed: how many pushes of others servers applied between the values that the last push was computed from and
            that push.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        servers: Sequence[int],
        worker: int,
        name: str,
        timeout_s: float,
        chunk_bytes: int | None = None,
    ) -> None:
        self._mailbox = mailbox
        self._servers = list(servers)
        self._worker = worker
        self._name = name
        self._timeout_s = timeout_s
        self.chunk_bytes = chunk_bytes
        self._shards: list[list[_Known]] = [[] for _ in servers]
        self._sequence = self.clock = 0
        self._packers = [mailbox.packer(rank) for rank in servers]
        self._batches: list[list[int]] = [[] for _ in servers]  # shards of each adoption
        # of the memory where a server has them
        self._paths: list[list[str]] = [[] for _ in servers]
        self._values: list[list[Values]] = [[] for _ in servers]
        self._optimizers: dict[int, tuple[Optimizer, list[dict[str, Any]]]] = {}
        self._members: dict[int, list[list[int]]] = {}
        self.signal = ""
        self.n_missed = 0
        self.has_left = False
        self._pid = os.getpid()

    @property
    def n_servers(self) -> int:
        """How many servers there are."""
        return len(self._servers)

    # -- variables and optimizers ---------------------------------------------------------------------------------

    def adopt(
        self, specs: dict[int, list[ShardSpec]], variables: Sequence[nn.Parameter], is_first: bool
    ) -> None:
        """Let servers hold variables from now on; all workers have the same values.

        Args:
            specs: the new shards, by server.
            variables: all of the strategy's.
            is_first: whether this worker sends the values. The others come when it has returned.
        """
        requests = {}
        for server, new in specs.items():
            shards = [_Known(spec, variables[spec.variable]) for spec in new]
            self._shards[server] += shards
            self._batches[server].append(len(shards))
            if is_first:
                payload = self._packers[server].pack(
                    [shard.part_of(shard.variable.detach()) for shard in shards]
                )
                requests[server] = {"text": specs_to_text(new), "payload": payload}
        if requests:
            self._ask("adopt", Kind.ADOPT, list(requests.items()))

    def number_of(self, optimizer: Optimizer, groups: Groups) -> int:
        """Return the number of an optimizer; at its first step servers get it. All workers step in the same order."""
        members_now = [members for _, members in groups]
        for number, (candidate, _) in self._optimizers.items():
            if candidate is optimizer and self._members[number] == members_now:
                return number
            if candidate is optimizer:
                raise UsageError(
                    f"step: expected the parameters that {type(optimizer).__name__} had at its first step, got others "
                    f"on {self._name}; make a new optimizer after adding or unfreezing parameters."
                )
        number = max(self._optimizers, default=-1) + 1
        numbers = {variable for _, members in groups for variable in members}
        shards = {
            shard.spec.key
            for server in self._shards
            for shard in server
            if shard.spec.variable in numbers
        }
        check_optimizer(type(optimizer), is_split=len(shards) > len(numbers))
        requests = {}
        for server, server_shards in enumerate(self._shards):
            server_groups = [
                (
                    settings,
                    [
                        index
                        for index, shard in enumerate(server_shards)
                        if shard.spec.variable in members
                    ],
                )
                for settings, members in groups
            ]
            pickle = pickles.dumps((type(optimizer), optimizer.defaults, server_groups))
            # of a checkpoint that every worker has loaded
            text, tensors = self._states_on(server, {number: optimizer})
            payload = self._packers[server].pack([torch.from_numpy(pickle.copy()), *tensors])
            requests[server] = {
                "numbers": np.array([number, len(pickle)], np.int64),
                "text": text,
                "payload": payload,
            }
        self._ask("step", Kind.OPTIMIZER, list(requests.items()))
        self.note_optimizer(number, optimizer, members_now)
        return number

    def note_optimizer(self, number: int, optimizer: Optimizer, members: list[list[int]]) -> None:
        """Note an optimizer that servers have.

        Args:
            number: its number there.
            optimizer: of this worker.
            members: the numbers of the variables of each of its groups.
        """
        self._optimizers[number] = (optimizer, [])  # its settings go with the first push
        self._members[number] = members

    # -- steps ------------------------------------------------------------------------------------------------------

    def step(self, number: int, settings: list[dict[str, Any]], request: Request) -> Request:
        """Push the gradients of an optimizer's variables, and write what servers answer into the variables.

        Args:
            number: of the optimizer.
            settings: of its groups, as they are now.
            request: what this worker asks of all.

        Returns:
            What all workers act on after this step.
        """
        optimizer, sent = self._optimizers[number]
        has_new_settings = settings != sent
        self._optimizers[number] = (optimizer, settings)
        self.clock += 1
        parameter_ids = {
            id(parameter) for group in optimizer.param_groups for parameter in group["params"]
        }
        part_bytes = self.chunk_bytes if is_elementwise(type(optimizer)) else None
        text = json.dumps(settings) if has_new_settings else ""
        requests: list[tuple[int, dict[str, Any]]] = []
        for server, shards in enumerate(self._shards):
            gradients = [
                _gradient_of(shard) if id(shard.variable) in parameter_ids else (NOTHING, 0, [])
                for shard in shards
            ]
            payload = self._packers[server].pack(
                [tensor for _, _, tensors in gradients for tensor in tensors]
            )
            offset = 0
            for begin, end in parts_of([shard.spec for shard in shards], part_bytes):
                numbers = [number, begin, int(end == len(shards))]
                first = offset
                for shard, (kind, n_rows, tensors) in zip(
                    shards[begin:end], gradients[begin:end], strict=True
                ):
                    numbers += [kind, n_rows, shard.version]
                    offset += sum(padded(tensor.numel() * tensor.itemsize) for tensor in tensors)
                fields = {
                    "numbers": np.array(numbers, np.int64),
                    "text": text,
                    "payload": payload[first:offset],
                }
                asks = server == 0 and end == len(shards)
                requests.append(
                    (server, {**fields, "request": int(request if asks else Request.NONE)})
                )
        # all servers have something to do at once
        requests.sort(key=lambda request: int(request[1]["numbers"][1]))
        before = [shards[0].version for shards in self._shards if shards]
        due = self._take(self._answers("step", Kind.STEP, requests))
        after = [shards[0].version for shards in self._shards if shards]
        newer = [now - was for now, was in zip(after, before, strict=True) if was >= 0]
        self.n_missed = max(0, *newer, 1) - 1  # one of the versions is this push's own
        return due

    def pull(self, number: int = 0) -> None:
        """Write the values that servers have now into the variables.

        Args:
            number: COPY: values come in messages, also inside a node.
        """
        all_numbers = [
            [number, 0, 1, *(n for shard in shards for n in (NOTHING, 0, shard.version))]
            for shards in self._shards
        ]
        requests = [
            (server, {"numbers": np.array(numbers, np.int64)})
            for server, numbers in enumerate(all_numbers)
        ]
        self._take(self._answers("pull", Kind.PULL, requests))

    def forget_values(self) -> None:
        """Let the next pull bring all values, as this worker has overwritten its own."""
        for shards in self._shards:
            for shard in shards:
                shard.version = -1

    def _take(self, answers: Iterable[tuple[int, Message]]) -> Request:
        """Write values into the variables as they come; return what is due."""
        due = Request.NONE
        torn = False
        for server, message in answers:
            due |= Request(message.request)
            if message.text:
                self._hear(server, json.loads(message.text))
            begin = int(message.numbers[0])
            rows = message.numbers[1:].reshape(-1, 3).tolist()
            shards = self._shards[server][begin : begin + len(rows)]
            self._require_later(shards, rows)
            if any(kind in (WHOLE_HERE, ROWS_HERE) for kind, _, _ in rows):
                if not self._read(server, message, begin, rows):
                    torn = True
                    continue
            else:
                _unpack(message, shards, rows)
            for shard, (_, _, version) in zip(shards, rows, strict=True):
                shard.version = version
        if torn:
            self.pull(COPY)
        return due

    def _hear(self, server: int, news: dict[str, Any]) -> None:
        """Note a signal that a server got, and the memory where it has values."""
        self.signal = self.signal or news["signal"]
        self._paths[server] += news["paths"]

    def _values_here(self, server: int) -> list[Values]:
        """Return the values that a server of this node has, mapped at their first use, as far as they are known."""
        mapped_values = self._values[server]
        for path, n_shards in list(zip(self._paths[server], self._batches[server], strict=False))[
            len(mapped_values) :
        ]:
            begin = sum(len(values.tensors) for values in mapped_values)
            specs = [shard.spec for shard in self._shards[server][begin : begin + n_shards]]
            mapped_values.append(Values(map_memory(path), specs))
        return mapped_values

    def _require_later(self, shards: list[_Known], rows: list[list[int]]) -> None:
        for shard, (_, _, version) in zip(shards, rows, strict=True):
            if version < shard.version:
                raise DesyncError(
                    f"pull: expected version {shard.version} of {shard.spec.name!r} or a later one, got {version} on "
                    f"{self._name}; servers must not be replaced in a job."
                )

    def _read(self, server: int, message: Message, begin: int, rows: list[list[int]]) -> bool:
        """Copy values from where a server of this node has them; return whether it did not write meanwhile."""
        all_values = self._values_here(server)
        stop = begin + len(rows)
        tensors = [tensor for values in all_values for tensor in values.tensors][begin:stop]
        for _ in range(_N_READS):
            before = [values.counter for values in all_values]
            if any(count & 1 for count in before):
                os.sched_yield()
                continue
            payload = Unpacker(message.payload)
            shards = self._shards[server][begin:stop]
            for shard, tensor, (kind, n_rows, _) in zip(shards, tensors, rows, strict=True):
                if kind == WHOLE_HERE:
                    shard.write(tensor)
                elif kind == ROWS_HERE:
                    indices = payload.take((n_rows,), torch.int64)
                    shard.write(tensor[indices], indices)
            if before == [values.counter for values in all_values]:
                return True
        return False

    # -- states -----------------------------------------------------------------------------------------------------

    def fetch_state(self, optimizer: Optimizer) -> None:
        """Fill an optimizer's state with that of the servers, of whole variables. Nothing before its first step."""
        number = next(
            (
                number
                for number, (candidate, _) in self._optimizers.items()
                if candidate is optimizer
            ),
            None,
        )
        if number is None:
            return
        requests = [
            (server, {"numbers": np.array([number], np.int64)}) for server in range(self.n_servers)
        ]
        answers = self._ask("save", Kind.STATE, requests)
        parts: dict[int, list[tuple[_Known, dict[str, Any]]]] = {}
        for server, message in answers:
            for (_, index), state in state_of_text(message.text, Unpacker(message.payload)).items():
                shard = self._shards[server][index]
                parts.setdefault(id(shard.variable), []).append((shard, state))
        for owned in parts.values():
            owned.sort(key=lambda pair: pair[0].spec.start)
            variable = owned[0][0].variable
            optimizer.state[variable] = {
                name: _joined(owned, name, variable) for name in owned[0][1]
            }

    def assign(self, variables: Collection[int], optimizers: Sequence[Optimizer]) -> None:
        """Make the values of some variables, and the states of some optimizers, those of the servers.

        Args:
            variables: their numbers.
            optimizers: that servers have.
        """
        numbered = {
            number: candidate
            for number, (candidate, _) in self._optimizers.items()
            if any(candidate is optimizer for optimizer in optimizers)
        }
        requests: dict[int, dict[str, Any]] = {}
        for server, shards in enumerate(self._shards):
            chosen = [
                index for index, shard in enumerate(shards) if shard.spec.variable in variables
            ]
            values = [shards[index].part_of(shards[index].variable.detach()) for index in chosen]
            text, tensors = self._states_on(server, numbered)
            requests[server] = {
                "numbers": np.array([len(chosen), *chosen, *numbered], np.int64),
                "text": text,
                "payload": self._packers[server].pack([*values, *tensors]),
            }
        self._ask("restore", Kind.ASSIGN, list(requests.items()))

    def _states_on(
        self, server: int, optimizers: Mapping[int, Optimizer]
    ) -> tuple[str, list[Tensor]]:
        """Return the states of optimizers, as far as they have any, for the shards of a server."""
        states: States = {}
        for number, optimizer in optimizers.items():
            firsts: set[tuple[int, ...]] = set()
            for index, shard in enumerate(self._shards[server]):
                is_first = shard.spec.key not in firsts or is_elementwise(type(optimizer))
                firsts.add(shard.spec.key)
                for name, value in optimizer.state.get(shard.variable, {}).items():
                    is_of_rows = isinstance(value, Tensor) and value.shape == shard.variable.shape
                    # of chunks that servers have as a whole the first one has the rest
                    if is_of_rows or is_first:
                        states.setdefault((number, index), {})[name] = (
                            shard.part_of(value) if is_of_rows else value
                        )
        return state_to_text(states)

    def statistics(self) -> list[dict[str, Any]]:
        """Return the statistics of each server."""
        answers = self._ask(
            "statistics", Kind.STATISTICS, [(server, {}) for server in range(self.n_servers)]
        )
        return [json.loads(message.text) for _, message in answers]

    def leave(self, code: int = -1) -> None:
        """Leave: the servers do not wait for this worker any more. Later calls do nothing.

        Args:
            code: with which servers leave once all workers have; -1: with that of the chief's program.
        """
        if not self.has_left and os.getpid() == self._pid:  # a forked child is no worker
            self.has_left = True
            numbers = np.array([code], np.int64)
            self._ask(
                "leave",
                Kind.LEAVE,
                [(server, {"numbers": numbers}) for server in range(self.n_servers)],
            )
            for shards in self._shards:
                shards.clear()  # so that the strategy, which variables keep alive, can go
            self._optimizers.clear()

    def _ask(
        self, call: str, kind: Kind, requests: Sequence[tuple[int, dict[str, Any]]]
    ) -> list[tuple[int, Message]]:
        """Send requests to servers and return their answers, each with its server; raises as `_answers`."""
        return list(self._answers(call, kind, requests))

    def _answers(
        self, call: str, kind: Kind, requests: Sequence[tuple[int, dict[str, Any]]]
    ) -> Iterator[tuple[int, Message]]:
        """Send requests to servers and yield their answers as they come, each with its server.

        Raises:
            PSUnavailable: when an answer is late; on this rank.
            HpcdistError: that a server answers; on this rank.
        """
        messages = []
        for server, fields in requests:
            self._sequence += 1
            message = Message(
                kind, self._worker, sequence=self._sequence, clock=self.clock, **fields
            )
            messages.append((self._servers[server], message))
        n_answers = 0
        error = None
        for number, answer in self._mailbox.exchange(messages, self._timeout_s):
            n_answers += 1
            server = requests[number][0]
            if answer.kind is Kind.ERROR:
                error = error or _error_of(answer.text, server)
            elif error is None:
                yield server, answer
        if error is not None:  # once nothing is under way any more
            raise error
        if n_answers < len(messages):
            raise PSUnavailable(
                f"{call}: expected answers of {len({rank for rank, _ in messages})} parameter servers within "
                f"{self._timeout_s:g} s, got fewer on {self._name}; look for a server that has stopped."
            )


def _unpack(message: Message, shards: list[_Known], rows: list[list[int]]) -> None:
    """Write values that came in a message into the variables."""
    payload = Unpacker(message.payload)
    for shard, (kind, n_rows, _) in zip(shards, rows, strict=True):
        if kind == WHOLE:
            shard.write(payload.take(shard.spec.shape, shard.spec.torch_dtype))
        elif kind == ROWS:
            indices = payload.take((n_rows,), torch.int64)
            shard.write(
                payload.take((n_rows, *shard.spec.row_shape), shard.spec.torch_dtype), indices
            )


def _gradient_of(shard: _Known) -> tuple[int, int, list[Tensor]]:
    """Return what a push has of a shard: its kind, the number of rows, and the tensors."""
    gradient = shard.variable.grad
    if gradient is None:
        return NOTHING, 0, []
    if gradient.dtype is not shard.spec.torch_dtype or gradient.shape != shard.variable.shape:
        raise GradientError(
            f"step: expected a gradient of {shard.spec.dtype} as the servers have {shard.spec.name!r}, got "
            f"{gradient.dtype} of shape {tuple(gradient.shape)}; convert the model before its first use."
        )
    if not gradient.is_sparse:
        return WHOLE, 0, [shard.part_of(gradient)]
    gradient = gradient.coalesce()
    indices = gradient._indices()[0]
    is_own = (indices >= shard.spec.start) & (indices < shard.spec.stop)
    return ROWS, int(is_own.sum()), [indices[is_own] - shard.spec.start, gradient._values()[is_own]]


def _joined(owned: list[tuple[_Known, dict[str, Any]]], name: str, variable: Tensor) -> Any:
    """Return one value of an optimizer's state for a whole variable, given those of its shards in order."""
    parts = [state[name] for _, state in owned]
    shapes = [tuple(shard.spec.shape) for shard, _ in owned]
    is_of_rows = len(parts) > 1 and all(
        isinstance(part, Tensor) and tuple(part.shape) == shape
        for part, shape in zip(parts, shapes, strict=True)
    )
    return torch.cat(parts).to(variable.device) if is_of_rows else parts[0]


def _error_of(text: str, server: int) -> HpcdistError:
    name, _, detail = text.partition(": ")
    kind = error_class(name)
    return kind(f"{detail if kind.__name__ == name else text} [parameter server {server}]")

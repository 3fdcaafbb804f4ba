"""A parameter server as a state machine: a request comes in, answers go out. It moves no messages and reads no clock.

Each push is applied exactly once, however often it comes; a worker's answer contains its push; versions of a shard only
grow. The shards in one message change together: all shards of a server, or a part of them.
"""

import collections
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from hpcdist.errors import DesyncError
from hpcdist.ps import pickles
from hpcdist.ps.clocks import Clocks, RequestClock
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
    specs_of_text,
    state_of_text,
    state_to_text,
)
from hpcdist.ps.messages import Bytes, Kind, Message, Numbers, answer
from hpcdist.ps.updates import Parts, State, Updater, is_elementwise, sum_of
from hpcdist.runtime.node_memory import OwnMemory
from hpcdist.runtime.step_flags import Request

#: In place of an optimizer's number in a pull: the values must come in the message, also inside a node.
COPY = -1


@dataclass(frozen=True)
class Rules:
    """The order in which the server applies and answers the pushes of several workers.

    Attributes:
        max_staleness: number of steps that a worker may be ahead of the slowest one; see `Clocks`. None sets no limit.
        is_synchronous: whether the gradients of all workers are summed and applied once.
    """

    max_staleness: int | None = None
    is_synchronous: bool = False


@dataclass(frozen=True)
class Neighbours:
    """The workers of this server's node, which read its values where they are.

    Attributes:
        workers: numbers of the workers.
        allocate: function that returns memory, of a number of bytes, that they can map.
    """

    workers: frozenset[int]
    allocate: Callable[[int], OwnMemory]


@dataclass
class _Served:
    """A shard that this server holds.

    Attributes:
        spec: rows of the variable that the shard consists of.
        values: values of these rows.
        version: number of updates of the shard.
        row_versions: version at which each row was changed last. None for a shard whose gradients are dense.
    """

    spec: ShardSpec
    values: nn.Parameter
    version: int = 0
    row_versions: Numbers | None = None

    def count_update(self, rows: Tensor | None) -> None:
        """Count an update of all rows, or of some."""
        self.version += 1
        if self.row_versions is None:
            return
        if rows is None:
            self.row_versions[:] = self.version
        else:
            self.row_versions[rows.numpy()] = self.version


@dataclass(frozen=True)
class _Part:
    """The part of a worker's request that is in a message.

    Attributes:
        number: number of the optimizer, or COPY.
        begin: number of the first shard or chunk in the part.
        is_last: whether no further parts come.
        entries: kind, number of rows and known version of each shard or chunk in the part.
    """

    number: int
    begin: int
    is_last: bool
    entries: Entries

    @classmethod
    def of(cls, message: Message) -> "_Part":
        number, begin, is_last = map(int, message.numbers[:3])
        entries: Entries = message.numbers[3:].reshape(-1, 3).tolist()
        return cls(number, begin, bool(is_last), entries)


@dataclass
class _Received:
    """Which requests of a worker have come.

    Attributes:
        incarnation: number of the worker's process, which counts its requests from the beginning.
        floor: sequence number up to which all requests have come.
        clock: clock of the last request.
        above: sequence numbers above the floor that have come: parts of the step at the clock.
    """

    incarnation: int = 0
    floor: int = 0
    clock: int = 0
    above: set[int] = field(default_factory=set)

    def note(self, message: Message) -> bool:
        """Note a request; return whether it is new. Parts of a step may overtake each other, and nothing else."""
        if message.incarnation > self.incarnation:
            self.incarnation = message.incarnation
            self.floor = 0
            self.clock = 0
            self.above = set()
        if message.sequence <= self.floor or message.sequence in self.above:
            return False
        is_step = message.kind is Kind.STEP
        if is_step and message.clock == self.clock:
            self.above.add(message.sequence)
        elif is_step:
            self.floor = max(self.above, default=self.floor)
            self.clock = message.clock
            self.above = {message.sequence}
        else:
            self.floor = message.sequence
            self.clock = message.clock
            self.above = set()
        return True


class Server:
    """The shards of one ps rank.

    Args:
        packers: packers of answers, by the number of the worker.
        rules: order in which pushes of several workers are applied and answered.
        neighbours: workers of this node. None if all workers get values in messages.

    Attributes:
        clocks: clocks of the workers, as this server has seen their pushes.
        exit_code: code to exit with once all workers have left, if one of them has set it. -1 is the exit code of the
            chief's program.
    """

    def __init__(
        self,
        packers: Mapping[int, Packer],
        rules: Rules,
        neighbours: Neighbours | None = None,
    ) -> None:
        self.clocks = Clocks(packers, rules.max_staleness)
        self.exit_code = -1
        self._rules = rules
        self._shards: list[_Served] = []
        self._updaters: dict[int, Updater] = {}
        self._received: dict[int, _Received] = {}
        # asynchronous pushes whose answers wait for other workers, by worker and first shard
        self._parked: dict[tuple[int, int], Message] = {}
        # ages of the pushes of which some parts have come, by worker and clock
        self._ages: dict[tuple[int, int], int] = {}
        # synchronous pushes, by clock and first shard; in each of these rounds by worker
        self._rounds: dict[tuple[int, int], dict[int, Message]] = {}
        self._requests = RequestClock()
        self._signal = ""
        self._packers = packers
        self._neighbours = neighbours
        self._part_packers: dict[tuple[int, int], Packer] = {}
        self._memories: list[tuple[OwnMemory, Values]] = []
        self._n_sent: dict[int, int] = {}
        self._counts: collections.Counter[str] = collections.Counter()
        self._staleness: collections.Counter[int] = collections.Counter()

    @property
    def is_done(self) -> bool:
        """Whether all workers have left."""
        return not self.clocks.live

    def note_signal(self, name: str) -> None:
        """Let a worker know, with its next values, that this rank got a signal to stop."""
        self._signal = name

    def handle(self, message: Message) -> list[Message]:
        """Take a request and return the answers that are due now: to it, and to earlier ones that waited for it."""
        received = self._received.setdefault(message.worker, _Received())
        if message.incarnation < received.incarnation:
            return []  # another process has replaced the one that has sent this
        is_new = received.note(message)
        try:
            if is_new:
                return self._take(message)
            self._counts["duplicates"] += 1
            return self._repeat(message)
        except Exception as error:  # noqa: BLE001  what an optimizer raises ends the job at the worker that it is for
            return [_error(message, error)]

    def _take(self, message: Message) -> list[Message]:
        if message.kind is Kind.STEP:
            return self._step(message)
        if message.kind is Kind.PULL:
            return [self._values(message)]
        if message.kind is Kind.STATE:
            return [self._state(message)]
        if message.kind is Kind.STATISTICS:
            text = json.dumps(self.statistics())
            return [answer(message, Kind.DONE, text=text)]
        if message.kind is Kind.ADOPT:
            self._adopt(message)
        elif message.kind is Kind.OPTIMIZER:
            self._add_optimizer(message)
        elif message.kind is Kind.ASSIGN:
            self._assign(message)
        elif message.kind is Kind.LEAVE:
            self.clocks.leave(message.worker)
            self.exit_code = max(self.exit_code, int(message.numbers[0]))
            return [answer(message, Kind.DONE), *self._released()]
        return [answer(message, Kind.DONE)]

    def _repeat(self, message: Message) -> list[Message]:
        """Answer a request that came before, without applying it again."""
        waiting = list(self._parked.values())
        for pushes in self._rounds.values():
            waiting += pushes.values()
        for push in waiting:
            if push.worker == message.worker and push.sequence == message.sequence:
                return []  # the answer is still to come
        if message.kind in (Kind.STEP, Kind.PULL):
            return [self._values(message)]
        if message.kind in (Kind.STATE, Kind.STATISTICS):
            return self._take(message)
        return [answer(message, Kind.DONE)]

    # -- variables and optimizers ---------------------------------------------------------------------------------

    def _adopt(self, message: Message) -> None:
        specs = specs_of_text(message.text)
        tensors = Unpacker(message.payload).take_all(specs)
        stored_tensors = self._stored_tensors(specs, tensors)
        for spec, values in zip(specs, stored_tensors, strict=True):
            shard = _Served(spec, nn.Parameter(values))
            if spec.is_sparse:
                shard.row_versions = np.zeros(spec.shape[0], np.int64)
            self._shards.append(shard)

    def _stored_tensors(
        self,
        specs: Sequence[ShardSpec],
        tensors: Sequence[Tensor],
    ) -> list[Tensor]:
        """Return tensors for the values of shards, filled: in memory that neighbours can read, if there are any."""
        nbytes = Values.nbytes_of(specs)
        if self._neighbours is None or not self._neighbours.workers:
            private_memory: Bytes = np.empty(nbytes, np.uint8)
            values = Values(private_memory.data, specs)
        else:
            shared_memory = self._neighbours.allocate(nbytes)
            values = Values(shared_memory.memory, specs)
            self._memories.append((shared_memory, values))
        for destination, tensor in zip(values.tensors, tensors, strict=True):
            destination.copy_(tensor)
        return values.tensors

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Let neighbours know that values change in the block."""
        for _, values in self._memories:
            values.count()
        try:
            yield
        finally:
            for _, values in self._memories:
                values.count()

    def _add_optimizer(self, message: Message) -> None:
        number = int(message.numbers[0])
        # another worker may have sent it, and both have checked that it is the same
        if number in self._updaters:
            return
        payload = Unpacker(message.payload)
        n_pickled = int(message.numbers[1])
        pickle = payload.take((n_pickled,), torch.uint8)
        kind, defaults, groups = pickles.loads(pickle.numpy())
        own_groups = [(settings, self._parameters_of(kind, shards)) for settings, shards in groups]
        self._updaters[number] = Updater.of(kind, defaults, own_groups)
        self._set_states(state_of_text(message.text, payload))

    def _parameters_of(
        self,
        kind: type[Optimizer],
        shards: Sequence[int],
    ) -> list[Parts]:
        """Return the parameters of an optimizer of some shards, each with the shards or chunks that it consists of."""
        if is_elementwise(kind):
            return [(self._shards[number].values, [number]) for number in shards]
        parameters: list[Parts] = []
        for _, group in itertools.groupby(shards, lambda number: self._shards[number].spec.key):
            chunks = list(group)
            parameters.append((self._joined(chunks), chunks))
        return parameters

    def _joined(self, chunks: Sequence[int]) -> nn.Parameter:
        """Return the values of a whole shard, in the memory of its chunks."""
        first = self._shards[chunks[0]]
        last = self._shards[chunks[-1]]
        if len(chunks) == 1:
            return first.values
        n_rows = last.spec.stop - first.spec.start
        shape = (n_rows, *last.spec.row_shape)
        values = first.values.detach()
        return nn.Parameter(values.as_strided(shape, values.stride()))

    def _set_states(self, states: States) -> None:
        states_of_optimizers: dict[int, dict[int, State]] = {}
        for (number, shard), state in states.items():
            states_of_optimizers.setdefault(number, {})[shard] = state
        for number, shard_states in states_of_optimizers.items():
            self._updaters[number].set_states(shard_states)

    def _assign(self, message: Message) -> None:
        """Replace the values of some shards, and the states of some optimizers."""
        payload = Unpacker(message.payload)
        n_shards, *numbers = map(int, message.numbers)
        with torch.no_grad(), self._writing():
            for number in numbers[:n_shards]:
                shard = self._shards[number]
                values = payload.take(shard.spec.shape, shard.spec.torch_dtype)
                shard.values.copy_(values)
                shard.count_update(None)
        for number in numbers[n_shards:]:
            self._updaters[number].optimizer.state.clear()
        self._set_states(state_of_text(message.text, payload))

    def _state(self, message: Message) -> Message:
        number = int(message.numbers[0])
        states: States = {}
        if number in self._updaters:
            updater = self._updaters[number]
            for shard, state in updater.states().items():
                states[number, shard] = state
        text, tensors = state_to_text(states)
        payload = self._packers[message.worker].pack(tensors)
        return answer(message, Kind.DONE, text=text, payload=payload)

    def statistics(self) -> dict[str, Any]:
        """Return counts of this server: pushes, duplicates, versions, and the staleness of pushes."""
        staleness: dict[str, int] = {}
        for age, n_pushes in sorted(self._staleness.items()):
            staleness[str(age)] = n_pushes
        return {
            "pushes": self._counts["pushes"],
            "duplicates": self._counts["duplicates"],
            "versions": [shard.version for shard in self._shards],
            "staleness": staleness,
        }

    # -- steps ------------------------------------------------------------------------------------------------------

    def _step(self, message: Message) -> list[Message]:
        """Apply a push, or a part of one, or keep it for its round; return the answers that this makes due."""
        part = _Part.of(message)
        if part.is_last:
            self._counts["pushes"] += 1
            self.clocks.push(message.worker, message.clock)
            self._requests.ask(
                Request(message.request),
                message.clock,
                self.clocks.latest,
            )
        if message.text:
            updater = self._updaters[part.number]
            updater.note_settings(message.worker, json.loads(message.text))
        if self._rules.is_synchronous:
            key = (message.clock, part.begin)
            self._rounds.setdefault(key, {})[message.worker] = message
            return self._released([key])
        self._apply([message])
        self._parked[message.worker, part.begin] = message
        return self._released()

    def _released(self, rounds: Sequence[tuple[int, int]] | None = None) -> list[Message]:
        """Return the answers that are due now; apply the rounds that are complete.

        Args:
            rounds: keys of the rounds that may be complete; default: all rounds.
        """
        due: list[Message] = []
        if rounds is None:
            rounds = sorted(self._rounds)
        for key in rounds:
            pushes = self._rounds[key]
            if pushes.keys() >= set(self.clocks.live):
                del self._rounds[key]
                due += self._end_round(pushes)
        for place, message in list(self._parked.items()):
            if not self._awaited(message):
                due.append(self._values(self._parked.pop(place)))
        return due

    def _end_round(self, pushes: dict[int, Message]) -> list[Message]:
        """Apply a synchronous step, and return the answers to all its workers: an error is an error of all of them."""
        messages = list(pushes.values())
        try:
            self._apply(sorted(messages, key=attrgetter("worker")))
        except Exception as error:  # noqa: BLE001  what an optimizer raises ends the job at the workers
            return [_error(message, error) for message in messages]
        return list(map(self._values, messages))

    def _awaited(self, message: Message) -> list[int]:
        """Return the other workers that the answer to an asynchronous push waits for."""
        return [worker for worker in self.clocks.awaited(message.clock) if worker != message.worker]

    def late(self, timeout_s: float) -> list[Message]:
        """Return errors for all pushes that wait, naming the workers they wait for: they have waited too long."""
        errors: list[Message] = []
        for message in self._parked.values():
            awaited = self._awaited(message)
            lateness = _lateness(message, awaited, timeout_s)
            errors.append(lateness)
        for pushes in self._rounds.values():
            missing = [worker for worker in self.clocks.live if worker not in pushes]
            for message in pushes.values():
                lateness = _lateness(message, missing, timeout_s)
                errors.append(lateness)
        self._parked = {}
        self._rounds = {}
        return errors

    @property
    def has_parked(self) -> bool:
        """Whether a worker waits for another one's push."""
        return bool(self._parked or self._rounds)

    @torch.no_grad()
    def _apply(self, messages: list[Message]) -> None:
        """Make one update of the sum of some pushes, or parts of pushes, of one optimizer."""
        parts = list(map(_Part.of, messages))
        numbers = {part.number for part in parts}
        if len(numbers) > 1:
            raise DesyncError(
                f"step: expected every worker to step the same optimizer, got optimizers {sorted(numbers)} in one "
                f"synchronous step; let all workers make the same steps."
            )
        updater = self._updaters[numbers.pop()]
        for part, message in zip(parts, messages, strict=True):
            self._note_age(part, message)
        gradients: list[dict[int, Tensor]] = []
        pushed_shards: set[int] = set()
        for part, message in zip(parts, messages, strict=True):
            part_gradients = self._gradients_of(part, message)
            gradients.append(part_gradients)
            pushed_shards.update(part_gradients)
        totals: dict[int, Tensor | None] = {}
        for number in sorted(pushed_shards):
            pushed = [part_gradients.get(number) for part_gradients in gradients]
            totals[number] = sum_of(pushed, self._shards[number].values)
        with self._writing():
            changed = updater.step(totals, messages[0].worker)
        for number, rows in changed.items():
            self._shards[number].count_update(rows)

    def _note_age(self, part: _Part, message: Message) -> None:
        """Note how many updates the values were behind from which a push was computed; count it with the last part.

        The age of a push is the age of the oldest shard in any of its parts.
        """
        shards = self._shards[part.begin : part.begin + len(part.entries)]
        age = 0
        for shard, (kind, _, known_version) in zip(shards, part.entries, strict=True):
            if kind != NOTHING:
                age = max(age, shard.version - known_version)
        key = (message.worker, message.clock)
        age = max(age, self._ages.pop(key, 0))
        if part.is_last:
            self._staleness[age] += 1
        else:
            self._ages[key] = age

    def _gradients_of(self, part: _Part, message: Message) -> dict[int, Tensor]:
        """Return the gradients in a push, by the number of the shard, in the memory of the push."""
        payload = Unpacker(message.payload)
        gradients: dict[int, Tensor] = {}
        for number, (kind, n_rows, _) in enumerate(part.entries, part.begin):
            if kind == NOTHING:
                continue
            spec = self._shards[number].spec
            if kind == WHOLE:
                gradients[number] = payload.take(spec.shape, spec.torch_dtype)
            elif kind == ROWS:
                indices = payload.take((1, n_rows), torch.int64)
                values = payload.take((n_rows, *spec.row_shape), spec.torch_dtype)
                gradients[number] = torch.sparse_coo_tensor(
                    indices,
                    values,
                    spec.shape,
                    check_invariants=False,
                )
        return gradients

    def _values(self, message: Message) -> Message:
        """Return the answer with the values that a worker does not know yet.

        A worker of this node learns which values these are, and reads them where they are.
        """
        part = _Part.of(message)
        is_here = self._is_neighbour(message)
        kind_of_whole = WHOLE
        kind_of_rows = ROWS
        if is_here:
            kind_of_whole = WHOLE_HERE
            kind_of_rows = ROWS_HERE
        numbers = [part.begin]
        tensors: list[Tensor] = []
        for shard, (_, _, version) in zip(self._shards[part.begin :], part.entries, strict=False):
            if version == shard.version:
                numbers += [NOTHING, 0, shard.version]
            elif shard.row_versions is not None and version >= 0:
                rows = np.flatnonzero(shard.row_versions > version)
                numbers += [kind_of_rows, len(rows), shard.version]
                tensors.append(torch.from_numpy(rows))
                if not is_here:
                    tensors.append(shard.values.detach()[rows])
            else:
                numbers += [kind_of_whole, 0, shard.version]
                if not is_here:
                    tensors.append(shard.values.detach())
        return answer(
            message,
            Kind.VALUES,
            request=int(self._requests.due(message.clock)),
            numbers=np.array(numbers, np.int64),
            text=self._news_for(message.worker, is_here),
            payload=self._packer_of(message.worker, part).pack(tensors),
        )

    def _packer_of(self, worker: int, part: _Part) -> Packer:
        """Return the packer of an answer: one for each part, as several may be under way."""
        if part.begin == 0 and part.is_last:
            return self._packers[worker]
        return self._part_packers.setdefault((worker, part.begin), Packer())

    def _is_neighbour(self, message: Message) -> bool:
        """Return whether a worker reads the values where they are, and has not asked for a copy."""
        is_here = self._neighbours is not None and message.worker in self._neighbours.workers
        return is_here and int(message.numbers[0]) != COPY

    def _news_for(self, worker: int, is_here: bool) -> str:
        """Return news for a worker, as JSON: a signal that this rank got, and paths of the memory where values are.

        The worker that gets the signal asks all other workers to stop. Without news the text is empty.
        """
        signal = self._signal
        self._signal = ""
        paths: list[str] = []
        if is_here:
            n_sent = self._n_sent.get(worker, 0)
            paths = [memory.path for memory, _ in self._memories[n_sent:]]
            self._n_sent[worker] = len(self._memories)
        if not signal and not paths:
            return ""
        return json.dumps({"signal": signal, "paths": paths})


def _error(message: Message, error: Exception) -> Message:
    kind = type(error).__name__
    text = f"{kind}: {error}"
    return answer(message, Kind.ERROR, text=text)


def _lateness(
    message: Message,
    awaited: Sequence[int],
    timeout_s: float,
) -> Message:
    """Return the error for a push that has waited too long for other workers."""
    workers = ", ".join(map(str, awaited))
    text = (
        f"CollectiveTimeoutError: step: expected worker {workers} to push step {message.clock} within {timeout_s:g} s, "
        f"got nothing; look for what keeps it (HPCDIST_TIMEOUT_S sets the limit)."
    )
    return answer(message, Kind.ERROR, text=text)

"""A parameter server as a state machine: a request comes in, answers go out. It moves no messages and reads no clock.

What holds for each push: it is applied exactly once, however often it comes; a worker's answer contains what it pushed;
versions of a shard only grow. What is in one message changes together: all shards of a server, or a part of them.
"""

import collections
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
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
from hpcdist.ps.updates import Parts, Updater, is_elementwise, sum_of
from hpcdist.runtime.node_memory import OwnMemory
from hpcdist.runtime.step_flags import Request

#: In place of an optimizer's number in a pull: values are to come in the message, also inside a node.
COPY = -1


@dataclass(frozen=True)
class Rules:
    """What workers may expect of each other.

    Attributes:
        max_staleness: see `Clocks`.
        is_synchronous: whether the gradients of all workers are summed and applied once.
    """

    max_staleness: int | None = None
    is_synchronous: bool = False


@dataclass(frozen=True)
class Neighbours:
    """The workers of this server's node, which read its values where they are.

    Attributes:
        workers: their numbers.
        allocate: returns memory that they can map.
    """

    workers: frozenset[int]
    allocate: Callable[[int], OwnMemory]


@dataclass
class _Served:
    """A shard: its values, the updates it has had, and for rows at which update each was changed last."""

    spec: ShardSpec
    values: nn.Parameter
    version: int = 0
    row_versions: Numbers | None = None

    def count_update(self, rows: Tensor | None) -> None:
        """Count an update of all rows, or of some."""
        self.version += 1
        if self.row_versions is not None:
            self.row_versions[slice(None) if rows is None else rows.numpy()] = self.version


@dataclass(frozen=True)
class _Part:
    """Which part of a worker's request is in a message.

    Attributes:
        number: of the optimizer, or COPY.
        begin: number of the first shard or chunk in it.
        is_last: whether no further parts come.
        rows: kind, number of rows and known version of each.
    """

    number: int
    begin: int
    is_last: bool
    rows: list[list[int]]

    @classmethod
    def of(cls, message: Message) -> "_Part":
        number, begin, is_last = map(int, message.numbers[:3])
        return cls(number, begin, bool(is_last), message.numbers[3:].reshape(-1, 3).tolist())


@dataclass
class _Received:
    """Which requests of a worker have come: all up to `floor`, and `above` that parts of the step at `clock`."""

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
        if message.kind is Kind.STEP and message.clock == self.clock:
            self.above.add(message.sequence)
        else:
            is_step = message.kind is Kind.STEP
            self.floor = max(self.above, default=self.floor) if is_step else message.sequence
            self.clock = message.clock
            self.above = {message.sequence} if is_step else set()
        return True


class Server:
    """The shards of one ps rank.

    Args:
        packers: what packs answers, for each worker by its number.
        rules: what workers may expect of each other.
        neighbours: the workers of this node; default: all get values in messages.

    Attributes:
        clocks: of the workers, as seen here.
        exit_code: with which to leave once all workers have, as one of them said; -1: with the chief's.
    """

    def __init__(
        self, packers: Mapping[int, Packer], rules: Rules, neighbours: Neighbours | None = None
    ) -> None:
        self.clocks = Clocks(packers, rules.max_staleness)
        self.exit_code = -1
        self._rules = rules
        self._shards: list[_Served] = []
        self._updaters: dict[int, Updater] = {}
        self._received: dict[int, _Received] = {}
        self._parked: dict[tuple[int, int], Message] = {}  # by worker and first shard
        # of pushes of which parts have come, by worker and clock
        self._ages: dict[tuple[int, int], int] = {}
        # by clock and first shard: what came of each worker
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
        """Take a request and return the answers that are due now: to this one, and to others that waited for it."""
        received = self._received.setdefault(message.worker, _Received())
        if message.incarnation < received.incarnation:
            return []  # of a process that another one has replaced
        is_new = received.note(message)
        if not is_new:
            self._counts["duplicates"] += 1
        try:
            return self._take(message) if is_new else self._repeat(message)
        except Exception as error:  # noqa: BLE001  what an optimizer raises ends the job at the worker that it is for
            return [answer(message, Kind.ERROR, text=f"{type(error).__name__}: {error}")]

    def _take(self, message: Message) -> list[Message]:
        if message.kind is Kind.STEP:
            return self._step(message)
        if message.kind is Kind.PULL:
            return [self._values(message)]
        if message.kind is Kind.STATE:
            return [self._state(message)]
        if message.kind is Kind.STATISTICS:
            return [answer(message, Kind.DONE, text=json.dumps(self.statistics()))]
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
        waiting = [
            *self._parked.values(),
            *(push for pushes in self._rounds.values() for push in pushes.values()),
        ]
        if any(
            (push.worker, push.sequence) == (message.worker, message.sequence) for push in waiting
        ):
            return []  # the answer is still to come
        if message.kind in (Kind.STEP, Kind.PULL):
            return [self._values(message)]
        return (
            self._take(message)
            if message.kind in (Kind.STATE, Kind.STATISTICS)
            else [answer(message, Kind.DONE)]
        )

    # -- variables and optimizers ---------------------------------------------------------------------------------

    def _adopt(self, message: Message) -> None:
        specs = specs_of_text(message.text)
        tensors = Unpacker(message.payload).take_all(specs)
        for spec, values in zip(specs, self._stored_tensors(specs, tensors), strict=True):
            rows = np.zeros(spec.shape[0], np.int64) if spec.is_sparse else None
            self._shards.append(_Served(spec, nn.Parameter(values), row_versions=rows))

    def _stored_tensors(
        self, specs: Sequence[ShardSpec], tensors: Sequence[Tensor]
    ) -> list[Tensor]:
        """Return tensors for the values of shards, filled: in memory that neighbours can read, if there are any."""
        if self._neighbours is None or not self._neighbours.workers:
            memory: Bytes = np.empty(Values.nbytes_of(specs), np.uint8)
            return self._filled(Values(memory.data, specs), tensors)
        shared_memory = self._neighbours.allocate(Values.nbytes_of(specs))
        values = Values(shared_memory.memory, specs)
        self._memories.append((shared_memory, values))
        return self._filled(values, tensors)

    @staticmethod
    def _filled(values: Values, tensors: Sequence[Tensor]) -> list[Tensor]:
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
        if number in self._updaters:  # of another worker, which has checked that it is the same
            return
        payload = Unpacker(message.payload)
        pickle = payload.take((int(message.numbers[1]),), torch.uint8)
        kind, defaults, groups = pickles.loads(pickle.numpy())
        chosen = [(settings, self._parameters_of(kind, shards)) for settings, shards in groups]
        self._updaters[number] = Updater.of(kind, defaults, chosen)
        self._set_states(state_of_text(message.text, payload))

    def _parameters_of(self, kind: type[Optimizer], shards: Sequence[int]) -> list[Parts]:
        """Return the parameters of an optimizer of some shards, each with the numbers of what it consists of."""
        if is_elementwise(kind):
            return [(self._shards[number].values, [number]) for number in shards]
        groups = [
            list(group)
            for _, group in itertools.groupby(shards, lambda number: self._shards[number].spec.key)
        ]
        return [(self._joined(group), group) for group in groups]

    def _joined(self, chunks: Sequence[int]) -> nn.Parameter:
        """Return the values of a whole shard, in the memory of its chunks."""
        first = self._shards[chunks[0]]
        last = self._shards[chunks[-1]].spec
        if len(chunks) == 1:
            return first.values
        shape = (last.stop - first.spec.start, *last.row_shape)
        return nn.Parameter(first.values.detach().as_strided(shape, first.values.stride()))

    def _set_states(self, states: States) -> None:
        for number in {optimizer for optimizer, _ in states}:
            shard_states = {
                shard: state for (optimizer, shard), state in states.items() if optimizer == number
            }
            self._updaters[number].set_states(shard_states)

    def _assign(self, message: Message) -> None:
        """Replace the values of some shards, and the states of some optimizers."""
        payload = Unpacker(message.payload)
        n_shards, *numbers = map(int, message.numbers)
        with torch.no_grad(), self._writing():
            for number in numbers[:n_shards]:
                shard = self._shards[number]
                shard.values.copy_(payload.take(shard.spec.shape, shard.spec.torch_dtype))
                shard.count_update(None)
        for number in numbers[n_shards:]:
            self._updaters[number].optimizer.state.clear()
        self._set_states(state_of_text(message.text, payload))

    def _state(self, message: Message) -> Message:
        number = int(message.numbers[0])
        updater = self._updaters.get(number)
        shard_states = {} if updater is None else updater.states()
        states = {(number, shard): state for shard, state in shard_states.items()}
        text, tensors = state_to_text(states)
        return answer(
            message, Kind.DONE, text=text, payload=self._packers[message.worker].pack(tensors)
        )

    def statistics(self) -> dict[str, Any]:
        """Return counts of this server: pushes, duplicates, versions, and the staleness of pushes."""
        return {
            "pushes": self._counts["pushes"],
            "duplicates": self._counts["duplicates"],
            "versions": [shard.version for shard in self._shards],
            "staleness": {str(age): n for age, n in sorted(self._staleness.items())},
        }

    # -- steps ------------------------------------------------------------------------------------------------------

    def _step(self, message: Message) -> list[Message]:
        """Apply a push, or a part of one, or keep it for its round; return the answers that this makes due."""
        part = _Part.of(message)
        if part.is_last:
            self._counts["pushes"] += 1
            self.clocks.push(message.worker, message.clock)
            self._requests.ask(Request(message.request), message.clock, self.clocks.latest)
        if message.text:
            self._updaters[part.number].note_settings(message.worker, json.loads(message.text))
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
            rounds: those that may be complete; default: all.
        """
        due: list[Message] = []
        for key in sorted(self._rounds) if rounds is None else rounds:
            pushes = self._rounds[key]
            if all(worker in pushes for worker in self.clocks.live):
                del self._rounds[key]
                self._apply([pushes[worker] for worker in sorted(pushes)])
                due += pushes.values()
        for place, message in list(self._parked.items()):
            if not self._awaited(message):
                due.append(self._parked.pop(place))
        return [self._values(message) for message in due]

    def _awaited(self, message: Message) -> list[int]:
        """Return the other workers that the answer to an asynchronous push waits for."""
        return [worker for worker in self.clocks.awaited(message.clock) if worker != message.worker]

    def late(self, timeout_s: float) -> list[Message]:
        """Return errors for all that wait, naming whom they wait for: they have waited too long."""
        waiting = [(message, self._awaited(message)) for message in self._parked.values()]
        for pushes in self._rounds.values():
            missing = [worker for worker in self.clocks.live if worker not in pushes]
            waiting += [(message, missing) for message in pushes.values()]
        self._parked = {}
        self._rounds = {}
        return [
            answer(
                message,
                Kind.ERROR,
                text=f"CollectiveTimeoutError: step: expected worker {', '.join(map(str, awaited))} to "
                f"push step {message.clock} within {timeout_s:g} s, got nothing; look for what keeps it "
                f"(HPCDIST_TIMEOUT_S sets the limit).",
            )
            for message, awaited in waiting
        ]

    @property
    def has_parked(self) -> bool:
        """Whether a worker waits for another one's push."""
        return bool(self._parked or self._rounds)

    @torch.no_grad()
    def _apply(self, messages: list[Message]) -> None:
        """Make one update of the sum of some pushes, or parts of pushes, of one optimizer."""
        parts = [_Part.of(message) for message in messages]
        numbers = {part.number for part in parts}
        if len(numbers) > 1:
            raise DesyncError(
                f"step: expected every worker to step the same optimizer, got optimizers {sorted(numbers)} in one "
                f"synchronous step; let all workers make the same steps."
            )
        updater = self._updaters[numbers.pop()]
        for part, message in zip(parts, messages, strict=True):
            self._note_age(part, message)
        gradients = [
            self._gradients_of(part, message) for part, message in zip(parts, messages, strict=True)
        ]
        totals = {
            number: sum_of(
                [push_gradients.get(number) for push_gradients in gradients],
                self._shards[number].values,
            )
            for number in sorted(
                {number for push_gradients in gradients for number in push_gradients}
            )
        }
        with self._writing():
            changed = updater.step(totals, messages[0].worker)
        for number, rows in changed.items():
            self._shards[number].count_update(rows)

    def _note_age(self, part: _Part, message: Message) -> None:
        """Count with its last part how many updates the values were behind that a push was computed from.

        That is of the oldest shard in any of its parts.
        """
        shards = self._shards[part.begin : part.begin + len(part.rows)]
        pushed = [
            (shard, known_version)
            for shard, (kind, _, known_version) in zip(shards, part.rows, strict=True)
            if kind != NOTHING
        ]
        key = (message.worker, message.clock)
        age = max((shard.version - known_version for shard, known_version in pushed), default=0)
        age = max(age, self._ages.pop(key, 0))
        if part.is_last:
            self._staleness[age] += 1
        else:
            self._ages[key] = age

    def _gradients_of(self, part: _Part, message: Message) -> dict[int, Tensor]:
        """Return the gradients in a push, by number of shard, in its memory."""
        payload = Unpacker(message.payload)
        gradients = {}
        for number, (kind, n_rows, _) in enumerate(part.rows, part.begin):
            spec = self._shards[number].spec if kind != NOTHING else None
            if spec is not None and kind == WHOLE:
                gradients[number] = payload.take(spec.shape, spec.torch_dtype)
            elif spec is not None and kind == ROWS:
                indices = payload.take((1, n_rows), torch.int64)
                values = payload.take((n_rows, *spec.row_shape), spec.torch_dtype)
                gradients[number] = torch.sparse_coo_tensor(
                    indices, values, spec.shape, check_invariants=False
                )
        return gradients

    def _values(self, message: Message) -> Message:
        """Return the values that a worker does not know yet; to one of this node, which they are."""
        part = _Part.of(message)
        is_here = self._is_neighbour(message)
        numbers = [part.begin]
        parts = []
        for shard, (_, _, version) in zip(self._shards[part.begin :], part.rows, strict=False):
            if version == shard.version:
                numbers += [NOTHING, 0, shard.version]
            elif shard.row_versions is not None and version >= 0:
                rows = np.flatnonzero(shard.row_versions > version)
                numbers += [ROWS_HERE if is_here else ROWS, len(rows), shard.version]
                parts += [
                    torch.from_numpy(rows),
                    *([] if is_here else [shard.values.detach()[rows]]),
                ]
            else:
                numbers += [WHOLE_HERE if is_here else WHOLE, 0, shard.version]
                parts += [] if is_here else [shard.values.detach()]
        return answer(
            message,
            Kind.VALUES,
            request=int(self._requests.due(message.clock)),
            numbers=np.array(numbers, np.int64),
            text=self._news_for(message.worker, is_here),
            payload=self._packer_of(message.worker, part).pack(parts),
        )

    def _packer_of(self, worker: int, part: _Part) -> Packer:
        """Return what packs an answer: one for each part, as several may be under way."""
        if part.begin == 0 and part.is_last:
            return self._packers[worker]
        return self._part_packers.setdefault((worker, part.begin), Packer())

    def _is_neighbour(self, message: Message) -> bool:
        """Return whether a worker reads the values where they are, and has not asked for a copy."""
        is_here = self._neighbours is not None and message.worker in self._neighbours.workers
        return is_here and int(message.numbers[0]) != COPY

    def _news_for(self, worker: int, is_here: bool) -> str:
        """Return what goes to a worker beside values, as JSON: a signal that this rank got, and where values are."""
        # this worker asks all others to stop
        signal = self._signal
        self._signal = ""
        paths = (
            [memory.path for memory, _ in self._memories[self._n_sent.get(worker, 0) :]]
            if is_here
            else []
        )
        if is_here:
            self._n_sent[worker] = len(self._memories)
        return json.dumps({"signal": signal, "paths": paths}) if signal or paths else ""

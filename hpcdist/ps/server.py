"""A parameter server as a state machine: a request comes in, answers go out. It moves no messages and reads no clock.

What holds for each push: it is applied exactly once, however often it comes; a worker's answer contains what it pushed;
versions of a shard only grow. Shards of one server change together, those of different servers do not.
"""

import collections
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from hpcdist.errors import DesyncError, UsageError
from hpcdist.plan.replicas import plan_row_additions
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
    Unpacker,
    Values,
    specs_of_text,
    state_of_text,
    state_to_text,
)
from hpcdist.ps.messages import Kind, Message, Numbers, answer
from hpcdist.runtime.node_memory import OwnMemory
from hpcdist.runtime.step_flags import Request

#: In place of an optimizer's number in a pull: values are to come in the message, also inside a node.
COPY = -1
#: Optimizers that change, for a gradient of rows, these rows alone, if they have none of these settings.
_CHANGES_ROWS_ALONE: dict[type[Optimizer], tuple[str, ...]] = {
    torch.optim.SparseAdam: (),
    torch.optim.SGD: ("momentum", "weight_decay"),
    torch.optim.Adagrad: ("weight_decay", "lr_decay"),
}


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


@dataclass
class _Updater:
    """An optimizer of the job, as far as it is this server's: of these shards, with the settings that workers sent."""

    optimizer: Optimizer
    shards: list[int]
    settings: dict[int, list[dict[str, Any]]] = field(default_factory=dict)


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

    def __init__(self, packers: Mapping[int, Packer], rules: Rules, neighbours: Neighbours | None = None) -> None:
        self.clocks = Clocks(packers, rules.max_staleness)
        self.exit_code = -1
        self._rules = rules
        self._shards: list[_Served] = []
        self._updaters: dict[int, _Updater] = {}
        self._last: dict[int, tuple[int, int]] = {}
        self._parked: dict[int, Message] = {}
        self._rounds: dict[int, dict[int, Message]] = {}  # by clock: what came of each worker
        self._round = 0
        self._requests = RequestClock()
        self._signal = ""
        self._packers, self._neighbours = packers, neighbours
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
        incarnation, sequence = self._last.get(message.worker, (0, 0))
        if message.incarnation < incarnation:
            return []  # of a process that another one has replaced
        is_new = (message.incarnation, message.sequence) > (incarnation, sequence)
        self._last[message.worker] = max((message.incarnation, message.sequence), (incarnation, sequence))
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
        if message.worker in self._parked:
            return []  # the answer is still to come
        if message.kind in (Kind.STEP, Kind.PULL):
            return [self._values(message)]
        return self._take(message) if message.kind in (Kind.STATE, Kind.STATISTICS) else [answer(message, Kind.DONE)]

    # -- variables and optimizers ---------------------------------------------------------------------------------

    def _adopt(self, message: Message) -> None:
        payload, specs = Unpacker(message.payload), specs_of_text(message.text)
        tensors = [payload.take(spec.shape, spec.torch_dtype) for spec in specs]
        for spec, values in zip(specs, self._held(specs, tensors), strict=True):
            rows = np.zeros(spec.shape[0], np.int64) if spec.is_sparse else None
            self._shards.append(_Served(spec, nn.Parameter(values), row_versions=rows))

    def _held(self, specs: Sequence[ShardSpec], tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return tensors for the values of shards, filled: in memory that neighbours can read, if there are any."""
        if self._neighbours is None or not self._neighbours.workers:
            return [tensor.clone() for tensor in tensors]
        own = self._neighbours.allocate(Values.nbytes_of(specs))
        values = Values(own.memory, specs)
        for held, tensor in zip(values.tensors, tensors, strict=True):
            held.copy_(tensor)
        self._memories.append((own, values))
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
        chosen = [
            {**settings, "params": [self._shards[shard].values for shard in shards]} for settings, shards in groups
        ]
        optimizer = kind.__new__(kind)
        optimizer.__setstate__({"defaults": defaults, "state": collections.defaultdict(dict), "param_groups": chosen})
        self._updaters[number] = _Updater(optimizer, [shard for _, shards in groups for shard in shards])
        for (_, shard), state in state_of_text(message.text, payload).items():
            optimizer.state[self._shards[shard].values] = state

    def _assign(self, message: Message) -> None:
        """Replace the values of some shards, and the states of some optimizers."""
        payload = Unpacker(message.payload)
        n_shards, *rest = map(int, message.numbers)
        with torch.no_grad(), self._writing():
            for number in rest[:n_shards]:
                shard = self._shards[number]
                shard.values.copy_(payload.take(shard.spec.shape, shard.spec.torch_dtype))
                shard.count_update(None)
        for number in rest[n_shards:]:
            self._updaters[number].optimizer.state.clear()
        for (optimizer, shard_number), state in state_of_text(message.text, payload).items():
            self._updaters[optimizer].optimizer.state[self._shards[shard_number].values] = state

    def _state(self, message: Message) -> Message:
        number = int(message.numbers[0])
        updater, states = self._updaters.get(number), {}
        if updater is not None:
            of_values = updater.optimizer.state
            states = {(number, shard): dict(of_values[self._shards[shard].values]) for shard in updater.shards}
        text, tensors = state_to_text(states)
        return answer(message, Kind.DONE, text=text, payload=self._packers[message.worker].pack(tensors))

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
        """Apply a push, or keep it for its round; return the answers that this makes due."""
        self._counts["pushes"] += 1
        self.clocks.push(message.worker, message.clock)
        self._requests.ask(Request(message.request), message.clock, self.clocks.latest)
        if message.text:
            groups = json.loads(message.text)
            self._updaters[int(message.numbers[0])].settings[message.worker] = [_with_tuples(one) for one in groups]
        if self._rules.is_synchronous:
            self._rounds.setdefault(message.clock, {})[message.worker] = message
        else:
            self._apply([message])
        self._parked[message.worker] = message
        return self._released()

    def _released(self) -> list[Message]:
        """Return the answers that are due now; apply the rounds that are complete."""
        while (pushes := self._rounds.get(self._round + 1)) and all(one in pushes for one in self.clocks.live):
            self._round += 1
            self._apply([pushes[worker] for worker in sorted(pushes)])
            del self._rounds[self._round]
        due = [message for message in self._parked.values() if not self._awaited(message)]
        for message in due:
            del self._parked[message.worker]
        return [self._values(message) for message in due]

    def _awaited(self, message: Message) -> list[int]:
        """Return the workers that the answer to a push waits for."""
        if not self._rules.is_synchronous:
            return self.clocks.awaited(message.clock)
        if message.clock <= self._round:
            return []
        there = self._rounds[message.clock]
        return [worker for worker in self.clocks.live if worker not in there] or [message.worker]

    def late(self, timeout_s: float) -> list[Message]:
        """Return errors for all that wait, naming whom they wait for: they have waited too long."""
        parked, self._parked = list(self._parked.values()), {}
        return [
            answer(
                message,
                Kind.ERROR,
                text=f"CollectiveTimeoutError: step: expected worker {', '.join(map(str, self._awaited(message)))} to "
                f"push step {message.clock} within {timeout_s:g} s, got nothing; look for what keeps it "
                f"(HPCDIST_TIMEOUT_S sets the limit).",
            )
            for message in parked
        ]

    @property
    def has_parked(self) -> bool:
        """Whether a worker waits for another one's push."""
        return bool(self._parked)

    @torch.no_grad()
    def _apply(self, messages: list[Message]) -> None:
        """Make one update of the sum of some pushes of one optimizer."""
        numbers = {int(message.numbers[0]) for message in messages}
        if len(numbers) > 1:
            raise DesyncError(
                f"step: expected every worker to step the same optimizer, got optimizers {sorted(numbers)} in one "
                f"synchronous step; let all workers make the same steps."
            )
        updater = self._updaters[numbers.pop()]
        self._staleness.update(self._age_of(message) for message in messages)
        gradients = [self._gradients_of(message) for message in messages]
        changed: dict[int, Tensor | None] = {}
        for number in updater.shards:
            shard, pushed = self._shards[number], [own.get(number) for own in gradients]
            total = _sum_of(pushed, shard.values)
            if total is None:
                continue
            shard.values.grad = total
            changed[number] = total._indices()[0] if total.is_sparse and _changes_rows_alone(updater) else None
        for group, settings in zip(
            updater.optimizer.param_groups, updater.settings.get(messages[0].worker, []), strict=False
        ):
            group.update(settings)
        with self._writing():
            updater.optimizer.step()
        for number, rows in changed.items():
            self._shards[number].values.grad = None
            self._shards[number].count_update(rows)

    def _age_of(self, message: Message) -> int:
        """Return how many updates the values were behind that a push was computed from: of the oldest shard."""
        rows = message.numbers[1:].reshape(-1, 3).tolist()
        pushed = [
            (shard, known) for shard, (kind, _, known) in zip(self._shards, rows, strict=False) if kind != NOTHING
        ]
        return max((shard.version - known for shard, known in pushed), default=0)

    def _gradients_of(self, message: Message) -> dict[int, Tensor]:
        """Return the gradients in a push, by number of shard, in its memory."""
        payload, found = Unpacker(message.payload), {}
        for number, (kind, n_rows, _) in enumerate(message.numbers[1:].reshape(-1, 3).tolist()):
            spec = self._shards[number].spec if kind != NOTHING else None
            if spec is not None and kind == WHOLE:
                found[number] = payload.take(spec.shape, spec.torch_dtype)
            elif spec is not None and kind == ROWS:
                indices = payload.take((1, n_rows), torch.int64)
                values = payload.take((n_rows, *spec.row_shape), spec.torch_dtype)
                found[number] = torch.sparse_coo_tensor(indices, values, spec.shape, check_invariants=False)
        return found

    def _values(self, message: Message) -> Message:
        """Return the values that a worker does not know yet; to one of this node, which they are."""
        known = message.numbers[1:].reshape(-1, 3)[:, 2].tolist()
        is_here = self._is_neighbour(message)
        numbers, parts = [0], []
        for shard, version in zip(self._shards, known, strict=False):
            if version == shard.version:
                numbers += [NOTHING, 0, shard.version]
            elif shard.row_versions is not None and version >= 0:
                rows = np.flatnonzero(shard.row_versions > version)
                numbers += [ROWS_HERE if is_here else ROWS, len(rows), shard.version]
                parts += [torch.from_numpy(rows), *([] if is_here else [shard.values.detach()[rows]])]
            else:
                numbers += [WHOLE_HERE if is_here else WHOLE, 0, shard.version]
                parts += [] if is_here else [shard.values.detach()]
        return answer(
            message,
            Kind.VALUES,
            request=int(self._requests.due(message.clock)),
            numbers=np.array(numbers, np.int64),
            text=self._news_for(message.worker, is_here),
            payload=self._packers[message.worker].pack(parts),
        )

    def _is_neighbour(self, message: Message) -> bool:
        """Return whether a worker reads the values where they are, and has not asked for a copy."""
        is_here = self._neighbours is not None and message.worker in self._neighbours.workers
        return is_here and int(message.numbers[0]) != COPY

    def _news_for(self, worker: int, is_here: bool) -> str:
        """Return what goes to a worker beside values, as JSON: a signal that this rank got, and where values are."""
        signal, self._signal = self._signal, ""  # this worker asks all others to stop
        paths = [own.path for own, _ in self._memories[self._n_sent.get(worker, 0) :]] if is_here else []
        if is_here:
            self._n_sent[worker] = len(self._memories)
        return json.dumps({"signal": signal, "paths": paths}) if signal or paths else ""


def _sum_of(pushed: list[Tensor | None], like: Tensor) -> Tensor | None:
    """Return the sum of gradients in the order of the workers, in the tree that an all-reduce adds in.

    None where nobody has one. One of a dtype of 16 bits is added in float32.
    """
    there = [one for one in pushed if one is not None]
    if len(there) < 2 or len(pushed) < 2:
        return there[0].coalesce() if there and there[0].is_sparse else there[0] if there else None
    if all(one.is_sparse for one in there):
        indices = torch.cat([one._indices() for one in there], 1)
        values = torch.cat([one._values() for one in there])
        return torch.sparse_coo_tensor(indices, values, like.shape, check_invariants=False).coalesce()
    wide = torch.float32 if like.dtype in (torch.float16, torch.bfloat16) else like.dtype
    rows = [torch.zeros_like(like, dtype=wide) if one is None else _dense(one).to(wide) for one in pushed]
    for into, row in plan_row_additions(len(rows)):
        rows[into] = rows[into] + rows[row]
    return rows[0].to(like.dtype)


def _dense(gradient: Tensor) -> Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient


def _with_tuples(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings as they were before they became JSON."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()}


def _changes_rows_alone(updater: _Updater) -> bool:
    settings = _CHANGES_ROWS_ALONE.get(type(updater.optimizer))
    groups = updater.optimizer.param_groups
    return settings is not None and not any(group.get(name) for name in settings for group in groups)


def check_optimizer(kind: type[Optimizer], is_split: bool) -> None:
    """Raise UsageError for an optimizer that cannot run on servers, or not on a part of a variable.

    Args:
        kind: its class.
        is_split: whether it updates a variable that is in several shards.
    """
    if issubclass(kind, torch.optim.LBFGS):
        raise UsageError("step: expected an optimizer without a closure on parameter servers, got LBFGS; use another.")
    if is_split and kind not in ELEMENTWISE:
        names = ", ".join(sorted(one.__name__ for one in ELEMENTWISE))
        raise UsageError(
            f"step: expected an optimizer that works element by element for a variable in several shards, one of "
            f"{names}, got {kind.__name__}, which needs it whole; leave variable_partitioner out."
        )


#: torch's optimizers whose update of an element depends on this element alone.
ELEMENTWISE: frozenset[type[Optimizer]] = frozenset(
    (
        torch.optim.ASGD,
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
        torch.optim.SparseAdam,
    )
)

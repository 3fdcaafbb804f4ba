"""A worker's side of the parameter servers: one exchange with all of them for each step."""

import json
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from hpcdist.errors import HpcdistError, PSUnavailable, UsageError, error_class
from hpcdist.ps import pickles
from hpcdist.ps.known_servers import Fields, KnownServer, KnownShard, ShardState, joined, states_of
from hpcdist.ps.layout import NOTHING, ShardSpec, Unpacker, specs_to_text, state_of_text
from hpcdist.ps.messages import Kind, Message
from hpcdist.ps.server import COPY
from hpcdist.ps.transport import Mailbox
from hpcdist.ps.updates import Settings, check_optimizer, is_elementwise
from hpcdist.runtime.step_flags import Request

#: The groups of an optimizer, as servers get them: the settings of each group, and the numbers of its variables.
Groups = list[tuple[Settings, list[int]]]
#: A request: the number of its server, and the fields of its message.
_ServerRequest = tuple[int, Fields]


@dataclass
class _KnownOptimizer:
    """An optimizer that servers have.

    Attributes:
        optimizer: this worker's optimizer.
        members: numbers of the variables of each of its groups.
        sent_settings: settings of its groups that servers have; none before the first push, which brings them.
    """

    optimizer: Optimizer
    members: list[list[int]]
    sent_settings: list[Settings] = field(default_factory=list)


class Client:
    """Pushes gradients to all servers and pulls values, for one worker.

    Args:
        mailbox: moves messages.
        servers: ranks of the servers.
        worker: number of this worker.
        name: name of this rank in error messages.
        timeout_s: longest wait for an answer. It is longer than servers wait for a worker.
        chunk_bytes: approximate size of the parts in which a push goes to each server, which answers them one by one,
            so that new values come while gradients go. None sends a push as one part, as inside a node.

    Attributes:
        chunk_bytes: the argument `chunk_bytes`.
        clock: number of steps pushed so far.
        signal: name of a signal that a server got and sent to this worker; empty before.
        n_missed: number of pushes of other workers that servers applied between the values that the last push was
            computed from and that push.
        has_left: whether this worker has left the servers.
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
        self._servers = [KnownServer(rank, mailbox.packer(rank)) for rank in servers]
        self._worker = worker
        self._name = name
        self._timeout_s = timeout_s
        self.chunk_bytes = chunk_bytes
        self._sequence = 0
        self.clock = 0
        self._optimizers: dict[int, _KnownOptimizer] = {}
        self.signal = ""
        self.n_missed = 0
        self.has_left = False
        self._pid = os.getpid()

    @property
    def n_servers(self) -> int:
        """Number of servers."""
        return len(self._servers)

    # -- variables and optimizers ---------------------------------------------------------------------------------

    def adopt(
        self,
        specs: dict[int, list[ShardSpec]],
        variables: Sequence[nn.Parameter],
        is_first: bool,
    ) -> None:
        """Let servers hold variables from now on; all workers have the same values.

        Args:
            specs: new shards of each server.
            variables: all variables of the strategy.
            is_first: whether this worker sends the values. The other workers use the servers once it has returned.
        """
        requests: list[_ServerRequest] = []
        for number, new_specs in specs.items():
            server = self._servers[number]
            new_shards: list[KnownShard] = []
            values: list[Tensor] = []
            for spec in new_specs:
                shard = KnownShard(spec, variables[spec.variable])
                new_shards.append(shard)
                values.append(shard.values())
            server.shards += new_shards
            server.n_adopted.append(len(new_shards))
            if is_first:
                payload = server.packer.pack(values)
                fields = {"text": specs_to_text(new_specs), "payload": payload}
                requests.append((number, fields))
        if requests:
            self._ask("adopt", Kind.ADOPT, requests)

    def number_of(self, optimizer: Optimizer, groups: Groups) -> int:
        """Return the number of an optimizer; at its first step servers get it. All workers step in the same order."""
        members_now = [members for _, members in groups]
        for number, known_optimizer in self._optimizers.items():
            if known_optimizer.optimizer is not optimizer:
                continue
            if known_optimizer.members != members_now:
                raise UsageError(
                    f"step: expected the parameters that {type(optimizer).__name__} had at its first step, got others "
                    f"on {self._name}; make a new optimizer after adding or unfreezing parameters."
                )
            return number
        number = max(self._optimizers, default=-1) + 1
        self._send_optimizer(number, optimizer, groups)
        self.note_optimizer(number, optimizer, members_now)
        return number

    def _send_optimizer(
        self,
        number: int,
        optimizer: Optimizer,
        groups: Groups,
    ) -> None:
        """Give servers an optimizer, and the states that it has from a checkpoint that every worker has loaded.

        Raises:
            UsageError: for an optimizer that cannot run on servers.
        """
        variables: set[int] = set()
        for _, members in groups:
            variables.update(members)
        shard_keys: set[tuple[int, ...]] = set()
        for server in self._servers:
            for index in server.indices_of(variables):
                shard_keys.add(server.shards[index].spec.key)
        is_split = len(shard_keys) > len(variables)
        check_optimizer(type(optimizer), is_split)
        requests: list[_ServerRequest] = []
        for server_number, server in enumerate(self._servers):
            server_groups: Groups = []
            for settings, members in groups:
                server_groups.append((settings, server.indices_of(members)))
            pickle = pickles.dumps((type(optimizer), optimizer.defaults, server_groups))
            pickle_tensor = torch.from_numpy(pickle.copy())
            text, tensors = states_of(server, {number: optimizer})
            fields = {
                "numbers": np.array([number, len(pickle)], np.int64),
                "text": text,
                "payload": server.packer.pack([pickle_tensor, *tensors]),
            }
            requests.append((server_number, fields))
        self._ask("step", Kind.OPTIMIZER, requests)

    def note_optimizer(
        self,
        number: int,
        optimizer: Optimizer,
        members: list[list[int]],
    ) -> None:
        """Note an optimizer that servers have.

        Args:
            number: number of the optimizer on the servers.
            optimizer: this worker's optimizer.
            members: numbers of the variables of each of its groups.
        """
        self._optimizers[number] = _KnownOptimizer(optimizer, members)

    # -- steps ------------------------------------------------------------------------------------------------------

    def step(
        self,
        number: int,
        settings: list[Settings],
        request: Request,
    ) -> Request:
        """Push the gradients of an optimizer's variables, and write the servers' answers into the variables.

        Args:
            number: number of the optimizer.
            settings: settings of the optimizer's groups now.
            request: request of this worker to all workers.

        Returns:
            The requests that all workers act on after this step.
        """
        known_optimizer = self._optimizers[number]
        has_new_settings = settings != known_optimizer.sent_settings
        known_optimizer.sent_settings = settings
        self.clock += 1
        text = ""
        if has_new_settings:
            text = json.dumps(settings)
        requests = self._pushes(number, text, request)
        versions_before = self._first_versions()
        answers = self._answers("step", Kind.STEP, requests)
        due = self._take(answers)
        self._count_missed(versions_before)
        return due

    def _pushes(self, number: int, text: str, request: Request) -> list[_ServerRequest]:
        """Return the requests of a step in the order in which they are sent: one for each part of each server.

        Args:
            number: number of the optimizer.
            text: settings that servers do not have yet; empty if there are none.
            request: request of this worker to all workers.
        """
        optimizer = self._optimizers[number].optimizer
        parameter_ids: set[int] = set()
        for group in optimizer.param_groups:
            parameter_ids.update(map(id, group["params"]))
        part_bytes = None
        if is_elementwise(type(optimizer)):
            part_bytes = self.chunk_bytes
        requests: list[_ServerRequest] = []
        for server_number, server in enumerate(self._servers):
            parts = server.push(number, parameter_ids, part_bytes)
            # the first server alone decides after which step all act on a request
            if server_number == 0:
                parts[-1]["request"] = int(request)
            for fields in parts:
                fields["text"] = text
                requests.append((server_number, fields))
        # all servers have something to do at once
        requests.sort(key=_first_shard_of)
        return requests

    def _first_versions(self) -> list[int]:
        """Return the version of the first shard of each server that has shards."""
        versions: list[int] = []
        for server in self._servers:
            if server.shards:
                versions.append(server.shards[0].version)
        return versions

    def _count_missed(self, versions_before: list[int]) -> None:
        """Count the pushes of other workers that servers applied since values had some versions.

        Args:
            versions_before: versions of each server's first shard before this worker's push. -1 counts nothing.
        """
        n_updates = 1  # this push is one of them
        for before, after in zip(versions_before, self._first_versions(), strict=True):
            if before >= 0:
                n_updates = max(n_updates, after - before)
        self.n_missed = n_updates - 1

    def pull(self, number: int = 0) -> None:
        """Write the values that servers have now into the variables.

        Args:
            number: COPY requests the values in messages, also inside a node.
        """
        requests: list[_ServerRequest] = []
        for server_number, server in enumerate(self._servers):
            numbers = [number, 0, 1]
            for shard in server.shards:
                numbers += (NOTHING, 0, shard.version)
            fields = {"numbers": np.array(numbers, np.int64)}
            requests.append((server_number, fields))
        answers = self._answers("pull", Kind.PULL, requests)
        self._take(answers)

    def forget_values(self) -> None:
        """Let the next pull bring all values, as this worker has overwritten its own."""
        for server in self._servers:
            for shard in server.shards:
                shard.version = -1

    def _take(self, answers: Iterable[tuple[int, Message]]) -> Request:
        """Write values into the variables as they come; return the requests that are due."""
        due = Request.NONE
        has_torn_read = False
        for server_number, message in answers:
            server = self._servers[server_number]
            due |= Request(message.request)
            if message.text:
                news = json.loads(message.text)
                self.signal = self.signal or news["signal"]
                server.paths += news["paths"]
            if not server.take(message, self._name):
                has_torn_read = True
        if has_torn_read:
            self.pull(COPY)
        return due

    # -- states -----------------------------------------------------------------------------------------------------

    def fetch_state(self, optimizer: Optimizer) -> None:
        """Fill an optimizer's state, of whole variables, from the servers; do nothing before its first step."""
        number = self._number_of_known(optimizer)
        if number is None:
            return
        numbers = np.array([number], np.int64)
        answers = self._ask_all("save", Kind.STATE, numbers=numbers)
        states_by_variable: dict[int, list[ShardState]] = {}
        for server_number, message in answers:
            shards = self._servers[server_number].shards
            payload = Unpacker(message.payload)
            states = state_of_text(message.text, payload)
            for (_, index), state in states.items():
                shard = shards[index]
                shard_states = states_by_variable.setdefault(id(shard.variable), [])
                shard_states.append(ShardState(shard, state))
        for shard_states in states_by_variable.values():
            shard_states.sort(key=lambda shard_state: shard_state.shard.spec.start)
            first = shard_states[0]
            state_of_variable: dict[str, Any] = {}
            for name in first.state:
                state_of_variable[name] = joined(shard_states, name)
            optimizer.state[first.shard.variable] = state_of_variable

    def _number_of_known(self, optimizer: Optimizer) -> int | None:
        """Return the number of an optimizer that servers have; None for another one."""
        for number, known_optimizer in self._optimizers.items():
            if known_optimizer.optimizer is optimizer:
                return number
        return None

    def assign(
        self,
        variables: Collection[int],
        optimizers: Sequence[Optimizer],
    ) -> None:
        """Give servers the values of some variables, and the states of some optimizers.

        Args:
            variables: numbers of the variables.
            optimizers: optimizers that servers have.
        """
        optimizer_ids = set(map(id, optimizers))
        numbered: dict[int, Optimizer] = {}
        for number, known_optimizer in self._optimizers.items():
            if id(known_optimizer.optimizer) in optimizer_ids:
                numbered[number] = known_optimizer.optimizer
        requests: list[_ServerRequest] = []
        for server_number, server in enumerate(self._servers):
            indices = server.indices_of(variables)
            values = [server.shards[index].values() for index in indices]
            text, tensors = states_of(server, numbered)
            fields = {
                "numbers": np.array([len(indices), *indices, *numbered], np.int64),
                "text": text,
                "payload": server.packer.pack([*values, *tensors]),
            }
            requests.append((server_number, fields))
        self._ask("restore", Kind.ASSIGN, requests)

    def statistics(self) -> list[dict[str, Any]]:
        """Return the statistics of each server."""
        answers = self._ask_all("statistics", Kind.STATISTICS)
        return [json.loads(message.text) for _, message in answers]

    def leave(self, code: int = -1) -> None:
        """Leave: the servers do not wait for this worker any more. Later calls do nothing.

        Args:
            code: exit code of the servers once all workers have left. -1 is the exit code of the chief's program.
        """
        # a forked child is no worker
        if self.has_left or os.getpid() != self._pid:
            return
        self.has_left = True
        numbers = np.array([code], np.int64)
        self._ask_all("leave", Kind.LEAVE, numbers=numbers)
        for server in self._servers:
            server.shards.clear()  # so that the strategy, which variables keep alive, can go
        self._optimizers.clear()

    # -- requests ---------------------------------------------------------------------------------------------------

    def _ask_all(
        self,
        call: str,
        kind: Kind,
        **fields: Any,
    ) -> list[tuple[int, Message]]:
        """Send one request to all servers and return their answers; see `_ask`."""
        requests = [(server_number, fields) for server_number in range(self.n_servers)]
        return self._ask(call, kind, requests)

    def _ask(
        self,
        call: str,
        kind: Kind,
        requests: Sequence[_ServerRequest],
    ) -> list[tuple[int, Message]]:
        """Send requests to servers and return their answers, each with the number of its server.

        Raises the errors of `_answers`.
        """
        return list(self._answers(call, kind, requests))

    def _answers(
        self,
        call: str,
        kind: Kind,
        requests: Sequence[_ServerRequest],
    ) -> Iterator[tuple[int, Message]]:
        """Send requests to servers and yield their answers as they come, each with the number of its server.

        Raises:
            PSUnavailable: when an answer is late; on this rank.
            HpcdistError: when a server answers with an error, which this is; on this rank.
        """
        messages: list[tuple[int, Message]] = []
        for server_number, fields in requests:
            self._sequence += 1
            message = Message(
                kind,
                self._worker,
                sequence=self._sequence,
                clock=self.clock,
                **fields,
            )
            rank = self._servers[server_number].rank
            messages.append((rank, message))
        n_answers = 0
        error = None
        for number, answer in self._mailbox.exchange(messages, self._timeout_s):
            n_answers += 1
            server_number = requests[number][0]
            if answer.kind is Kind.ERROR:
                error = error or _error_of(answer.text, server_number)
            elif error is None:
                yield server_number, answer
        if error is not None:  # once nothing is under way any more
            raise error
        if n_answers < len(messages):
            n_asked = len({rank for rank, _ in messages})
            raise PSUnavailable(
                f"{call}: expected answers of {n_asked} parameter servers within {self._timeout_s:g} s, got fewer on "
                f"{self._name}; look for a server that has stopped."
            )


def _first_shard_of(request: _ServerRequest) -> int:
    """Return the number of the first shard in a part of a push."""
    _, fields = request
    return int(fields["numbers"][1])


def _error_of(text: str, server_number: int) -> HpcdistError:
    """Return the error that a server has answered, as it names its class."""
    name, _, detail = text.partition(": ")
    kind = error_class(name)
    if kind.__name__ != name:
        detail = text
    return kind(f"{detail} [parameter server {server_number}]")

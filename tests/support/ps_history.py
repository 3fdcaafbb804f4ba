"""A history of pushes to parameter servers over a network that delays, repeats and loses, checked as Jepsen does.

    python tests/support/ps_history.py --operations 100000 --seed 1

The servers are the product's own state machines; network, workers and time are simulated. Worker w adds 1 to element w
of a variable on each server, densely and as a row, so that the values say how often each worker's pushes were applied.
A push goes to a server in two parts, which may overtake each other.
Faults: messages are delayed, overtake each other and come twice; answers are lost, and requests repeated; workers stop
for a while, or are killed in a push and started anew; nobody knows then whether that push was applied.
"""

import argparse
import collections
import heapq
import itertools
import json
import random
from dataclasses import dataclass, field

import numpy as np
import torch

from hpcdist.ps import pickles
from hpcdist.ps.layout import NOTHING, ROWS, WHOLE, Packer, ShardSpec, Unpacker, specs_to_text
from hpcdist.ps.messages import Kind, Message
from hpcdist.ps.server import Rules, Server

#: Mean seconds of a message, of a step, until a request is repeated, and of a stop.
DELAY_S = 0.01
STEP_S = 0.02
REPEAT_S = 0.15
STOP_S = 1.0


@dataclass
class Faults:
    """How likely each fault is: for each message, or for each step of a worker."""

    twice: float = 0.05
    lost: float = 0.05
    stopped: float = 0.002
    killed: float = 0.001


@dataclass
class Worker:
    """A client: what it has pushed and knows, and the request that it waits for."""

    number: int
    incarnation: int = 0
    sequence: int = 0
    clock: int = 0
    highest: int = 0  # clock of a push that was sent; one of a killed process may have been applied
    n_acknowledged: int = 0
    n_unknown: int = 0
    versions: list[list[int]] = field(default_factory=list)
    request: dict[tuple[int, int], Message] | None = None  # by server and part
    answers: dict[tuple[int, int], Message] = field(default_factory=dict)


class History:
    """Runs workers against servers, and keeps what went wrong.

    Args:
        seed: of everything random.
        n_workers, n_servers: how many.
        max_staleness: as the strategy takes it.
        faults: how often.
    """

    def __init__(self, seed, n_workers=4, n_servers=2, max_staleness=2, faults=None, make_server=Server):
        self.random = random.Random(seed)
        self.faults = faults or Faults()
        self.max_staleness = max_staleness
        self.servers = []
        for _ in range(n_servers):
            packers = {worker: Packer() for worker in range(n_workers)}
            self.servers.append(make_server(packers, Rules(max_staleness)))
        self.workers = []
        for number in range(n_workers):
            versions = [[0, 0] for _ in self.servers]
            self.workers.append(Worker(number, versions=versions))
        self.now = 0.0
        self.events = []
        self.order = itertools.count()
        self.n_ok = 0
        self.violations = []
        self.counts = collections.Counter()
        self._set_up(n_workers)

    def _set_up(self, n_workers):
        """Give every server an element for each worker, and rows for each worker, and plain SGD."""
        settings = {"lr": 1.0, "momentum": 0, "dampening": 0, "weight_decay": 0, "nesterov": False, "maximize": False}
        settings |= {"foreach": None, "differentiable": False, "fused": None}
        for server in self.servers:
            specs = [
                ShardSpec("dense", 0, 0, n_workers, (n_workers,), "float64"),
                ShardSpec("rows", 1, 0, n_workers, (n_workers, 2), "float64", is_sparse=True),
            ]
            values = [torch.zeros(spec.shape, dtype=torch.float64) for spec in specs]
            adopt = Message(Kind.ADOPT, 0, sequence=1, text=specs_to_text(specs), payload=Packer().pack(values))
            pickle = pickles.dumps((torch.optim.SGD, {}, [(settings, [0, 1])]))
            numbers = np.array([0, len(pickle)], np.int64)
            payload = Packer().pack([torch.from_numpy(pickle.copy())])
            optimizer = Message(Kind.OPTIMIZER, 0, sequence=2, numbers=numbers, text="[]", payload=payload)
            for message in (adopt, optimizer):
                assert [answer.kind for answer in server.handle(message)] == [Kind.DONE]
        self.workers[0].sequence = 2

    # -- the simulation -------------------------------------------------------------------------------------------

    def after(self, mean_s, call, *args):
        """Make a call at a random time around `mean_s` from now."""
        at = self.now + self.random.expovariate(1 / mean_s)
        heapq.heappush(self.events, (at, next(self.order), call, args))

    def run(self, n_operations):
        """Run until `n_operations` pushes are acknowledged; return the violations."""
        for worker in self.workers:
            self.after(STEP_S, self.begin, worker, worker.incarnation)
        while self.n_ok < n_operations and not self.violations:
            self.now, _, call, args = heapq.heappop(self.events)
            call(*args)
        self.check_values()
        return self.violations

    def begin(self, worker, incarnation):
        """Let a worker push its next step, if it is still the same process."""
        if incarnation != worker.incarnation or worker.request is not None:
            return
        worker.clock += 1
        worker.highest = max(worker.highest, worker.clock)
        worker.answers = {}
        worker.request = {}
        one_hot = torch.zeros(len(self.workers), dtype=torch.float64)
        one_hot[worker.number] = -1.0
        row = torch.full((1, 2), -1.0, dtype=torch.float64)
        for part, tensors in enumerate(([one_hot], [torch.tensor([worker.number]), row])):
            worker.sequence += 1
            for number in range(len(self.servers)):
                shard = [WHOLE, 0] if part == 0 else [ROWS, 1]
                worker.request[number, part] = Message(
                    Kind.STEP, worker.number, worker.incarnation, worker.sequence, worker.clock,
                    numbers=np.array([0, part, part, *shard, worker.versions[number][part]], np.int64),
                    payload=Packer().pack(tensors),
                )  # fmt: skip
        self.send(worker, worker.incarnation, worker.clock)
        if self.random.random() < self.faults.killed:
            self.after(DELAY_S, self.kill, worker, worker.incarnation)

    def send(self, worker, incarnation, clock):
        """Send the parts of a worker's push that are not answered; again, until they are."""
        if (incarnation, clock) != (worker.incarnation, worker.clock) or worker.request is None:
            return
        for (number, part), message in worker.request.items():
            if (number, part) not in worker.answers:
                for _ in range(1 + (self.random.random() < self.faults.twice)):
                    if self.random.random() >= self.faults.lost:
                        self.after(DELAY_S, self.arrive, number, message)
        self.after(REPEAT_S, self.send, worker, incarnation, clock)

    def arrive(self, number, message):
        """Let a server handle a request."""
        for answer in self.servers[number].handle(message):
            if answer.kind is Kind.ERROR:
                self.violations.append(f"server {number}: {answer.text}")
            if self.random.random() >= self.faults.lost:
                answer_copy = Message(
                    **{**vars(answer), "payload": answer.payload.copy(), "numbers": answer.numbers.copy()}
                )
                self.after(DELAY_S, self.answered, number, answer_copy)

    def answered(self, number, answer):
        """Let a worker have an answer, if it still waits for that one."""
        worker = self.workers[answer.worker]
        part = int(answer.numbers[0])
        is_awaited = worker.request is not None and answer.sequence == worker.request[number, part].sequence
        if not is_awaited or answer.incarnation != worker.incarnation or (number, part) in worker.answers:
            self.counts["late answers"] += 1
            return
        worker.answers[number, part] = answer
        self.check_answer(worker, number, answer)
        if len(worker.answers) == len(worker.request):
            worker.request = None
            worker.n_acknowledged += 1
            self.n_ok += 1
            self.check_staleness(worker)
            is_stopped = self.random.random() < self.faults.stopped
            self.counts["stops"] += is_stopped
            self.after(STOP_S if is_stopped else STEP_S, self.begin, worker, worker.incarnation)

    def kill(self, worker, incarnation):
        """Start a worker anew: what it was pushing is unknown, and it knows nothing but its last acknowledged step."""
        if incarnation != worker.incarnation or worker.request is None:
            return
        self.counts["kills"] += 1
        worker.n_unknown += 1
        worker.clock -= 1
        worker.incarnation = worker.incarnation + 1
        worker.sequence = 0
        worker.request = None
        worker.versions = [[0, 0] for _ in self.servers]
        self.after(STEP_S, self.begin, worker, worker.incarnation)

    # -- what must hold -------------------------------------------------------------------------------------------

    def check_answer(self, worker, number, answer):
        """Versions never go back, and values contain the worker's own pushes."""
        payload = Unpacker(answer.payload)
        rows = answer.numbers[1:].reshape(-1, 3).tolist()
        for index, (kind, n_rows, version) in enumerate(rows, int(answer.numbers[0])):
            if version < worker.versions[number][index]:
                self.violations.append(
                    f"worker {worker.number}: version {version} after {worker.versions[number][index]}"
                )
            worker.versions[number][index] = version
            if kind == NOTHING:
                self.violations.append(f"worker {worker.number}: its own push changed nothing")
            if kind == ROWS:
                indices = payload.take((n_rows,), torch.int64)
            else:
                indices = torch.arange(len(self.workers))
            shape = (len(indices), 2) if index else (len(indices),)
            values = payload.take(shape, torch.float64)
            push_counts = values[indices == worker.number].reshape(-1)
            least = worker.n_acknowledged + 1
            if not len(push_counts) or push_counts.min() < least or push_counts.max() > least + worker.n_unknown:
                self.violations.append(
                    f"worker {worker.number}: {push_counts.tolist()} of its pushes in server {number}, {least} "
                    f"acknowledged and {worker.n_unknown} unknown"
                )

    def check_staleness(self, worker):
        """A worker begins its next step only when every other one has pushed all but `max_staleness` before it."""
        if self.max_staleness is not None:
            for peer in self.workers:
                if peer.highest < worker.clock - self.max_staleness:
                    self.violations.append(
                        f"worker {worker.number} begins step {worker.clock} where worker {peer.number} pushes "
                        f"{peer.highest}"
                    )

    def check_values(self):
        """Each acknowledged push was applied once, each unknown one at most once, on every server."""
        for number, server in enumerate(self.servers):
            dense, rows = (shard.values.detach() for shard in server._shards)
            for worker in self.workers:
                least = worker.n_acknowledged
                most = least + worker.n_unknown + (worker.request is not None)
                for n_applied in (dense[worker.number].item(), *rows[worker.number].tolist()):
                    if n_applied < least:
                        self.violations.append(
                            f"server {number} lost {least - n_applied} pushes of worker {worker.number}"
                        )
                    if n_applied > most:
                        self.violations.append(
                            f"server {number} applied {n_applied - most} too many of {worker.number}"
                        )

    def summary(self):
        """Return counts."""
        of_servers = [server.statistics() for server in self.servers]
        return {
            "acknowledged": self.n_ok,
            "violations": len(self.violations),
            **self.counts,
            "duplicates that were not applied": sum(server["duplicates"] for server in of_servers),
            "staleness of versions": of_servers[0]["staleness"],
        }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--operations", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--max-staleness", type=int, default=2)
    options = parser.parse_args()
    history = History(options.seed, options.workers, max_staleness=options.max_staleness)
    history.run(options.operations)
    print(json.dumps(history.summary()))
    if history.violations:
        raise SystemExit("\n".join(history.violations[:10]))


if __name__ == "__main__":
    main()

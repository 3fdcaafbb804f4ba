"""A worker of a coordinator: it receives functions, runs them, and sends back their results, until all is done."""

import contextlib
import faulthandler
import functools
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import xxhash
from torch import Tensor

from hpcdist.errors import HpcdistError, UsageError, log
from hpcdist.nest import map_nest
from hpcdist.ps import pickles
from hpcdist.ps.messages import Bytes, Kind, Message
from hpcdist.ps.serve import CROWDED_YIELDS, Drain, StopSignals, wait_for_end
from hpcdist.ps.transport import Mailbox
from hpcdist.runtime.mpi import MPI
from hpcdist.runtime.process import end_of_training
from hpcdist.runtime.step_flags import Request
from hpcdist.runtime.waiting import YIELDS, wait_until
from hpcdist.strategy import context
from hpcdist.strategy.coordination.definitions import Copies
from hpcdist.strategy.parameter_server import ParameterServerStrategy

#: Time between two heartbeats, which also name the signal to stop that this worker has got.
BEAT_S = 0.5
#: The tag of heartbeats.
BEAT_TAG = 7503
#: How long a worker looks for messages before it looks at everything else, and its longest sleep meanwhile.
_LOOK_S = 0.2
_MAX_SLEEP_S = 1e-4
#: The number of this worker while a function runs, which asks by `current_worker_index()` and so without an object.
_worker_index: int | None = None


def current_worker_index() -> int:
    """Return the number of the worker that runs the caller, a scheduled function.

    Raises:
        RuntimeError: outside of scheduled functions.
    """
    if _worker_index is None:
        raise RuntimeError(
            "current_worker_index: expected a call in a scheduled function, got none."
        )
    return _worker_index


def serve_closures(strategy: ParameterServerStrategy) -> int:
    """Run the functions that the coordinator sends until it leaves; return the code to exit with.

    Not collective. In the main thread.

    Args:
        strategy: strategy of this worker, which serves.

    Raises:
        CollectiveTimeoutError: when the coordinator does not send its exit code.
    """
    worker = _Worker(strategy)
    world = strategy.world
    with StopSignals() as signals, _Heart(worker, signals) as heart:
        world.step_flags.attach(heart)
        worker.run_all()
        strategy.served.client.leave(worker.exit_code)
        world.step_flags.detach(heart)  # the heart keeps the strategy alive
        return wait_for_end(world, worker.mailbox, worker.exit_code)


class _Worker:
    """Runs functions.

    Attributes:
        world: world of the job, as this worker has it.
        comm: communicator of all ranks, for functions and results alone. mailbox: sends and receives them.
        coordinator: rank of the coordinator.
        running_since: time at which the function that runs began, and its name; None if no function runs.
        exit_code: exit code of this worker; -1 for the exit code of the coordinator's program.
    """

    def __init__(self, strategy: ParameterServerStrategy) -> None:
        assert strategy.closures_comm is not None, "this worker serves"
        self.world = strategy.world
        self.comm = strategy.closures_comm
        self.coordinator, *workers = strategy.client_ranks
        self._index = workers.index(self.world.rank)
        self._strategy = strategy
        self._storage = strategy.served
        self._copies = Copies(strategy, strategy.engine, self._storage, self._index)
        self._is_forced = False
        self.mailbox = Mailbox(self.comm)
        self.running_since: tuple[float, str] | None = None
        self.exit_code = -1

    def run_all(self) -> None:
        """Run the functions that come until the coordinator leaves."""
        received: list[tuple[int, Message]] = []
        yields = CROWDED_YIELDS if self.world.is_crowded else YIELDS
        drain = Drain(self.world.timeout_s)
        while True:
            if drain.is_over(end_of_training()):
                log(
                    f"{self.world}: the chief's program has ended without a ClusterCoordinator: leaving"
                )
                return
            received.clear()
            wait_until(functools.partial(self._receive, received), _LOOK_S, yields, _MAX_SLEEP_S)
            for _, message in received:
                if message.kind is Kind.LEAVE:
                    self.exit_code = int(message.numbers[0])
                    return
                payload = self._run(message)
                answer = Message(Kind.RESULT, message.worker, clock=message.clock, payload=payload)
                self.mailbox.send(self.coordinator, answer)

    def _receive(self, received: list[tuple[int, Message]]) -> bool:
        received += self.mailbox.receive()
        _ = self.mailbox.is_sent  # moves what is being sent, and forgets what has left
        return bool(received)

    def _run(self, message: Message) -> Bytes:
        """Run a function, and return the pickle of (value or error, changes of shared state, steps)."""
        before = self.world.step_flags.n_steps
        definitions, news, must_pull, payload, seed = pickles.loads(message.payload)
        error = value = None
        changes: Any = ({}, {})
        try:
            with self._noted(message.text):
                function, args, kwargs = self._prepare(definitions, news, must_pull, payload, seed)
                with context.entered(self._strategy):
                    value = map_nest(_on_host, function(*args, **kwargs))
                self._storage.require_unwritten()
            changes = self._copies.shared.changes()
            result = pickles.dumps(value)
        except (Exception, SystemExit) as caught:  # noqa: BLE001  the coordinator raises it
            # values that the function has written to variables must not stay
            self._is_forced = True
            error = caught
            result = _pickle_of(caught)
            changes = ({}, {})
        n_steps = self.world.step_flags.n_steps - before
        return pickles.dumps((error is None, result, changes, n_steps))

    def _prepare(
        self,
        definitions: list[Bytes],
        news: Any,
        must_pull: bool,
        payload: Bytes,
        seed: int,
    ) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        """Learn the objects that the function uses, bring them up to date, and return the function with arguments."""
        for definition in definitions:
            self._copies.learn(definition)
        self._strategy.engine.planner.prepare()
        self._copies.shared.begin(news)
        if must_pull or definitions or self._is_forced:
            self._storage.pull(is_whole=self._is_forced)
            self._is_forced = False
        self._strategy.engine.generators.restore(seed, 0)
        return self._copies.load(payload)

    @contextlib.contextmanager
    def _noted(self, name: str) -> Iterator[None]:
        """Note which function runs in the block."""
        global _worker_index
        _worker_index = self._index
        self.running_since = (time.monotonic(), name)
        try:
            yield
        finally:
            _worker_index = None
            self.running_since = None


class _Heart:
    """A thread that sends heartbeats to the coordinator, and reports functions that take long. A context manager.

    It is the requester of this worker, too: stop requests of parameter servers go to the coordinator in heartbeats.
    """

    def __init__(self, worker: _Worker, signals: StopSignals) -> None:
        self._worker = worker
        self._signals = signals
        self._reasons: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="hpcdist heartbeat", daemon=True)

    def __enter__(self) -> "_Heart":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def requested(self) -> Request:
        """Return no request: the coordinator acts between functions."""
        return Request.NONE

    def stop(self, reason: str) -> None:
        """Ask the coordinator to stop the job."""
        self._reasons.put(reason)

    def poll_between_batches(self) -> None:
        """Do nothing: the coordinator acts between functions."""

    def note_unsafe_point(self) -> None:
        """Do nothing: the coordinator acts between functions."""

    def poll_after_pass(self) -> None:
        """Do nothing: the coordinator acts between functions."""

    def leave_if_overdue(self, quiet_s: float) -> None:
        """Do nothing: the coordinator acts on stop requests."""

    def _beat(self) -> None:
        worker = self._worker
        sends: list[tuple[MPI.Request, bytes]] = []  # each with the text, which must outlive it
        last_reported = 0.0
        while not self._is_over.wait(BEAT_S):
            if self._signals.last:
                self._reasons.put(f"{self._signals.last} to {worker.world}")
                self._signals.last = ""
            text = b"" if self._reasons.empty() else self._reasons.get().encode()
            sends = [pending for pending in sends if not pending[0].Test()]
            beat = np.frombuffer(text, np.uint8)
            sends.append((worker.comm.Isend(beat, worker.coordinator, BEAT_TAG), text))
            running = worker.running_since  # once, as the main thread changes it
            if running is None:
                continue
            began_at, name = running
            limit_s = worker.world.timeout_s
            if began_at != last_reported and time.monotonic() - began_at > limit_s:
                last_reported = began_at
                log(
                    f"{worker.world}: {name!r} has run for {limit_s:g} s, and is still running; stack:"
                )
                faulthandler.dump_traceback(sys.__stderr__ or 2)


def _on_host(leaf: Any) -> Any:
    """Return a tensor, or the value of a variable, without its graph and on the host; any other leaf as it is."""
    value = leaf.read_value() if hasattr(leaf, "read_value") else leaf
    return value.detach().cpu() if isinstance(value, Tensor) else value


def _pickle_of(error: BaseException) -> Bytes:
    """Return an error with its stack as a pickle; an error that cannot travel becomes an HpcdistError with its text."""
    trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    if isinstance(error, HpcdistError):
        error.is_agreed = False  # on this worker alone
    error.__traceback__ = None
    error.__cause__ = None
    error.__context__ = None
    if isinstance(error, SystemExit):
        error = UsageError(
            f"schedule: expected a function that returns or raises, got one that exits: {error}; return instead."
        )
    try:
        sent = pickles.dumps((error, trace))
        pickles.loads(sent)
    except Exception:  # noqa: BLE001  such as an exception whose __init__ wants more than its args
        return pickles.dumps((HpcdistError(f"{type(error).__name__}: {error}"), trace))
    return sent


def seed_of(seed: int | None, step: int, number: int) -> int:
    """Return the seed of random numbers in a function, whichever worker runs it.

    Args:
        seed: seed of the job.
        step: number of optimizer steps of the job when the function was scheduled.
        number: number of the function.
    """
    return xxhash.xxh3_64_intdigest(f"{seed} {step} closure {number}".encode()) >> 1

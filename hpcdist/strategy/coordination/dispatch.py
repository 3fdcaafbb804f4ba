"""The thread of a coordinator that gives closures to workers and takes their results."""

import functools
import threading
import time

import numpy as np

from hpcdist.errors import ClosureTimeoutError, CollectiveTimeoutError, ExitCode, HpcdistError, log
from hpcdist.forks import make_condition
from hpcdist.ps import pickles
from hpcdist.ps.messages import Bytes, Kind, Message
from hpcdist.ps.served import stop_for
from hpcdist.ps.transport import Mailbox
from hpcdist.runtime.mpi import MPI
from hpcdist.runtime.process import end_job
from hpcdist.runtime.waiting import AWAKE_S, wait_until
from hpcdist.runtime.world import World
from hpcdist.strategy.coordination.definitions import Definitions
from hpcdist.strategy.coordination.queue import Closure, ClosureQueue
from hpcdist.strategy.coordination.shared import Changes, Key
from hpcdist.strategy.coordination.values import LOOK_S
from hpcdist.strategy.coordination.worker import BEAT_S, BEAT_TAG

#: Longest sleep while functions run, by which a result may be delayed.
_MAX_SLEEP_S = 1e-4
#: A worker whose last function took less than this gets its next function beforehand, as it would wait for it about as
#: long. Only if enough functions wait for all workers, and no function begins with the changes of the one before.
_SHORT_S = 0.05
#: A worker that has not been heard of for this long is silent, or for this part of the time limit if that is longer.
LOST_S = 5.0
LOST_PART = 1 / 20


class WorkerError(Exception):
    """The stack of an error on a worker, as the cause of the error that is raised on the coordinator."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f'\n"""\n{self.text}"""'


class _Worker:
    """State of a worker, as the coordinator knows it.

    Attributes:
        rank, number: rank of the worker, and its number among the workers.
        n_known: number of definitions that it has.
        sent: shared state that it has; see `SharedState.news`.
        n_seen: number of closures that had ended when it was last told to get the servers' values.
        sent_at: times at which the closures that it has were sent.
        last_s: duration of its last closure. answered_at: time at which that ended.
        heard_at: time at which it was heard of last. is_silent: whether that is too long ago.
        is_stuck: whether a closure of it has run for too long.
    """

    def __init__(self, rank: int, number: int) -> None:
        self.rank = rank
        self.number = number
        self.n_known = 0
        self.sent: dict[Key, int] = {}
        self.n_seen = -1
        self.sent_at: list[float] = []
        self.last_s = _SHORT_S
        self.answered_at = 0.0
        self.heard_at = 0.0
        self.is_silent = False
        self.is_stuck = False


class Dispatcher:
    """Runs closures on workers, from its own thread, which starts with it.

    Args:
        world: world of the coordinator.
        comm: communicator of all ranks, for functions and their results alone.
        ranks: ranks of the workers, in the order of their numbers.
        definitions: objects that functions use by name.
        closure_timeout_s: longest time of a function, in seconds; None for no limit.

    Attributes:
        queue: the closures. changed: guards the queue, and is notified whenever a closure is over.
        n_steps: number of steps of optimizers in functions that have ended.
        is_over: whether `stop` was called, so that nothing can be scheduled any more.
    """

    def __init__(
        self,
        world: World,
        comm: MPI.Comm,
        ranks: list[int],
        definitions: Definitions,
        closure_timeout_s: float | None = None,
    ) -> None:
        self._world = world
        self._comm = comm
        self._definitions = definitions
        self._closure_timeout_s = closure_timeout_s
        self._mailbox = Mailbox(comm)
        self._workers = {rank: _Worker(rank, number) for number, rank in enumerate(ranks)}
        self.queue = ClosureQueue()
        self.changed = make_condition()
        self.n_steps = 0
        self.is_over = False
        self._exit_code = -1
        # a clock that stands still while this process is suspended
        self._now = 0.0
        self._looked_at = time.monotonic()
        self._ended_at = 0.0
        self._free_at = 0.0
        self._is_reported = False
        self._thread = threading.Thread(target=self._run, name="hpcdist coordinator", daemon=True)
        self._thread.start()

    def stop(self, code: int) -> None:
        """Cancel closures that have not begun, wait for those that run, and let the workers leave.

        Args:
            code: exit code of the workers; -1 for the exit code of this program.
        """
        with self.changed:
            self.queue.cancel_waiting("the coordinator has left; join before that")
            self._exit_code = code
            self.is_over = True
            self.changed.notify_all()
        self._thread.join()

    # -- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self.is_over:
            with self.changed:
                if not self._is_any_busy and (self.queue.is_idle or self._free_worker() is None):
                    self.changed.wait(LOOK_S)
            self._look()
        began_s = self._now
        while self._is_any_busy and self._now - began_s < self._world.timeout_s:
            self._look()
        self._require_all_done()
        for worker in self._workers.values():
            leave = Message(Kind.LEAVE, worker.number, numbers=np.array([self._exit_code]))
            self._mailbox.send(worker.rank, leave)
        wait_until(lambda: self._mailbox.is_sent, self._world.timeout_s, 0)
        self._wait_for_silent()

    def _require_all_done(self) -> None:
        """End the job if a worker still runs a function: waiting for it might have no end."""
        busy = [
            worker for worker in self._workers.values() if worker.sent_at and not worker.is_silent
        ]
        if busy:
            ranks = ", ".join(str(worker.rank) for worker in busy)
            code = int(ExitCode.INTERNAL)
            if self._exit_code > 0:
                code = self._exit_code
            end_job(
                f"hpcdist: {self._world} is done, and functions on ranks {ranks} have not ended within "
                f"{self._world.timeout_s:g} s: ending the job\n",
                code,
            )

    def _wait_for_silent(self) -> None:
        """Wait for heartbeats of silent workers; end the job if one stays silent, as the wait might have no end."""
        began_s = self._now
        while silent := [worker for worker in self._workers.values() if worker.is_silent]:
            self._look()
            wait_until(lambda: False, BEAT_S, 0)
            if self._now - began_s > self._world.timeout_s:
                ranks = ", ".join(str(worker.rank) for worker in silent)
                end_job(
                    f"hpcdist: {self._world} is done, and has not heard of the workers on ranks {ranks} for "
                    f"{self._world.timeout_s:g} s: ending the job\n",
                    int(ExitCode.INTERNAL),
                )
        self._hear()

    @property
    def _is_any_busy(self) -> bool:
        """Whether the result of any worker is to come, be it silent or not."""
        return any(worker.sent_at for worker in self._workers.values())

    def _look(self) -> None:
        """Give closures to free workers, wait a while for results and for heartbeats, and take them."""
        self._send_closures()
        received: list[tuple[int, Message]] = []
        if self._is_any_busy:
            wait_until(functools.partial(self._has_work, received), LOOK_S, 0, _MAX_SLEEP_S)
        now = time.monotonic()
        self._now = self._now + min(now - self._looked_at, AWAKE_S)
        self._looked_at = now
        for rank, message in received:
            self._take_result(self._workers[rank], message)
        self._hear()
        self._require_in_time()

    def _require_in_time(self) -> None:
        """Let functions that run too long fail; leave without them if a stop request has waited too long."""
        limit_s = self._closure_timeout_s
        for worker in self._workers.values():
            if limit_s is None or worker.is_stuck or worker.is_silent or not worker.sent_at:
                continue
            if self._now - max(worker.sent_at[0], worker.answered_at) > limit_s:
                self._time_out(worker, limit_s)
        self._require_worker(limit_s)
        requester = self._world.step_flags.requester
        if requester is not None and self.queue.has_running:
            requester.leave_if_overdue(self._now - self._ended_at)

    def _require_worker(self, limit_s: float | None) -> None:
        """Cancel waiting closures if all workers have been stuck, or silent, for the longest time of a function."""
        is_blocked = self.queue.n_waiting > 0 and all(
            worker.is_stuck or worker.is_silent for worker in self._workers.values()
        )
        if not is_blocked:
            self._free_at = self._now
        if limit_s is None or self._now - self._free_at <= limit_s:
            return
        with self.changed:
            self.queue.note_error(
                ClosureTimeoutError(
                    f"schedule: expected a worker that is free within closure_timeout_s={limit_s:g} s, got "
                    f"{len(self._workers)} that run functions without an end; start the job again."
                )
            )
            self.queue.cancel_waiting("no worker is free")
            self.changed.notify_all()

    def _time_out(self, worker: _Worker, limit_s: float) -> None:
        worker.is_stuck = True
        worker.sent.clear()  # later changes of this worker do not count
        with self.changed:
            running = self.queue.running[worker.number]
            name = ", ".join(closure.name for closure in running[:1])
            self.queue.time_out(
                worker.number,
                ClosureTimeoutError(
                    f"schedule: expected {name!r} to end within closure_timeout_s={limit_s:g} s, got none from worker "
                    f"{worker.number} (rank {worker.rank}); raise the limit, or look at what it waits for."
                ),
            )
            self.changed.notify_all()
        log(
            f"coordinator: worker {worker.number} (rank {worker.rank}) has run {name!r} for {limit_s:g} s; others go on"
        )

    def _has_work(self, received: list[tuple[int, Message]]) -> bool:
        received += self._mailbox.receive()
        _ = self._mailbox.is_sent  # moves what is being sent
        return bool(received) or (self.queue.n_waiting > 0 and self._free_worker() is not None)

    def _free_worker(self) -> _Worker | None:
        """Return the first worker that has no closure, else the first that is soon done with its only one."""
        may_send_ahead = (
            self.queue.n_waiting >= len(self._workers) and not self._definitions.shared.has_tensors
        )
        soon_done: _Worker | None = None
        for worker in self._workers.values():
            if worker.is_silent or worker.is_stuck:
                continue
            if not worker.sent_at:
                return worker
            is_soon_done = worker.last_s < _SHORT_S and len(worker.sent_at) == 1
            if may_send_ahead and is_soon_done and soon_done is None:
                soon_done = worker
        return soon_done

    def _send_closures(self) -> None:
        """Give each free worker a closure, as long as any wait."""
        while (worker := self._free_worker()) is not None:
            with self.changed:
                closure = self.queue.take(worker.number)
                self.changed.notify_all()  # the queue has room
            if closure is None:
                return
            self._send(worker, closure)

    def _send(self, worker: _Worker, closure: Closure) -> None:
        news = self._definitions.shared.news(worker.sent)
        # read after the news, so that all objects that have news are defined
        definitions = self._definitions.log[worker.n_known :]
        worker.n_known += len(definitions)
        must_pull = closure.n_before > worker.n_seen
        if must_pull:
            worker.n_seen = self.queue.n_ended
        payload = pickles.dumps((definitions, news, must_pull, closure.payload, closure.seed))
        message = Message(
            Kind.CLOSURE, worker.number, clock=closure.number, text=closure.name, payload=payload
        )
        worker.sent_at.append(self._now)
        self._mailbox.send(worker.rank, message)

    def _take_result(self, worker: _Worker, message: Message) -> None:
        worker.last_s = self._now - max(worker.sent_at.pop(0), worker.answered_at)
        worker.answered_at = self._now
        worker.heard_at = self._now
        worker.is_stuck = worker.is_stuck and len(worker.sent_at) > 0
        has_value, payload, changes, n_steps = pickles.loads(message.payload)
        error = None if has_value else _error_of(payload, worker)
        with self.changed:
            awaited = self.queue.awaited_number(worker.number)
            assert message.clock == awaited, (
                f"function {awaited} of worker {worker.number}, got {message.clock}"
            )
            is_awaited = self.queue.is_awaited(worker.number)
            if error is None and is_awaited:
                error = self._apply(changes)
            if error is None:
                self.queue.finish(worker.number, payload)
            else:
                self.queue.fail(worker.number, error)
            if error is not None or not is_awaited:
                worker.sent.clear()  # its changes do not count
            self._count_steps(n_steps)
            self._ended_at = self._now
            self._is_reported = False
            self.changed.notify_all()

    def _apply(self, changes: Changes) -> Exception | None:
        """Make the changes of a function; return the error if they cannot be made."""
        try:
            self._definitions.shared.apply(changes)
        except (RuntimeError, KeyError) as error:
            # the program has replaced a buffer meanwhile
            return error
        return None

    def _count_steps(self, n_steps: int) -> None:
        self.n_steps += n_steps
        for _ in range(n_steps):
            self._world.step_flags.count_step()

    # -- workers that are silent --------------------------------------------------------------------------------------

    def _hear(self) -> None:
        """Take heartbeats; put back the closures of workers that have fallen silent."""
        status = MPI.Status()
        while self._comm.Iprobe(tag=BEAT_TAG, status=status):
            text = np.empty(status.Get_count(MPI.BYTE), np.uint8)
            self._comm.Recv(text, status.Get_source(), BEAT_TAG)
            self._note_heard(self._workers[status.Get_source()])
            if len(text):
                stop_for(text.tobytes().decode(), self._world)
        lost_s = max(LOST_S, self._world.timeout_s * LOST_PART)
        for worker in self._workers.values():
            if not worker.is_silent and self._now - worker.heard_at > lost_s:
                self._lose(worker, lost_s)
        if all(
            self._now - each_worker.heard_at > max(lost_s, self._world.timeout_s)
            for each_worker in self._workers.values()
        ):
            self._give_up()
        self._report()

    def _note_heard(self, worker: _Worker) -> None:
        worker.heard_at = self._now
        if worker.is_silent:
            worker.is_silent = False
            log(f"coordinator: worker {worker.number} (rank {worker.rank}) is back")

    def _lose(self, worker: _Worker, lost_s: float) -> None:
        worker.is_silent = True
        with self.changed:
            self.queue.lose(worker.number)
        log(
            f"coordinator: worker {worker.number} (rank {worker.rank}) has been silent for {lost_s:g} s; other workers "
            f"go on without it"
        )

    def _give_up(self) -> None:
        """Let `join` raise, and cancel closures that have not begun, as no worker is there."""
        with self.changed:
            if self.queue.has_failed:
                return
            self.queue.note_error(
                CollectiveTimeoutError(
                    f"join: expected a heartbeat of a worker within {self._world.timeout_s:g} s, got none of all "
                    f"{len(self._workers)} on {self._world}; look at their nodes."
                )
            )
            self.queue.cancel_waiting()
            self.changed.notify_all()

    def _report(self) -> None:
        """Log which functions run, once, if none has ended for as long as the time limit."""
        limit_s = self._world.timeout_s
        last_event_at = self._ended_at
        for worker in self._workers.values():
            last_event_at = max([last_event_at, *worker.sent_at])
        if self._is_reported or not self.queue.has_running or self._now - last_event_at <= limit_s:
            return
        self._is_reported = True
        texts: list[str] = []
        for number, closures in self.queue.running.items():
            if closures:
                texts.append(f"{closures[0].name!r} on worker {number}")
        running = ", ".join(texts)
        log(f"coordinator: no function has ended for {limit_s:g} s; still running: {running}")


def _error_of(payload: Bytes, worker: _Worker) -> Exception:
    """Return the error of a function, with the worker's stack as its cause."""
    try:
        error, trace = pickles.loads(payload)
    except Exception as caught:  # noqa: BLE001  its class may be one that only the worker can import
        error = HpcdistError(f"a function failed, and its error cannot be read here: {caught}")
        trace = ""
    function_error: Exception = error
    if not isinstance(error, Exception):
        function_error = HpcdistError(f"{type(error).__name__}: {error}")
    function_error.__cause__ = WorkerError(
        f"on worker {worker.number}, rank {worker.rank}:\n{trace}"
    )
    return function_error

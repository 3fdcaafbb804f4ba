"""One rank fails, the whole job ends: hooks for uncaught exceptions, sys.exit and ranks that leave early.

MPI does not report that a rank has left: the others wait in their next collective for ever. These hooks make sure that
an uncaught exception or a non-zero exit on one rank ends every rank, and that the reason is printed once.
"""

import atexit
import builtins
import contextlib
import dis
import faulthandler
import io
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType
from typing import NoReturn, TextIO

import numpy as np

from hpcdist.child_processes import STOP_SIGNALS
from hpcdist.errors import ExitCode, HpcdistError, log, report_agreed
from hpcdist.runtime.mpi import MPI
from hpcdist.runtime.waiting import wait_until

#: How long a failing rank waits for others that leave by themselves, before it ends them.
LAST_CALL_S = 4.0
#: The same for a rank that left by a SystemExit that did not come from sys.exit: its code is not known, it may be 0.
UNKNOWN_CALL_S = 8.0
#: How long a rank that finished waits for others before it logs that it does.
SILENCE_S = 60.0
#: How long a rank that finished waits for the others: they may still be busy, such as with a last report.
FINISH_LIMIT_S = 86400.0
#: Ranks other than 0 delay their reports by this much, and a little more each, so that a failure of all ranks is
#: printed by rank 0 only: a launcher takes about half a second to end the others.
REPORT_DELAY_S = 1.5
MAX_REPORT_DELAY_S = 3.0
#: Time between two looks for heartbeats, and the longest sleep, of a rank that waits to leave.
LOOK_S = 0.1
MAX_SLEEP_S = 0.002
#: If the MPI library's abort does not return, this process exits by itself.
ABORT_LIMIT_S = 10.0
_HEARTBEAT = np.empty(0, np.uint8)
#: Tags of messages between ranks that leave.
_HEARTBEAT_TAG = 0
_END_TAG = 1
#: Codes of ranks that leave as agreed.
_ORDERLY = (ExitCode.DONE, ExitCode.RUN_AGAIN)


class ExitHooks:
    """The process-wide hooks that end the job when this rank fails.

    Args:
        comm: communicator of all ranks; private to the hooks.
        describe: function that returns a name of this rank, such as "rank 3 (worker 3)".
        is_reporter: whether this process prints an error that all ranks share.
        on_leave: function that is called when all ranks have reached their exit; it may communicate.
        is_beside_training: function that returns whether this rank is an evaluator, whose errors end no training.

    Attributes:
        is_leaving: whether this rank has left its program, and waits for others to leave theirs.
    """

    def __init__(
        self,
        comm: MPI.Comm,
        describe: Callable[[], str],
        is_reporter: bool,
        on_leave: Callable[[], None],
        is_beside_training: Callable[[], bool] = lambda: False,
    ) -> None:
        self._comm = comm
        self._describe = describe
        self._is_reporter = is_reporter
        self._on_leave = on_leave
        self._is_beside_training = is_beside_training
        self._on_done: Callable[[], None] | None = None
        self._on_failure: list[Callable[[], None]] = []
        self._main_frame: FrameType | None = _outermost_frame()
        self._pid = os.getpid()
        self._previous_hook = sys.excepthook
        self._exit: _RecordedExit | None = None
        self._heartbeats: list[MPI.Request] = []
        self._announced: int | None = None
        self._on_uncaught: Callable[[str, str], None] = lambda event, report: None
        self.is_leaving = False
        self._is_beside_end = False

    def call_on_uncaught(self, act: Callable[[str, str], None]) -> None:
        """Call act(what, traceback) for each uncaught exception of this rank, before it ends the job. Not collective.

        `act` must return within a bounded time.
        """
        self._on_uncaught = act

    def _note_uncaught(self, event: str, report: list[str]) -> None:
        if not self.is_forked:
            # whatever fails there, the job must end for the first error
            with contextlib.suppress(Exception):
                self._on_uncaught(event, "".join(report))

    def call_when_done(self, act: Callable[[], None] | None) -> None:
        """Call `act` when all ranks have left with code 0, before `on_leave`. Not collective."""
        self._on_done = act

    def call_on_failure(self, act: Callable[[], None]) -> None:
        """Call `act`, too, right before this rank ends the job. Not collective."""
        self._on_failure.append(act)

    def announce_failure(self) -> None:
        """Make the calls that are due before this rank ends the job; from any thread."""
        for act in self._on_failure:
            act()

    def install(self) -> None:
        """Install the hooks. Not collective."""
        if not faulthandler.is_enabled():  # a segmentation fault prints where it was
            faulthandler.enable(file=2)
        sys.excepthook = self._on_exception
        threading.excepthook = self._on_thread_exception
        sys.exit = self._exit_recorded
        for name in ("exit", "quit"):  # absent under python -S
            if hasattr(builtins, name):
                setattr(builtins, name, self._exit_recorded)
        atexit.register(self._leave)

    def _exit_recorded(self, status: object = None) -> NoReturn:
        raise _RecordedExit(self, status)

    def record_exit(self, leaving: "_RecordedExit") -> None:
        """Record the SystemExit that is ending this process."""
        self._exit = leaving

    def _on_exception(
        self,
        kind: type[BaseException],
        error: BaseException,
        trace: TracebackType | None,
    ) -> None:
        with contextlib.redirect_stderr(_real_stderr()):
            self._end_for(kind, error, trace)

    def _end_for(
        self,
        kind: type[BaseException],
        error: BaseException,
        trace: TracebackType | None,
    ) -> None:
        report = traceback.format_exception(kind, error, trace)
        self._note_uncaught("uncaught exception", report)
        is_agreed = isinstance(error, HpcdistError) and error.is_agreed
        if not is_agreed and (self._comm.size == 1 or self.is_forked):
            self._previous_hook(kind, error, trace)
            is_interactive = bool(sys.flags.interactive) or hasattr(sys, "ps1")
            if isinstance(error, HpcdistError) and not is_interactive:
                self._exit_recorded(int(error.exit_code))
            return
        if isinstance(error, Exception) and self._is_beside_training():
            self._log_beside("uncaught exception", report)
            self._is_beside_end = True
            # the ranks that train act on signals to stop
            for number in STOP_SIGNALS:
                signal.signal(number, signal.SIG_IGN)
            self._exit_recorded(int(ExitCode.DONE))  # the training gives the job its exit code
        report_agreed(error, self._is_reporter)
        self._abort("uncaught exception", report, _code_of(error))

    def _on_thread_exception(self, args: threading.ExceptHookArgs) -> None:
        if issubclass(args.exc_type, SystemExit):
            return
        report = traceback.format_exception(args.exc_type, args.exc_value, args.exc_traceback)
        name = args.thread.name if args.thread else "unknown"
        self._note_uncaught(f"uncaught exception in thread {name}", report)
        if self._comm.size == 1 or self.is_forked:
            threading.__excepthook__(args)
            return
        if self._is_beside_training():
            self._log_beside(f"uncaught exception in thread {name}", report)
            return
        self._abort(f"uncaught exception in thread {name}", report, _code_of(args.exc_value))

    def _leave(self) -> None:
        """Wait for all ranks to leave, then release the program's globals, so that Python closes their files."""
        try:
            self._wait_for_all()
        finally:
            self._main_frame = None

    def _wait_for_all(self) -> None:
        """Wait for all ranks to leave; a rank that leaves by a failing exit waits briefly, then ends the others."""
        code = self._leaving_code()
        if self.is_forked:  # Python's exit would go on to finalize MPI, which the parent still uses
            _flush()
            os._exit(code)
        if MPI.Is_finalized() or self._comm.size == 1:
            self._finish(code)
            return
        self.is_leaving = True
        # the request of a reduction does not hold its arrays
        local_code = np.array([code], np.int32)
        worst = np.zeros(1, np.int32)
        request = self._comm.Iallreduce(local_code, worst, MPI.MAX)
        limit_s = self._wait_limit_s(code)
        started = time.monotonic()
        is_logged = False
        while not wait_until(request.Test, LOOK_S, yields=0, max_sleep_s=MAX_SLEEP_S):
            if self._received_heartbeat():
                started = time.monotonic()
            waited_s = time.monotonic() - started
            if waited_s > SILENCE_S and not is_logged:
                is_logged = True
                log(f"{self._describe()} is done and waits for other ranks")
            if waited_s > limit_s:
                event = "left with a non-zero exit" if code else "finished, but others did not"
                stack = self._exit.stack if self._exit else []
                self._abort(event, stack, code or 1)
        # a launcher terminates the others as soon as one has exited with a code, which would hide their own codes
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self._finish(int(worst[0]))
        self._on_leave()

    def _wait_limit_s(self, code: int) -> float:
        """Return how long this rank, which leaves with a code, waits for the others before it ends the job."""
        if self._is_beside_end:  # it waits for the training, which may take days
            return math.inf
        # a rank that was asked to leave waits for those that save, as one that is done waits for those that are not
        if code in _ORDERLY:
            return FINISH_LIMIT_S
        if self._exit:
            return LAST_CALL_S
        return UNKNOWN_CALL_S

    def send_heartbeat(self) -> None:
        """Let ranks that have left keep waiting for this one, which has work to do before it leaves. Not collective.

        To be called at least every second, from the main thread.
        """
        if MPI.Is_finalized() or self.is_forked:
            return
        for rank in range(self._comm.size):
            if rank != self._comm.rank:
                self._heartbeats.append(self._comm.Isend(_HEARTBEAT, rank, _HEARTBEAT_TAG))
        self._heartbeats = [sent for sent in self._heartbeats if not sent.Test()]

    def announce_end(self, ranks: Sequence[int]) -> None:
        """Send the code that this rank is about to leave with to other ranks, such as evaluators. Not collective."""
        if MPI.Is_finalized() or self.is_forked:
            return
        code = np.array([self._leaving_code()], np.int32)
        for rank in ranks:
            if rank != self._comm.rank:
                self._heartbeats.append(self._comm.Isend(code, rank, _END_TAG))

    def announced_end(self) -> int | None:
        """Return the code that another rank has announced to leave with; None before. Not collective."""
        status = MPI.Status()
        if (
            self._announced is None
            and not MPI.Is_finalized()
            and self._comm.Iprobe(tag=_END_TAG, status=status)
        ):
            code = np.empty(1, np.int32)
            # by rank: from any source, MPICH waits for ever between hosts
            self._comm.Recv(code, status.Get_source(), _END_TAG)
            self._announced = int(code[0])
        return self._announced

    def _received_heartbeat(self) -> bool:
        """Return whether any rank has sent a heartbeat since the last call."""
        n_received = 0
        status = MPI.Status()
        while self._comm.Iprobe(tag=_HEARTBEAT_TAG, status=status):
            self._comm.Recv(_HEARTBEAT, status.Get_source(), _HEARTBEAT_TAG)
            n_received += 1
        return n_received > 0

    def _finish(self, worst_code: int) -> None:
        if worst_code == ExitCode.DONE and self._on_done is not None:
            self._on_done()

    @property
    def is_forked(self) -> bool:
        """Whether this process was forked from the rank: it must not touch MPI, and its exit is not the rank's."""
        return os.getpid() != self._pid

    def _leaving_code(self) -> int:
        """Return the exit code of this process as far as it is known; 1 for a SystemExit that sys.exit did not make."""
        if self._exit:
            return self._exit.status
        if self._main_frame is not None and _was_unwound(self._main_frame):
            return ExitCode.UNCAUGHT
        return ExitCode.DONE

    def _log_beside(self, event: str, report: list[str]) -> None:
        """Log an error of a rank beside the training, which goes on."""
        host = MPI.Get_processor_name()
        headline = f"{self._describe()} on {host}: {event}; training goes on without this rank"
        log("\n".join([headline, *"".join(report).splitlines()]))

    def _abort(self, event: str, report: list[str], code: int) -> NoReturn:
        if self._comm.rank > 0:
            time.sleep(min(REPORT_DELAY_S + 0.05 * self._comm.rank, MAX_REPORT_DELAY_S))
        _flush()
        host = MPI.Get_processor_name()
        headline = f"{self._describe()} on {host}: {event}; ending the job with code {code}"
        log("\n".join([headline, *"".join(report).splitlines()]))
        self.announce_failure()
        end_job(self._comm, "", code)


def end_job(comm: MPI.Comm, report: str, code: int) -> NoReturn:
    """Write `report` to standard error and end all ranks of the job with `code`, from any thread, at once.

    Not collective. Takes no lock that a hanging thread may hold; MPI's Abort is the only MPI call. A process that
    survives Abort exits after `ABORT_LIMIT_S`.
    """
    with contextlib.suppress(OSError, ValueError):  # closed, or on a disk that is full
        fd = sys.__stderr__.fileno() if sys.__stderr__ else 2
        os.write(fd, report.encode())
    # mpi4py holds the interpreter lock in Abort: only a thread that needs no lock can end a process stuck there
    faulthandler.dump_traceback_later(ABORT_LIMIT_S, exit=True, file=2)
    comm.Abort(code)
    raise SystemExit(code)  # not reached: Abort does not return


class _RecordedExit(SystemExit):
    """The SystemExit that sys.exit raises here: it records itself with the hooks if, and only if, it ends the process.

    The interpreter reads `code` of an uncaught SystemExit from outside any Python frame; a handler that catches it
    reads `code` from a frame. That difference is the only way to see the exit code before atexit runs.
    """

    def __init__(self, hooks: ExitHooks, status: object) -> None:
        super().__init__(status)
        self._hooks = hooks
        self._status = status
        self.stack = traceback.format_stack(sys._getframe(2))

    @property
    def status(self) -> int:
        """The exit code as the operating system will see it."""
        if self._status is None:
            return 0
        if isinstance(self._status, int):
            return self._status & 0xFF
        return 1

    @property
    def code(self) -> object:  # type: ignore[override]
        """The argument of sys.exit."""
        if sys._getframe().f_back is None:
            self._hooks.record_exit(self)
        return self._status


def _real_stderr() -> TextIO | None:
    """Return the real standard error where sys.stderr is a buffer in memory, else sys.stderr.

    torch.distributed's exception hook calls the previous hook with a buffer and prints it afterwards: too late, as our
    hook does not return.
    """
    if isinstance(sys.stderr, io.StringIO) and sys.__stderr__:
        return sys.__stderr__
    return sys.stderr


def _flush() -> None:
    """Write out the output so far, as far as that is possible."""
    for stream in (sys.stdout, sys.stderr):
        # the stream may be full, closed, or None from the start
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()


def _code_of(error: BaseException | None) -> int:
    if isinstance(error, HpcdistError):
        return int(error.exit_code)
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT
    return int(ExitCode.UNCAUGHT)


def _outermost_frame() -> FrameType:
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    while frame.f_back is not None:
        frame = frame.f_back
    return frame


def _was_unwound(frame: FrameType) -> bool:
    """Return whether a finished frame was left by an exception: its last instruction is not a return."""
    last_instruction = dis.opname[frame.f_code.co_code[frame.f_lasti]]
    return not last_instruction.startswith("RETURN")

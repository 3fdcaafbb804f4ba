"""PreemptionCheckpointHandler: on a stop request the job saves and exits with 75, or 76 if it must not run again."""

import contextlib
import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from dataclasses import replace
from types import TracebackType
from typing import Any, NamedTuple, NoReturn

from hpcdist.background import BackgroundThread
from hpcdist.cluster.environment import launcher_of, read_environment
from hpcdist.diagnostics.logs import FailureLog, log_file
from hpcdist.errors import (
    CheckpointError,
    DesyncError,
    ExitCode,
    HpcdistError,
    UsageError,
    log,
)
from hpcdist.program.loop_watch import watch_loop
from hpcdist.program.torch_hooks import note_step
from hpcdist.run.record import RunRecord
from hpcdist.run.side_errors import SideErrors
from hpcdist.run.step_times import begin_step_times
from hpcdist.run.stop_request import StopRequest
from hpcdist.runtime.process import call_on_uncaught, call_when_done, end_job, end_of_training
from hpcdist.runtime.step_flags import Request
from hpcdist.saving.attempt import RunAttempt
from hpcdist.saving.checkpoint import Checkpoint
from hpcdist.saving.manager import CheckpointManager
from hpcdist.saving.saves import AttemptSaves
from hpcdist.saving.schedule import SaveSchedule
from hpcdist.stopping.agreement import Agreement
from hpcdist.stopping.deadline import Deadline
from hpcdist.stopping.loop_guard import LoopGuard
from hpcdist.stopping.pace import Pace
from hpcdist.stopping.running_clock import RunningClock
from hpcdist.stopping.steps import LastStepValues, StepCount
from hpcdist.stopping.stop import StopFlag, wrapper_of
from hpcdist.stopping.termination import TerminationConfig
from hpcdist.stopping.time_left import TimeLeft

#: Seconds that a stop request waits for work that cannot be interrupted, without a grace period: batch systems leave 30
#: s or more between their first signal and the last one.
STOP_GRACE_S = 20.0
#: Time that a launcher needs to print a line: the end of the job discards lines that it has not printed.
_PRINT_S = 0.5
#: Least number of steps that a stop waits for a point between two iterations: the ranks agree on a request a step
#: later, however long a step takes.
_MIN_STOP_STEPS = 3
#: Steps by which the chief leaves before other ranks, which may learn of a request a step earlier.
_STEPS_AFTER_CHIEF = 2
#: Longest wait for the record of a stop without a save.
_RECORD_S = 10.0
#: The request of a job that nobody has asked to stop.
_END_OF_TIME = StopRequest("deadline")


class _LastSave(NamedTuple):
    """The save before a stop.

    Attributes:
        step: step of the last checkpoint that counts.
        how: what came of the save, for the log.
    """

    step: int
    how: str


class PreemptionCheckpointHandler:
    """Saves and exits on a stop request to any rank, after the same step on all ranks.

    A stop request is SIGTERM, SIGUSR1, SIGUSR2, SIGHUP or a first Ctrl-C (SIGINT) on any rank, the end of the batch job
    or of `time_limit_s`, a file named `stop` in the run folder (the parent of the checkpoints' folder), or a call of
    `stop`.
    It takes effect between two iterations of the loop: when a distributed dataset is asked for its next batch, when
    `run` is called with no batch taken since the last step, and in `poll`; docs/concepts/stopping.md has the rules. All
    ranks must reach these points equally often. If the time left seems too short for a save, one is tried, and the end
    is recorded before it is done.

    Code after an interrupted loop does not run in this attempt. Pass work that must not be interrupted as a whole: an
    evaluation to `evaluate`; to `run` the backward passes that accumulate gradients for one optimizer step, as no
    checkpoint holds those gradients.

    On an evaluator, which saves nothing, `poll` ends the program with the chief's code once the chief has left and the
    evaluator has had one more round: an evaluator's loop polls, and needs no other end.

    As a context manager it saves the last steps at the end and records in `decision.json` that the job is finished.
    Without `with` it does so once all ranks have exited with code 0, but does not save the state on parameter servers.

    Collective over chief and workers. Creating it restores the latest checkpoint. Create it in the main thread.

    >>> handler = hpcdist.PreemptionCheckpointHandler(None, checkpoint, "runs/a/checkpoints", save_every_steps=100)
    >>> with handler:
    ...     for epoch in range(batches.epoch, 2):
    ...         for x, y in batches:
    ...             train_step(x, y)
    >>> handler.step
    4

    Args:
        cluster_resolver: accepted for compatibility with tf.distribute; the ranks are those of the checkpoint's
            strategy.
        checkpoint_or_checkpoint_manager: the objects to save, or the manager that saves them.
        checkpoint_dir: the folder, if a Checkpoint is given.
        termination_config: see `TerminationConfig`.
        save_every_steps: save every N steps.
        schedule: saves by time or failure rate, copies in memory, comparisons of ranks.
        time_limit_s: the job will be ended this many seconds from now, or earlier if the batch job ends earlier.

    Attributes:
        restored_path: path of the restored checkpoint; None for a new run.

    Raises:
        UsageError: without a folder, or outside the main thread.
        NoProgressError: if three attempts of a batch job in a row made no progress; on all ranks.
        CheckpointError: if the folder cannot be read or written; on all ranks.
    """

    def __init__(
        self,
        cluster_resolver: Any,
        checkpoint_or_checkpoint_manager: Checkpoint | CheckpointManager,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        termination_config: TerminationConfig | None = None,
        *,
        save_every_steps: int | None = None,
        schedule: SaveSchedule | None = None,
        time_limit_s: float | None = None,
    ) -> None:
        self._config = termination_config or TerminationConfig()
        self._manager = _manager_of(checkpoint_or_checkpoint_manager, checkpoint_dir)
        self._world = self._manager.checkpoint.world
        self._attempt = RunAttempt(
            self._world, self._manager, knows_progress=self._config.save_fn is None
        )
        clock = RunningClock()
        self._pace = Pace(clock)
        self._saves = AttemptSaves(
            self._manager,
            self._attempt,
            _schedule_of(schedule, save_every_steps),
            _save_fn_of(self._config, self._world.task.type),
            clock,
        )
        self._time_left = TimeLeft(
            clock,
            time_limit_s,
            has_grace_period=bool(self._config.grace_period),
            asks=self._world.is_chief,
            pace=self._pace,
            saves=self._saves.times,
            n_saves=lambda: self._saves.n_at_end(self.step),
        )
        # state of a stop
        self._is_busy = False
        self._is_done = False
        self._saves_no_more = False
        self._knows_of_end = False
        self._stop_seen_at: int | None = None
        self._remote_request: StopRequest | None = None
        self._stop_waits = False
        self._state_at_end: str | None = None
        # state of the polls
        self._is_polled = False
        self._asks_at_once = False
        self._attempt.begin()
        if isinstance(self._world.step_flags.requester, PreemptionCheckpointHandler):
            self._world.step_flags.requester.close()
        place = f"rank {self._world.rank}"
        file = self._attempt.folder / "stop" if self._world.is_chief else None
        self._flag = StopFlag(place, file, self._config.termination_watcher_fn)
        self._flag.watch_signals()
        try:
            self.restored_path = self._restore()
            self._begin_records()
            flags = self._world.step_flags
            self._loop = flags.loop
            checkpoint = self._manager.checkpoint
            self._steps = StepCount(flags, checkpoint.step)
            self._guard = LoopGuard(self._loop, self._steps)
            self._last_values = LastStepValues(checkpoint.first_parameters(), self._loop.n_steps)
            attempt_number = self._manager.attempt if self._world.is_chief else 0
            self._times = begin_step_times(
                self._world, self._attempt.folder, attempt_number, self.step
            )
            self._agreement = Agreement(self._world, self.requested)
            self._pace.begin(self.step)
            self._saves.begin(self.step, is_restored=self.restored_path is not None)
            if self.restored_path is not None and self._world.is_chief:
                log(f"resuming at step {self.step} from {self.restored_path}")
            watch_loop(flags)
            self._act_on_requests()
        except BaseException:
            self._flag.close()
            raise

    @property
    def deadline(self) -> Deadline | None:
        """The time at which the job will be ended, and the saves that must fit in before; None without a limit."""
        return self._time_left.deadline

    def _restore(self) -> str | None:
        """Restore the latest checkpoint; return its path, None for a new run."""
        try:
            restored_path = self._manager.restore_or_initialize()
        except CheckpointError as error:
            self._attempt.refused(error)
            raise
        if restored_path is not None:
            for optimizer in self._manager.checkpoint.optimizers():
                note_step(optimizer)  # a schedule may step before the first step of this attempt
        return restored_path

    def _begin_records(self) -> None:
        """Write the attempt's decision and settings to the run folder, and from now on its uncaught errors."""
        self._attempt.renew()
        self._manager.begin_config(self._time_left.program_end)
        log_path = log_file(self._attempt.folder / "logs", self._world)
        failure_log = FailureLog(log_path, self._world)
        side_errors = None
        if self._world.task.type == "evaluator":
            side_errors = SideErrors(self._attempt.folder, f"evaluator-{self._world.task.index}")
        call_on_uncaught(functools.partial(_note_uncaught, failure_log, side_errors))

    def _act_on_requests(self) -> None:
        """Act on requests from now on, and save at the end of the program."""
        checkpoint = self._manager.checkpoint
        self._world.step_flags.attach(self, checkpoint.optimizers(), checkpoint.objects())
        call_when_done(self.record_end)
        if self.deadline is not None:
            self._log(self.deadline.describe())
        if self._config.save_fn is None:
            self._manager.start()
            self._manager.warn_of_memory()
        wrapper = wrapper_of(os.getpid())
        if wrapper is not None and launcher_of(read_environment()) is not None:
            self._log(
                f"{wrapper} started this program, and may keep signals from it: a batch system that signals only what "
                f"it started cannot stop it; start the program with exec."
            )

    @property
    def latest_path(self) -> str | None:
        """The path of the last saved or restored checkpoint."""
        return self._manager.latest_path

    def _log(self, text: str) -> None:
        if self._world.is_chief:
            log(text)

    # -- steps ----------------------------------------------------------------------------------------------------

    @property
    def total_run_calls(self) -> int:
        """Steps so far, earlier attempts included; TensorFlow's name for `step`."""
        return self.step

    @property
    def step(self) -> int:
        """Steps so far, earlier attempts included; checkpoints are named by it.

        Each call of `run` or `save_checkpoint_if_preempted` is a step; so is each optimizer step outside of `run` and
        `evaluate`.
        """
        return self._steps.value

    def run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return fn(*args, **kwargs), which is one step and is not interrupted.

        Collective over chief and workers, as it acts on requests before the call.
        """
        if not self._is_polled:  # no batch was taken since the last step
            self.poll()
        with self._steps.call(), self._busy():
            result = fn(*args, **kwargs)
        self._is_polled = False
        return result

    def evaluate(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return fn(*args, **kwargs), which is no step and is not interrupted, such as an evaluation.

        Before a deadline time is left for one more call as long as the longest that is expected again.

        Collective over chief and workers, as it acts on requests before the call.
        """
        if not self._is_polled:
            self.poll()
        elif self._times is not None:  # in the middle of an epoch a step has ended here
            self._times.arrive(self.step)
            self._log_pace(self._times.leave())
        with self._steps.evaluation(), self._busy():
            result = fn(*args, **kwargs)
        self._pace.note_call(self.step)
        self._asks_at_once = True
        self._is_polled = False
        return result

    def save_checkpoint_if_preempted(self, *args: Any, **kwargs: Any) -> None:
        """Count a completed step, and act on stop and save requests; for loops that do not use `run`.

        Collective over chief and workers.

        Args:
            args: positional arguments for `save_fn`, or for `manager.save`, after the step.
            kwargs: keyword arguments for `save_fn` or `manager.save`.
        """
        self._steps.count_reported(self._manager.saved_step)
        # the program changes parameters by itself
        if not self._steps.has_optimizer_steps:
            self._loop.note_reported_step()
        self.poll(*args, **kwargs)

    @contextlib.contextmanager
    def watch_preemption_scope(self) -> Iterator[None]:
        """Act on stop and save requests at the end of the block too. Collective over chief and workers."""
        yield
        self.poll()

    def stop(self, reason: str = "stop()") -> None:
        """Request that all ranks save and exit after this step. Not collective: one rank suffices; from any thread."""
        self._flag.ask(reason)

    @contextlib.contextmanager
    def _busy(self) -> Iterator[None]:
        """Put off requests until the block has ended."""
        was_busy = self._is_busy
        self._is_busy = True
        try:
            yield
        finally:
            self._is_busy = was_busy

    def busy(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager in whose block requests wait. Not collective; the same on all ranks."""
        return self._busy()

    def end_saving(self) -> RunRecord:
        """From now on save nothing: a stop request ends the program, and the last save counts. Not collective.

        Returns:
            The record in which to note that the run is finished, once the program has ended well.
        """
        self._saves_no_more = True
        self._manager.forget_copies()
        return self._attempt.record

    def leave_if_overdue(self, quiet_s: float) -> None:
        """End the job without a save if no work was done in the grace period since a stop request.

        Not collective; from any thread. Whoever waits for work that may not end calls it: see `ClusterCoordinator`.

        Args:
            quiet_s: seconds since the last work was done.
        """
        request = self._flag.find_request_in_any_thread()
        if self._is_done or self._is_busy or request is None:
            return
        if quiet_s > self._grace_s and self._is_overdue(request):
            self.leave_at_once(request)

    @property
    def _grace_s(self) -> float:
        return self._config.grace_period or STOP_GRACE_S

    def _is_overdue(self, request: StopRequest, wait_s: float = 0.0) -> bool:
        """Return whether the grace period of a request is over, and `wait_s` seconds more."""
        if request.asked_at is None:
            return True
        return time.monotonic() - request.asked_at > self._grace_s + wait_s

    def leave_at_once(self, request: StopRequest) -> NoReturn:
        """Record that the job was stopped, save nothing, and end all ranks with code 75 or 76. From any thread.

        The last save counts. Not collective.
        """
        self._is_done = True
        log(
            f"{request.reason}: stopped without a save, as the work in progress does not end; the last one counts"
        )
        record_stop = functools.partial(self._record_stop, request)
        recording = BackgroundThread("hpcdist-stop").submit(record_stop)
        wait([recording], _RECORD_S)  # a file server that hangs must not keep the job
        if recording.done() and recording.exception() is None:
            request = recording.result()
        time.sleep(_PRINT_S)
        code = ExitCode.DO_NOT_REQUEUE if request.is_for_good else ExitCode.RUN_AGAIN
        end_job("", int(code))

    def _record_stop(self, request: StopRequest) -> StopRequest:
        """Record a stop without a save, and remove the stop file, so that the next attempt runs.

        Returns:
            The request, for good if the stop file asks for that by now.
        """
        if self._flag.is_for_good():
            request = replace(request, is_for_good=True)
        self._attempt.record_stop(request)
        with contextlib.suppress(OSError):  # the next attempt stops at once, and says why
            self._flag.remove_file()
        return request

    # -- between steps --------------------------------------------------------------------------------------------

    def requested(self) -> Request:
        """Return this rank's request to all ranks, which travels with the sum of a backward. Not collective.

        It looks at all sources of stop requests, so it calls the user's function, and follows the batch job's end.
        """
        if self._is_done:
            return Request.NONE
        if self._world.is_chief:
            line = self._time_left.follow_batch_end()
            if line is not None:
                self._log(line)
        must_stop = self._time_left.is_near
        if not must_stop and not self._time_left.is_counting_down:
            must_stop = self._flag.find_request() is not None
        request = Request.NONE
        if must_stop:
            request |= Request.STOP
        if self._world.is_chief and not self._saves_no_more and self._is_save_late:
            request |= Request.SAVE
        return request

    @property
    def _is_save_late(self) -> bool:
        """Whether a save is due by time, or to measure its cost."""
        if self._saves.is_late(self.step):
            return True
        return self._time_left.needs_measure and self.step > self._manager.saved_step

    def poll(self, *args: Any, **kwargs: Any) -> None:
        """Act on stop and save requests between two steps; for loops in which nothing else polls.

        Collective over chief and workers, which must call it equally often. It does nothing inside `run`. While
        gradients wait for an optimizer's step it does not save, but refuses a program in which that never changes.

        Args:
            args: positional arguments for `save_fn`, or for `manager.save`, after the step.
            kwargs: keyword arguments for `save_fn` or `manager.save`.

        Cost: none after a gradient all-reduce; otherwise an all-reduce of 8 bytes every few polls.
        """
        if self._can_poll:
            self._leave_after_training()
            if not self._guard.admits_poll():
                self.note_unsafe_point()
                return
            self._loop.note_safe_point()
        self.poll_between_batches(*args, **kwargs)

    @property
    def _can_poll(self) -> bool:
        return not (
            self._is_busy
            or self._is_done
            or threading.current_thread() is not threading.main_thread()
        )

    def poll_between_batches(self, *args: Any, **kwargs: Any) -> None:
        """Poll like `poll`, but do not end an evaluator, whose evaluation is not over. `StepFlags.poll` calls it."""
        if not self._can_poll or self._world.step_flags.is_in_round:
            return
        if self._loop.is_after_pass:
            self._state_at_end = self._manager.checkpoint.digest_between_passes()
        self._guard.note_safe_point()
        has_stepped = self._pace.arrive(self.step)
        # steps of the program's own
        if has_stepped and not self._steps.has_optimizer_steps:
            self._last_values.note()
        if self._times is not None:
            self._times.arrive(self.step)
        self._is_polled = True
        is_long_since = self._asks_at_once
        may_ask = self._loop.is_shared_point or is_long_since
        requests = self._agreement.poll(at_once=is_long_since, may_ask=may_ask)
        self._asks_at_once = False
        with self._recording_desync(), self._busy():
            if Request.STOP in requests or self._stop_waits:
                self._stop_waits = False
                self._obey(args, kwargs)
            elif has_stepped and not self._saves_no_more:
                self._saves.note_saved()
                in_memory = self._saves.check(self.step)
                if Request.SAVE in requests or self._saves.is_due(self.step):
                    self._saves.save(self.step, *args, is_last=False, in_memory=in_memory, **kwargs)
                elif in_memory:
                    self._saves.copy(self.step)
        if self._times is not None:
            self._log_pace(self._times.leave())
        self._pace.leave()

    def poll_after_pass(self) -> None:
        """Act on a stop between a pass and the next one, such as in a validation, if the end of the pass can be saved.

        It can be saved as long as no object of the Checkpoint, such as a schedule, has changed since: the work after
        the pass is done again. Otherwise a stop waits for the next pass. Collective over chief and workers.
        """
        if not self._can_poll:
            return
        self._pace.leave()
        requests = self._agreement.poll(at_once=self._asks_at_once)
        if Request.STOP not in requests and not self._stop_waits:
            return
        self._asks_at_once = False
        self._stop_waits = True
        state = self._manager.checkpoint.digest_between_passes()
        is_changed = state is None or state != self._state_at_end
        if self._agreement.any_rank(is_changed):
            return
        self._stop_waits = False
        self._loop.rewind_to_end_of_pass()
        with self._recording_desync(), self._busy():
            self._obey((), {})

    def note_unsafe_point(self) -> None:
        """Refuse a program that never is between two iterations, and end one that must stop and cannot save.

        Not collective, except for the refusal, which all ranks reach alike. Called after each step and at draws in the
        middle of an iteration.

        Raises:
            UsageError: on all ranks.
        """
        self._last_values.note_after(self._loop.n_steps)
        if not self._can_poll:
            return
        self._guard.require_steps()
        if not self._saves_no_more:
            self._guard.require_safe_points()
        if not self._world.step_flags.is_in_round:  # which ends at a point between two iterations
            self._leave_if_overdue()

    def _leave_if_overdue(self) -> None:
        """Leave without a save if a stop request finds no point between two iterations, although steps are made.

        The chief comes first, as it alone can record the stop. It knows of the requests of other ranks by the sums.
        """
        request = self._find_pressing_request()
        if request is None or self._time_left.is_counting_down:
            return
        if self._stop_seen_at is None:
            self._stop_seen_at = self._loop.n_steps
        n_steps = self._loop.n_steps - self._stop_seen_at
        least_steps = _MIN_STOP_STEPS
        wait_s = 0.0
        if not self._world.is_chief:
            least_steps += _STEPS_AFTER_CHIEF
            wait_s = _RECORD_S
        if n_steps >= least_steps and self._is_overdue(request, wait_s):
            self.leave_at_once(request)

    def _find_pressing_request(self) -> StopRequest | None:
        """Return why to stop, as far as this rank knows; None if nothing asks for it."""
        request = self._flag.find_request()
        if request is not None:
            return request
        if self._time_left.is_near:
            return _END_OF_TIME
        if self._remote_request is None and self._world.step_flags.is_stop_known:
            self._remote_request = StopRequest(
                "a stop request on another rank", asked_at=time.monotonic()
            )
        return self._remote_request

    def _log_pace(self, pace: str | None) -> None:
        """Log where the time goes, on the chief; nothing if `pace` is None."""
        if pace is None:
            return
        now = time.strftime("%Y-%m-%dT%H:%M:%S")
        line = f"{now} attempt {self._manager.attempt} step {self.step}: {pace}"
        if self.deadline is not None:
            line += f"; {self.deadline.left_s:.0f} s to the end of the job"
        self._log(line)

    @contextlib.contextmanager
    def _recording_desync(self) -> Iterator[None]:
        """Record in the run folder that ranks differ: an exit code may not reach the launcher."""
        try:
            yield
        except DesyncError as error:
            if error.is_agreed:
                self._is_done = True
                self._attempt.record_desync(error)
            raise

    def _leave_after_training(self) -> None:
        """On an evaluator, leave once the chief has left; at the second poll, so that its last checkpoint is seen."""
        if self._world.task.type in ("chief", "worker"):
            return
        code = end_of_training()
        if code is not None and self._knows_of_end:
            self._is_done = True
            self._flag.ignore_signals()
            sys.exit(code)
        self._knows_of_end = code is not None

    # -- the end --------------------------------------------------------------------------------------------------

    def _obey(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Save and leave, or save and count down to the end of the grace period."""
        self._agreement.require_same_step(self.step)
        self._agreement.require_same_positions(self._loop.describe_positions())
        is_end_near = self._time_left.is_job_end_near
        local_request = self._flag.find_request()
        if local_request is None and is_end_near:
            local_request = _END_OF_TIME
        agreed_request = self._agreement.first_request(local_request)
        request = agreed_request or _END_OF_TIME
        is_urgent = self._agreement.any_rank(is_end_near)
        # a deadline that is no longer near asks for the stop that all ranks have agreed on, and for no grace period
        is_before_deadline = agreed_request is not None and not is_urgent
        grace_s = self._config.grace_period
        if grace_s and is_before_deadline and not self._time_left.is_counting_down:
            self._log(
                f"{request.reason}: training continues from step {self.step} within the grace period of {grace_s:g} s"
            )
            if not self._saves_no_more:
                self._saves.save(self.step, *args, is_last=False, **kwargs)
            asked_at = None if local_request is None else local_request.asked_at
            self._time_left.count_down(grace_s, asked_at)
            return
        self._is_done = True
        # the chief knows what a save costs
        is_too_late = self._agreement.any_rank(self._time_left.is_too_late)
        last_save = self._save_last(is_too_late, args, kwargs)
        # looked at now: a person may have written the stop file while the job saved
        if self._agreement.any_rank(self._flag.is_for_good()):
            request = replace(request, is_for_good=True)
        # the batch system chose the time, as far as a SIGTERM tells: not at the deadline
        is_excused = request.may_be_preemption and is_before_deadline
        code, why = self._attempt.stopped(request, last_save.step, is_excused, is_too_late)
        self._remove_stop_file()  # people wait for that: the decision is there by now
        self._log(
            f"{request.reason}: stopped after step {self.step}, {last_save.how} in {self._manager.directory}"
        )
        self._log_restart(request, code, why)
        if self._config.exit_fn is not None:
            self._config.exit_fn()
        else:
            self._flag.ignore_signals()
            sys.exit(int(code))

    def _save_last(
        self, is_too_late: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> "_LastSave":
        """Save before a stop, if there is time; try to, if there may be too little. Collective over the role.

        Args:
            is_too_late: whether a save seems not to fit into the time left, on any rank.
            args: positional arguments for `save_fn`, or for `manager.save`, after the step.
            kwargs: keyword arguments for `save_fn` or `manager.save`.
        """
        saved_step = self._manager.saved_step
        if not is_too_late:
            if not self._saves_no_more:
                self._saves.save(self.step, *args, is_last=True, **kwargs)
                saved_step = self.step
            return _LastSave(saved_step, "saved")
        has_begun = False
        if not self._saves_no_more and not self._agreement.any_rank(self._manager.is_saving):
            has_begun = self._saves.try_to_save(self.step, *args, **kwargs)
        how = "too late for a save"
        if has_begun:
            how = "too late for a save, which it tries"
        return _LastSave(saved_step, f"{how}; the last one is step {saved_step}")

    def _log_restart(self, request: StopRequest, code: ExitCode, why: str) -> None:
        """Log why the job is not run again, unless it is.

        Args:
            request: the stop request.
            code: exit code of the job.
            why: reason of the exit code.
        """
        if request.is_for_good:
            self._log(
                "it is not run again, as a person has asked for; the same command, started again, goes on"
            )
        elif code is ExitCode.DO_NOT_REQUEUE:
            self._log(
                f"do not run again: {why}; allow time for a save, or look at what takes so long"
            )

    def _remove_stop_file(self) -> None:
        """Remove the stop file, so that the next attempt runs."""
        with self._world.agreed(self._world.role_comm):
            try:
                self._flag.remove_file()
            except OSError as error:
                raise CheckpointError(
                    f"stop: expected to remove {self._attempt.folder / 'stop'}, got {error.strerror}; remove it, or "
                    f"the next attempt stops at once."
                ) from None

    def record_end(self) -> None:
        """Save the last steps, and record that the program is finished.

        Without `with` it is called once all ranks have exited with code 0. Collective over chief and workers.
        """
        if self._is_done:  # finished or stopped, and recorded
            return
        self._is_done = True
        has_steps = self.step > self._manager.saved_step and not self._saves_no_more
        if has_steps and self._world.task.type in ("chief", "worker"):
            self._save_at_exit()
        self._attempt.record_end(self._manager.saved_step)

    def _save_end(self) -> None:
        """Save the last steps. Collective over chief and workers."""
        with self._recording_desync(), self._busy():
            if self._world.task.type in ("chief", "worker"):
                self._agreement.require_same_positions(self._loop.describe_positions())
            self._saves.end(self.step)

    def _save_at_exit(self) -> None:
        """Save the last steps while the program exits; an error, also of ranks that differ, ends the job with its code.

        Nothing is saved if parameters have changed after the last step, as when the best weights were loaded to test
        them, or if they are on parameter servers, which have left.
        """
        steps = f"the steps from {self._manager.saved_step} to {self.step} are not saved"
        if self._manager.checkpoint.is_on_servers:
            self._log(
                f"{steps}, as parameter servers have left: write `with handler:` around the loop"
            )
            return
        if self._agreement.any_rank(self._last_values.have_changed()):
            self._log(
                f"{steps}, as parameters have changed since the last one: write `with handler:` around the loop"
            )
            return
        try:
            self._save_end()
            with self._recording_desync():
                self._manager.wait()
        except HpcdistError as error:
            if isinstance(error, DesyncError) and error.is_agreed:
                # until the chief has recorded it: the first rank that ends the job ends the chief too
                self._agreement.any_rank(False)
            end_job(f"the last save failed: {error}", int(error.exit_code))

    def close(self) -> None:
        """Stop acting on requests, and reinstall the earlier signal handlers. Not collective."""
        self._flag.close()
        self._time_left.stop()
        self._world.step_flags.detach(self)
        if self._times is not None:
            self._times.arrive(self.step)  # of a loop that has not polled since its last step
            self._times.end()

    def __enter__(self) -> "PreemptionCheckpointHandler":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._is_done:  # keep the handlers: a signal must not end a process that is exiting
            return
        try:
            if kind is None or (isinstance(error, SystemExit) and not error.code):
                self._is_done = True
                self._save_end()
                self._attempt.finished(self._manager.saved_step)
                # which would keep the strategy alive, and all models of the Checkpoint
                call_when_done(None)
            elif isinstance(error, DesyncError) and error.is_agreed:
                self._is_done = True
                self._attempt.record_desync(error)
            elif not issubclass(kind, SystemExit):
                # a program that continues after an error is not finished
                call_when_done(None)
        finally:
            self.close()


def _note_uncaught(
    failure_log: FailureLog, side_errors: SideErrors | None, heading: str, report: str
) -> None:
    """Write an uncaught exception of this rank to its log and, of an evaluator, to the run folder."""
    failure_log.write(heading, report)
    if side_errors is not None:
        side_errors.record(report.rstrip().rpartition("\n")[2], 1)


def _save_fn_of(config: TerminationConfig, task_type: str) -> Callable[..., Any] | None:
    """Return the user's function that saves; on an evaluator one that saves nothing, if there is one."""
    if config.save_fn is None or task_type in ("chief", "worker"):
        return config.save_fn
    return _save_nothing


def _save_nothing(*args: Any, **kwargs: Any) -> None:
    pass


def _manager_of(
    checkpoint_or_manager: Any, directory: str | os.PathLike[str] | None
) -> CheckpointManager:
    if isinstance(checkpoint_or_manager, CheckpointManager):
        return checkpoint_or_manager
    actual = type(checkpoint_or_manager).__name__
    if isinstance(checkpoint_or_manager, Checkpoint):
        if directory is not None:
            return CheckpointManager(checkpoint_or_manager, directory)
        actual = "no checkpoint_dir"
    raise UsageError(
        f"PreemptionCheckpointHandler: expected a CheckpointManager, or a Checkpoint and a checkpoint_dir, got "
        f"{actual}; give one of these."
    )


def _schedule_of(schedule: SaveSchedule | None, save_every_steps: int | None) -> SaveSchedule:
    """Return the schedule of the saves, in which `save_every_steps` counts if it is given."""
    schedule = schedule or SaveSchedule()
    if save_every_steps is None:
        return schedule
    return replace(schedule, every_steps=save_every_steps)

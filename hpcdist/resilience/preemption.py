"""PreemptionCheckpointHandler: a job that is asked to stop saves, leaves with code 75, and goes on when run again."""

import contextlib
import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import TracebackType
from typing import Any

from hpcdist.cluster.environment import job_end, read_environment
from hpcdist.errors import CheckpointError, DesyncError, ExitCode, UsageError, log
from hpcdist.resilience.agreement import Agreement
from hpcdist.resilience.attempt import Attempt
from hpcdist.resilience.checkpoint import Checkpoint
from hpcdist.resilience.deadline import Calls, Deadline, Durations
from hpcdist.resilience.manager import CheckpointManager
from hpcdist.resilience.saves import AttemptSaves
from hpcdist.resilience.schedule import SaveSchedule
from hpcdist.resilience.stop import StopFlag
from hpcdist.resilience.termination import TerminationConfig
from hpcdist.runtime.process import call_when_done
from hpcdist.runtime.step_flags import Request


class PreemptionCheckpointHandler:
    """Saves and leaves when any rank is asked to stop, after the same step on all of them.

    A stop is asked for by SIGTERM, SIGUSR1 or SIGUSR2 on any rank, by the end of the batch job or `time_limit_s`, by a
    file called `stop` in the run folder (the parent of the checkpoints' folder), or by `stop`. It is obeyed between two
    steps: where a distributed dataset is asked for its next batch, also in evaluation, where `run` is called with no
    batch asked for since, and in `poll`. Every rank must come there equally often. What follows a loop that was stopped
    has not happened: what must not be cut in two is passed to `run` as a whole, such as an evaluation, or the backwards
    that add up gradients for one step of the optimizer, which no checkpoint has.

    As a context manager it saves the last steps at the end, and says in `decision.json` that the job is finished.
    Without `with` that is said when all ranks have left the program with code 0; its last steps are not saved then.

    Collective: chief and workers. Latest checkpoints are restored when it is made, which must be in the main thread.

    Args:
        cluster_resolver: taken for tf.distribute's sake: ranks are those of the checkpoint's strategy.
        checkpoint_or_checkpoint_manager: what is saved, or who saves it.
        checkpoint_dir: where, if a Checkpoint was given.
        termination_config: see there.
        save_every_steps: save whenever so many steps were made.
        schedule: saves by the clock or by the rate of failures, copies in memory, comparisons of ranks.
        time_limit_s: the job will be ended so many seconds from now. An earlier end of the batch job counts.

    Attributes:
        restored_path: of the checkpoint that was restored; None for a new run.
        deadline: when the job will be ended, and what has to fit in before; None where that is not known.

    Raises:
        UsageError: without a folder, or outside the main thread.
        NoProgressError: when three attempts in a row died without a newer checkpoint; on every rank alike.
        CheckpointError: when the folder cannot be read or written; on every rank alike.
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
        schedule = schedule or SaveSchedule()
        if save_every_steps is not None:
            schedule = replace(schedule, every_steps=save_every_steps)
        self._attempt = Attempt(self._world, self._manager, is_counted=self._config.save_fn is None)
        self._saves = AttemptSaves(self._manager, self._attempt, schedule, self._config.save_fn)
        self._step_times, self._calls = Durations(), Calls()
        self.deadline = self._make_deadline(time_limit_s)
        self._attempt.begin()
        if isinstance(self._world.step_flags.requester, PreemptionCheckpointHandler):
            self._world.step_flags.requester.close()
        file = self._attempt.folder / "stop" if self._world.is_chief else None
        self._flag = StopFlag(f"rank {self._world.rank}", file, self._config.termination_watcher_fn)
        self._flag.watch_signals()
        try:
            self._begin()
        except BaseException:
            self._flag.close()
            raise

    def _make_deadline(self, time_limit_s: float | None) -> Deadline | None:
        ends = [job_end(read_environment()), None if time_limit_s is None else time.time() + time_limit_s]
        known = [end for end in ends if end is not None]
        return self._deadline_at(min(known)) if known else None

    def _deadline_at(self, end: float) -> Deadline:
        times = (self._step_times, self._saves.times)
        return Deadline(end, *times, n_saves=lambda: self._saves.n_at_end(self.step), calls=self._calls)

    def _begin(self) -> None:
        """Restore, and listen from now on."""
        self.restored_path = self._manager.begin_attempt()
        self._attempt.renew()
        self._steps = self._manager.checkpoint.count_steps()
        self._is_busy = self._is_done = self._is_polled = self._is_long_since = False
        self._countdown: Deadline | None = None
        self._is_counting_down = False
        self._agreement = Agreement(self._world, self.requested)
        self._polled_at = time.monotonic()
        self._step_at_poll = self.step
        self._saves.begin(self.step, is_restored=self.restored_path is not None)
        self._world.step_flags.attach(self)
        call_when_done(self._left)
        if self.deadline is not None:
            self._say(self.deadline.describe())

    @property
    def latest_path(self) -> str | None:
        """The path of the last checkpoint that was saved or restored."""
        return self._manager.latest_path

    def _say(self, text: str) -> None:
        if self._world.is_chief:
            log(text)

    # -- steps ----------------------------------------------------------------------------------------------------

    @property
    def total_run_calls(self) -> int:
        """Steps made so far, those of earlier attempts included; the name is TensorFlow's."""
        return self.step

    @property
    def step(self) -> int:
        """Steps made so far, what a checkpoint is named by: calls of `run` and `save_checkpoint_if_preempted`.

        Where the optimizer steps outside of them, its steps; calls in which it does not step are none from the first of
        these on, nor in later attempts.
        """
        return self._steps.value

    def run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return fn(*args, **kwargs): one step, or an evaluation, which is not stopped in its middle.

        Collective where a stop is obeyed, before the call: chief and workers.
        """
        if not self._is_polled:  # no batch was asked for since the last step
            self.poll()
        with self._steps.call(), self._busy():
            result = fn(*args, **kwargs)
        if self._steps.was_evaluation:  # with what came before it since the last poll
            self._calls.add(time.monotonic() - self._polled_at)
            self._is_long_since = self._world.step_flags.n_steps > 0  # numpy programs have no other calls
        self._is_polled = False
        return result

    def save_checkpoint_if_preempted(self, *args: Any, **kwargs: Any) -> None:
        """Count a step that was made, and act on a request to stop or save; for loops that do not use `run`.

        Collective: chief and workers.

        Args:
            args: for `save_fn` or, after the step, `manager.save`.
            kwargs: see args.
        """
        self._steps.count_reported(self._manager.saved_step)
        self.poll(*args, **kwargs)

    @contextlib.contextmanager
    def watch_preemption_scope(self) -> Iterator[None]:
        """Act on a request to stop or save at the end of the block too. Collective: chief and workers."""
        yield
        self.poll()

    def stop(self, reason: str = "stop()") -> None:
        """Ask all ranks to save and leave after this step. Not collective: one rank is enough; from any thread."""
        self._flag.ask(reason)

    @contextlib.contextmanager
    def _busy(self) -> Iterator[None]:
        """Let no loop inside the block stop."""
        was_busy, self._is_busy = self._is_busy, True
        try:
            yield
        finally:
            self._is_busy = was_busy

    # -- between steps --------------------------------------------------------------------------------------------

    def requested(self) -> Request:
        """Return what this rank wants all ranks to do after the step. Not collective."""
        if self._is_done:
            return Request.NONE
        wants_stop = self._is_end_near if self._is_counting_down else self._is_end_near or self._flag.reason is not None
        is_late = self._world.is_chief and (self._saves.is_late(self.step) or self._wants_measure)
        return (Request.STOP if wants_stop else Request.NONE) | (Request.SAVE if is_late else Request.NONE)

    @property
    def _is_end_near(self) -> bool:
        return any(deadline is not None and deadline.is_near for deadline in (self.deadline, self._countdown))

    @property
    def _wants_measure(self) -> bool:
        """Whether a save should be made to know what one costs before the deadline."""
        is_unmeasured = self.deadline is not None and self.deadline.wants_measure
        return is_unmeasured and self.step > self._manager.saved_step

    def poll(self, *args: Any, **kwargs: Any) -> None:
        """Act on a request to stop or save: the program is between two steps. For loops that nothing else polls in.

        Collective: chief and workers, equally often. Inside `run` it does nothing.

        Args:
            args: as of `save_checkpoint_if_preempted`.
            kwargs: see args.

        Cost: where gradients were summed since the last poll, none; else 8 bytes, every few polls.
        """
        if self._is_busy or self._is_done or threading.current_thread() is not threading.main_thread():
            return
        has_stepped = self._measure()
        self._is_polled = True
        heard = self._agreement.poll(at_once=self._is_long_since)
        self._is_long_since = False
        with self._giving_up():
            self._act(heard, has_stepped, functools.partial(self._save, *args, **kwargs))
        self._polled_at = time.monotonic()

    def _act(self, heard: Request, has_stepped: bool, save: Callable[..., None]) -> None:
        if Request.STOP in heard:
            self._obey(save)
        elif has_stepped:
            self._saves.note_saved()
            self._saves.check_and_copy(self.step)
            if Request.SAVE in heard or self._saves.is_due(self.step):
                save()

    @contextlib.contextmanager
    def _giving_up(self) -> Iterator[None]:
        """Note it in the run folder if ranks turn out to differ: exit codes are not enough."""
        try:
            yield
        except DesyncError as error:
            if error.is_agreed:
                self._is_done = True
                self._attempt.gave_up(error)
            raise

    def _measure(self) -> bool:
        """Return whether a step was made since the last poll; remember how long it took."""
        has_stepped, self._step_at_poll = self.step > self._step_at_poll, self.step
        if has_stepped:
            self._step_times.add(time.monotonic() - self._polled_at)
        return has_stepped

    def _save(self, *args: Any, is_last: bool = False, **kwargs: Any) -> None:
        with self._busy():
            self._saves.save(self.step, is_last, *args, **kwargs)

    # -- the end --------------------------------------------------------------------------------------------------

    def _obey(self, save: Callable[..., None]) -> None:
        self._agreement.require_same_step(self.step)
        is_end_near = self.deadline is not None and self.deadline.is_near
        reason = self._agreement.first_reason(self._flag.reason or ("deadline" if is_end_near else None)) or "deadline"
        is_urgent = self._agreement.any_rank(is_end_near)
        if self._config.grace_period and not self._is_counting_down and not is_urgent:
            self._say(f"{reason}: saves at step {self.step} and goes on for a part of {self._config.grace_period:g} s")
            save()
            self._count_down(self._config.grace_period)
            return
        if self.deadline is not None and not self.deadline.can_save:
            self._say("a save may not fit into the time that is left; what counts then is the last periodic one")
        self._is_done = True
        save(is_last=True)
        self._flag_down()
        code, why = self._attempt.stopped(reason, self._manager.saved_step)
        self._say(f"{reason}: stopped after step {self.step}, saved in {self._manager.directory}")
        if code is ExitCode.DO_NOT_REQUEUE:
            self._say(f"not to be run again: {why}; give it time for a save, or see to what takes so long")
        if self._config.exit_fn is not None:
            self._config.exit_fn()
        else:
            self._flag.ignore_signals()
            sys.exit(int(code))

    def _count_down(self, grace_s: float) -> None:
        self._is_counting_down = True
        if self._flag.since is not None:
            end = time.time() + grace_s - (time.monotonic() - self._flag.since)
            self._countdown = self._deadline_at(end)

    def _flag_down(self) -> None:
        """Remove the stop file: the next attempt shall run."""
        with self._world.agreed(self._world.role_comm):
            try:
                self._flag.remove_file()
            except OSError as error:
                raise CheckpointError(
                    f"stop: expected to remove {self._attempt.folder / 'stop'}, got {error.strerror}; remove it, or "
                    f"the next attempt stops at once."
                ) from None

    def _left(self) -> None:
        """Note that the program is finished: all ranks have left it with code 0, whoever used no `with`."""
        if self._is_done:  # noted, or stopped
            return
        try:
            self._attempt.left(self._manager.saved_step)
        except CheckpointError as error:
            log(str(error))

    def close(self) -> None:
        """Listen no more: give the signals back to who had them. Not collective."""
        self._flag.close()
        self._world.step_flags.detach(self)

    def __enter__(self) -> "PreemptionCheckpointHandler":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_done:  # signals that come now must not end a process that is leaving
            return
        try:
            if kind is None or (isinstance(error, SystemExit) and not error.code):
                self._is_done = True
                with self._giving_up(), self._busy():
                    self._saves.end(self.step)
                self._attempt.finished(self._manager.saved_step)
            elif isinstance(error, DesyncError) and error.is_agreed:
                self._is_done = True
                self._attempt.gave_up(error)
            elif not issubclass(kind, SystemExit):  # a program that goes on after an error is not finished
                call_when_done(None)
        finally:
            self.close()


def _manager_of(given: Any, directory: str | os.PathLike[str] | None) -> CheckpointManager:
    if isinstance(given, CheckpointManager):
        return given
    if not isinstance(given, Checkpoint) or directory is None:
        found = "no checkpoint_dir" if isinstance(given, Checkpoint) else type(given).__name__
        raise UsageError(
            f"PreemptionCheckpointHandler: expected a CheckpointManager, or a Checkpoint and a checkpoint_dir, got "
            f"{found}; give one of these."
        )
    return CheckpointManager(given, directory)

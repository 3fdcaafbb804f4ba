"""The verdict on a run: from the ledger to `decision.json`, by which the launcher acts.

| this attempt                                             | decision | exit code |
|----------------------------------------------------------|----------|-----------|
| has finished                                             | finished | 0         |
| found ranks that differ                                  | stop     | 76        |
| was refused: another model, a newer format               | stop     | 78        |
| was stopped by a person, for good                        | stop     | 76        |
| was stopped, third in a row without progress             | stop     | 76        |
| was stopped otherwise                                    | requeue  | 75        |
| would be the fourth in a row without progress            | stop     | 76        |
| fails or dies now, third in a row without progress       | stop     |           |
| fails or dies now otherwise                              | requeue  |           |

Progress is a checkpoint of a step beyond the highest that any attempt of the run has reached. Attempts without progress
count in a batch job only. Attempts do not count if the batch system ended them, if a person has removed `decision.json`
since, or if the program's file has changed since.
"""

import enum
import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcdist.checkpoint import durable
from hpcdist.errors import CheckpointError, ExitCode
from hpcdist.run.ledger import Attempt

#: Consecutive attempts without progress. The next one does not start.
MAX_WITHOUT_PROGRESS = 3


class Verdict(str, enum.Enum):
    """What the launcher must do. Stable: batch scripts rely on these words."""

    FINISHED = "finished"
    REQUEUE = "requeue"
    STOP = "stop"


@dataclass(frozen=True)
class Decision:
    """A verdict, its reason, and the exit code to leave with now; None to continue."""

    verdict: Verdict
    reason: str
    exit_code: ExitCode | None = None


def decide(attempts: Sequence[Attempt], is_counted: bool) -> Decision:
    """Return what the launcher must do after the last of these attempts, if it has ended or dies now.

    Args:
        attempts: the run's attempts, oldest first, this one included.
        is_counted: whether attempts without progress end the run.
    """
    this = attempts[-1]
    n_without_progress = len(without_progress(attempts)) if is_counted else 0
    if this.end == "finished":
        return Decision(Verdict.FINISHED, this.reason, ExitCode.DONE)
    if this.end == "diverged":
        return Decision(Verdict.STOP, this.reason, ExitCode.DO_NOT_REQUEUE)
    if this.end == "refused":
        return Decision(Verdict.STOP, this.reason, ExitCode.BAD_CONFIGURATION)
    if n_without_progress > MAX_WITHOUT_PROGRESS and not this.end:
        reason = f"{n_without_progress - 1} attempts in a row without progress"
        return Decision(Verdict.STOP, reason, ExitCode.DO_NOT_REQUEUE)
    if this.end == "stopped" and this.is_for_good:
        return Decision(Verdict.STOP, this.reason, ExitCode.DO_NOT_REQUEUE)
    is_stalled = n_without_progress >= MAX_WITHOUT_PROGRESS
    if this.end == "stopped" and is_stalled and not this.is_excused:
        reason = (
            f"{n_without_progress} attempts in a row made no progress; this one was stopped by "
            f"{this.reason}"
        )
        return Decision(Verdict.STOP, reason, ExitCode.DO_NOT_REQUEUE)
    if this.end == "stopped":
        return Decision(Verdict.REQUEUE, this.reason, ExitCode.RUN_AGAIN)
    if is_stalled:
        reason = f"attempt {n_without_progress} in a row that died without progress"
        return Decision(Verdict.STOP, reason)
    if this.end:  # failed
        return Decision(Verdict.REQUEUE, this.reason)
    if has_progress(this):
        return Decision(Verdict.REQUEUE, "died by a signal or an error, after a newer checkpoint")
    return Decision(Verdict.REQUEUE, "died by a signal or an error")


def without_progress(attempts: Sequence[Attempt]) -> list[Attempt]:
    """Return the attempts that count as a row without progress, newest first, the last of `attempts` included."""
    stalled_attempts: list[Attempt] = []
    started_attempts = [attempt for attempt in attempts if attempt.has_begun]
    with_successors = list(itertools.zip_longest(started_attempts, started_attempts[1:]))
    for attempt, successor in reversed(with_successors):
        if (
            attempt.program != started_attempts[-1].program
            or attempt.end == "finished"
            or has_progress(attempt, successor)
        ):
            break
        is_excused = attempt.is_excused or (successor is not None and successor.is_vouched)
        if not is_excused and attempt.end != "refused":
            stalled_attempts.append(attempt)
        if attempt.is_new_try:
            break
    return stalled_attempts


def has_progress(attempt: Attempt, successor: Attempt | None = None) -> bool:
    """Return whether an attempt made progress.

    Args:
        attempt: the attempt.
        successor: the next attempt, if any: it may have resumed from a copy in memory, which is progress too.
    """
    reached_step = attempt.committed_step
    if successor is not None and successor.resumed_step is not None:
        reached_step = max(reached_step, successor.resumed_step)
    began_at = attempt.base_step
    if attempt.resumed_step is not None:  # a copy in memory may be beyond the base
        began_at = max(began_at, attempt.resumed_step)
    return reached_step > began_at


def suspects(attempts: Sequence[Attempt]) -> dict[int, list[Attempt]]:
    """Return the steps that an attempt after these must not resume from, and the attempts that died on each.

    A step is suspect if two attempts died after they resumed from it and before they reached a save, in different
    jobs, or on nodes of which they share none: a sick node or a full memory is no fault of a checkpoint. Outside of
    batch jobs people start programs that fail, and nothing is suspect on the same nodes.
    """
    died: dict[int, list[Attempt]] = {}
    for attempt in without_progress(attempts):
        if not attempt.end and not attempt.has_saved and attempt.restored_step >= 0:
            died.setdefault(attempt.restored_step, []).append(attempt)
    suspects_by_step: dict[int, list[Attempt]] = {}
    for step, dead_attempts in died.items():
        pairs = itertools.combinations(dead_attempts, 2)
        if any(_differ(first, second) for first, second in pairs):
            suspects_by_step[step] = dead_attempts
    return suspects_by_step


def _differ(first: Attempt, second: Attempt) -> bool:
    """Return whether two attempts were of different jobs, or shared no node."""
    shared_nodes = set(first.nodes) & set(second.nodes)
    return first.job != second.job or not shared_nodes


class DecisionFile:
    """`decision.json` in a run folder, replaced atomically, for the launcher. Training only looks whether it is there.

    Args:
        folder: the run folder.
        disk: file system calls, which tests replace.
    """

    def __init__(self, folder: Path, disk: durable.Disk | None = None) -> None:
        self.path = folder / "decision.json"
        self._disk = disk or durable.Disk()

    def is_there(self) -> bool:
        """Return whether the file is there: a person may have removed it, to try again.

        Raises:
            CheckpointError: if the file system cannot tell.
        """
        try:
            return self.path.exists()
        except OSError as error:
            raise CheckpointError(
                f"decision: expected to look for {self.path}, got {error.strerror}; check the file system, run again."
            ) from None

    def write(self, decision: Decision, step: int | None, **facts: int | str | None) -> None:
        """Write a decision with the step of the last checkpoint.

        Raises:
            CheckpointError: if the file cannot be written.
        """
        content = {
            "decision": decision.verdict.value,
            "reason": decision.reason,
            "step": step,
            **facts,
        }
        content["time"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        text = json.dumps(content, indent=1) + "\n"
        try:
            durable.patiently(lambda: self._replace(text))
        except OSError as error:
            raise CheckpointError(
                f"decision: expected to write {self.path}, got {error.strerror}; free space or choose another run "
                f"folder. Checkpoints are untouched."
            ) from None

    def _replace(self, text: str) -> None:
        durable.sweep_temporary(self._disk, self.path.parent, f"{self.path.name}.")
        durable.replace_text(self._disk, self.path, text)

"""The launcher's next action after this attempt: requeue the job, stop, or nothing because it is finished.

Exit codes do not suffice: a killed job has none, and launchers report them differently. So at any time the file states
what to do if this attempt dies now.
"""

import enum
import json
import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcdist.checkpoint import durable
from hpcdist.errors import CheckpointError, ExitCode

logger = logging.getLogger("hpcdist")

#: Consecutive attempts that may end without a newer checkpoint. The next one does not start.
MAX_FRUITLESS = 3


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


def at_start(n_fruitless: int, has_earlier: bool) -> Decision:
    """Decide what follows if an attempt dies before its first checkpoint, and whether it may start.

    Args:
        n_fruitless: consecutive attempts without progress, this one included.
        has_earlier: whether an earlier decision exists. Removing the file permits another try.
    """
    if n_fruitless < MAX_FRUITLESS:
        return Decision(Verdict.REQUEUE, "died without notice")
    reason = f"attempt {n_fruitless} in a row that died without a newer checkpoint"
    if n_fruitless == MAX_FRUITLESS or not has_earlier:
        return Decision(Verdict.STOP, reason)
    return Decision(Verdict.STOP, f"{n_fruitless - 1} attempts in a row died", ExitCode.DO_NOT_REQUEUE)


def at_first_commit() -> Decision:
    """Decide what follows if an attempt dies after its first checkpoint: it has made progress."""
    return Decision(Verdict.REQUEUE, "died without notice, after a newer checkpoint")


def at_stop(reason: str, n_idle: int) -> Decision:
    """Decide what follows an attempt that was asked to stop.

    Args:
        reason: source of the stop request.
        n_idle: consecutive attempts, this one included, that were stopped without a newer checkpoint; 0 if this one
            has a newer checkpoint.
    """
    if n_idle >= MAX_FRUITLESS:
        reason = f"{n_idle} attempts in a row were stopped without a newer checkpoint, this one by {reason}"
        return Decision(Verdict.STOP, reason, ExitCode.DO_NOT_REQUEUE)
    return Decision(Verdict.REQUEUE, reason, ExitCode.RUN_AGAIN)


def at_desync(reason: str) -> Decision:
    """Decide what follows if ranks differ: stop, as another attempt might differ again unnoticed."""
    return Decision(Verdict.STOP, reason, ExitCode.DO_NOT_REQUEUE)


def at_end() -> Decision:
    """Decide what follows the program's end."""
    return Decision(Verdict.FINISHED, "the program has finished", ExitCode.DONE)


class DecisionFile:
    """`decision.json` in a run folder, replaced atomically.

    Args:
        folder: the run folder.
        disk: file system calls, which tests replace.
    """

    def __init__(self, folder: Path, disk: durable.Disk | None = None) -> None:
        self.path = folder / "decision.json"
        self._disk = disk or durable.Disk()

    def read(self) -> dict[str, Any] | None:
        """Return the last content; None if the file is missing or unreadable."""
        try:
            content = json.loads(self.path.read_text())
            if not _is_decision(content):
                raise ValueError("expected the record of an attempt")
            return dict(content)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:
            logger.warning("decision: %s is not used: %s", self.path, error)
            return None

    def write(self, decision: Decision, step: int | None, **facts: int | str | None) -> None:
        """Write a decision with the step of the last checkpoint.

        Raises:
            CheckpointError: if the file cannot be written.
        """
        content = {"decision": decision.verdict.value, "reason": decision.reason, "step": step, **facts}
        content["time"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        try:
            durable.sweep_temporary(self._disk, self.path.parent, f"{self.path.name}.")
            durable.replace_text(self._disk, self.path, json.dumps(content, indent=1) + "\n")
        except OSError as error:
            raise CheckpointError(
                f"decision: expected to write {self.path}, got {error.strerror}; free space or choose another run "
                f"folder. Checkpoints are untouched."
            ) from None


def _is_decision(content: Any) -> bool:
    """Return whether the fields that the next attempt reads are valid: the file may have been edited."""
    return (
        isinstance(content, dict)
        and isinstance(content.get("step"), int | None)
        and isinstance(content.get("idle_stops", 0), int)
    )

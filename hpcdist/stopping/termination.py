"""TerminationConfig: how a program chooses to end."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class TerminationConfig:
    """How a job detects its end, and how it exits.

    >>> config = hpcdist.TerminationConfig(grace_period=60)
    >>> handler = hpcdist.PreemptionCheckpointHandler(None, checkpoint, "runs/a/checkpoints", config)

    Attributes:
        termination_watcher_fn: returns whether the job is about to be ended; called at most once a second on each
            rank, between steps and while gradients are summed; it must not block. Signals, stop file and deadline
            stay in effect.
        exit_fn: called on all ranks after the last save; default: `sys.exit` with 75, "run me again",
            or 76, "do not".
        grace_period: seconds from the stop request to the end. The job saves at once, keeps training, and saves again
            shortly before the end. Default: stop at once.
        save_fn: saves in place of `manager.save(step)`; called on all ranks. Progress is then unknown: the job is
            requeued however many attempts have ended, and never exits with 76 for lack of progress.
    """

    termination_watcher_fn: Callable[[], Any] | None = None
    exit_fn: Callable[[], Any] | None = None
    grace_period: float | None = None
    save_fn: Callable[..., Any] | None = None

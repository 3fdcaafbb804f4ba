"""TerminationConfig: what a program may choose about its end."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class TerminationConfig:
    """How a job learns of its end, and how it leaves.

    Attributes:
        termination_watcher_fn: returns whether the job is about to be ended; called at most once a second, on each
            rank, between steps and while gradients are summed; it must not block. Signals, stop file and deadline are
            obeyed too.
        exit_fn: called on every rank after the last save; default: `sys.exit(75)`, "saved, run me again".
        grace_period: seconds from the request to the end. With it a save is made at once, training goes on, and another
            is made shortly before the end. Default: stop at once.
        save_fn: makes the saves in place of `manager.save(step)`; called on all ranks. Whether an attempt came
            further is not known then: it is run again however many ended before, and never ends with 76 for that.
    """

    termination_watcher_fn: Callable[[], Any] | None = None
    exit_fn: Callable[[], Any] | None = None
    grace_period: float | None = None
    save_fn: Callable[..., Any] | None = None

"""The ledger: what every attempt of a run did, one file per attempt, from which `decision.py` decides what comes next.

An attempt appends to its own file only, one line of JSON per event. The store itself notes saves and commits.

    begin     with job, nodes, program, base (the highest step that earlier attempts reached), is_new_try, is_vouched
    new try   a person wants another try: the same as is_new_try
    restore   step: the checkpoint it is about to read, which may kill it
    resume    step: the step it resumed from; is_base
    save      it reached its first save, so the checkpoint it restored can be trained on
    commit    step: a checkpoint is durable and was read back
    end       how (finished, stopped, failed, refused, diverged), reason, is_excused, is_for_good

Lines that are torn or that are no events are ignored: a crash may leave them.
"""

import functools
import json
import platform
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import xxhash

from hpcdist.checkpoint import durable
from hpcdist.checkpoint.event_lines import FollowedFile
from hpcdist.checkpoint.store import Store
from hpcdist.cluster.environment import is_after_preemption, job_id, read_environment
from hpcdist.cluster.slurm import node_names
from hpcdist.forks import make_lock
from hpcdist.run.stop_request import StopRequest

#: Reason of an attempt that came to its end.
PROGRAM_HAS_FINISHED = "the program has finished"
#: Number of attempts that are read: each line "begin" carries over the progress of earlier attempts.
_N_READ = 16


@dataclass(frozen=True)
class Attempt:
    """One attempt, as recorded in its ledger.

    Attributes:
        number: number of the attempt, from 1; 0 of one that has not begun.
        job: id of the batch job; None outside of one.
        nodes: names of the nodes.
        program: digest of the program's file; None if unknown.
        base_step: progress is a step beyond this one; -1 in a new run.
        is_new_try: whether a person asked to try again, so that earlier attempts do not count.
        is_vouched: whether the batch system ended the attempt before, so that the earlier attempt does not count.
        has_begun: whether the first event is known.
        restored_step: the step that was read or was about to be read; -1 for none.
        resumed_step: the step that the attempt resumed from; None for a new run, or if the attempt died before.
        has_saved: whether the attempt reached a save, successful or not.
        committed_step: the highest step of the checkpoints that were read back; -1 for none.
        end: the way it ended: finished, stopped, failed, refused, diverged; empty if it died, or still runs.
        reason: why it ended.
        is_excused: whether the batch system ended it, so that it does not count as an attempt without progress.
        is_for_good: whether a person stopped it, and the job is not to be run again.
    """

    number: int
    job: str | None = None
    nodes: tuple[str, ...] = ()
    program: str | None = None
    base_step: int = -1
    is_new_try: bool = False
    is_vouched: bool = False
    has_begun: bool = False
    restored_step: int = -1
    resumed_step: int | None = None
    has_saved: bool = False
    committed_step: int = -1
    end: str = ""
    reason: str = ""
    is_excused: bool = False
    is_for_good: bool = False

    @property
    def reached_step(self) -> int:
        """The highest step that this attempt or an earlier one is known to have reached."""
        resumed_step = -1 if self.resumed_step is None else self.resumed_step
        return max(self.base_step, self.committed_step, resumed_step)


@dataclass(frozen=True)
class Launch:
    """Facts of a launch of the program; `Attempt` explains the names."""

    job: str | None
    nodes: tuple[str, ...]
    program: str | None
    is_vouched: bool

    @classmethod
    def of_this_process(cls) -> "Launch":
        """Return the launch of this process. Cost: reads the program's file."""
        environ = read_environment()
        nodes = node_names(environ) or (platform.node(),)
        return cls(job_id(environ), nodes, _digest_of_program(), is_after_preemption(environ))

    def attempt(self, number: int, **more: Any) -> Attempt:
        """Return the attempt of this launch, as it begins."""
        return Attempt(number, has_begun=True, **vars(self), **more)


def _digest_of_program() -> str | None:
    try:
        return xxhash.xxh3_64_hexdigest(Path(sys.argv[0]).read_bytes())
    except (OSError, ValueError, IndexError):  # as in an interactive session
        return None


def parse_attempt(number: int, lines: Iterable[str]) -> Attempt:
    """Return the attempt that the lines of a ledger describe. Ignores lines that are no events."""
    return after_lines(Attempt(number), lines)


def after_lines(attempt: Attempt, lines: Iterable[str]) -> Attempt:
    """Return an attempt after more lines of its ledger."""
    for line in lines:
        try:
            record = json.loads(line)
            attempt = _after(attempt, str(record["event"]), record)
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
    return attempt


def _after(attempt: Attempt, event: str, record: dict[str, Any]) -> Attempt:
    """Return an attempt after another event of its ledger."""
    if event == "begin":
        return replace(
            attempt,
            has_begun=True,
            job=_text_or_none(record["job"]),
            nodes=tuple(map(str, record["nodes"])),
            program=_text_or_none(record["program"]),
            base_step=_step(record["base"]),
            is_new_try=bool(record["is_new_try"]),
            is_vouched=bool(record["is_vouched"]),
        )
    if event == "new try":
        return replace(attempt, is_new_try=True)
    if event == "restore":
        return replace(attempt, restored_step=_step(record["step"]))
    if event == "resume":
        step = _step(record["step"])
        base = step if record.get("is_base") else attempt.base_step
        return replace(attempt, restored_step=step, resumed_step=step, base_step=base)
    if event == "save":
        return replace(attempt, has_saved=True)
    if event == "commit":
        return replace(attempt, committed_step=max(attempt.committed_step, _step(record["step"])))
    if event == "end":
        return replace(
            attempt,
            end=str(record["how"]),
            reason=str(record["reason"]),
            is_excused=bool(record.get("is_excused")),
            is_for_good=bool(record.get("is_for_good")),
        )
    return attempt


def _text_or_none(value: Any) -> str | None:
    if value is None:
        return None
    return str(value)


def _step(value: Any) -> int:
    if type(value) is not int or not -1 <= value < 1 << 63:
        raise TypeError(f"{value!r} is no step")
    return value


class Ledger:
    """The ledger of a folder of checkpoints, for the attempt that writes there. Not collective: chief only.

    Args:
        store: the folder.

    All methods raise:
        CheckpointError: if the folder cannot be read or written.
        AttemptReplaced: from the methods that write, if a later attempt has begun.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._followed: dict[int, FollowedFile] = {}
        self._attempts: dict[int, Attempt] = {}
        self._reading = make_lock()  # the saver's thread reads too

    def refresh(self) -> None:
        """Let the next call of `attempts` find attempts of other nodes, whatever this node has listed before."""
        self._store.refresh_listings()

    def attempts(self) -> list[Attempt]:
        """Return the latest attempts, oldest first; this one, if it has begun, comes last.

        Cost: the first call reads their ledgers, later calls the lines that have been appended.
        """
        with self._reading:
            numbers = self._store.latest_attempts(_N_READ)
            for number in set(self._followed) - set(numbers):
                del self._followed[number]
            attempts = []
            with self._store.explained("restore", "a folder that can be read"):
                for number in numbers:
                    follow = functools.partial(self._follow, number)
                    attempts.append(durable.patiently(follow))
            return attempts

    def _follow(self, number: int) -> Attempt:
        """Return an attempt, after reading the lines that have been appended to its ledger."""
        followed = self._followed.pop(number, None)  # if reading fails, the next call begins anew
        if followed is None:
            followed = FollowedFile(self._store.ledger_of(number))
        is_other, lines = followed.new_lines()
        attempt = Attempt(number) if is_other else self._attempts[number]
        self._attempts[number] = after_lines(attempt, lines)
        self._followed[number] = followed
        return self._attempts[number]

    def begin(self, launch: Launch, is_new_try: bool = False) -> None:
        """Begin this attempt: take the next number.

        Args:
            launch: facts of the launch of this process.
            is_new_try: whether a person asked to try again, so that earlier attempts do not count.
        """
        self._store.begin()  # which also makes the listing fresh
        self._store.shorten_ledgers(_N_READ)
        earlier = [attempt for attempt in self.attempts() if attempt.has_begun]
        base = earlier[-1].reached_step if earlier else -1
        self._store.note(
            "begin", base=base, is_new_try=is_new_try, time_s=time.time(), **vars(launch)
        )

    def try_again(self) -> None:
        """Record that a person wants another try, after this attempt has begun."""
        self._store.note("new try")

    def restore(self, step: int) -> None:
        """Record the step of the checkpoint that is about to be read, as reading may kill this process."""
        self._store.note("restore", step=step)

    def resume(self, step: int, is_base: bool = False) -> None:
        """Record the step that this attempt resumes from.

        Args:
            step: the step.
            is_base: a person chose this step: progress counts from there, whatever earlier attempts reached.
        """
        self._store.note("resume", step=step, is_base=is_base, time_s=time.time())

    def end(
        self, how: str, reason: str = "", is_excused: bool = False, is_for_good: bool = False
    ) -> None:
        """Record how this attempt ends; see `Attempt`."""
        self._store.note(
            "end",
            how=how,
            reason=reason,
            is_excused=is_excused,
            is_for_good=is_for_good,
            time_s=time.time(),
        )

    def end_stopped(self, request: StopRequest, is_excused: bool) -> None:
        """Record that this attempt ends on a stop request; see `Attempt`."""
        self.end("stopped", request.reason, is_excused, request.is_for_good)

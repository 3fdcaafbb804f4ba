"""Where the time of the steps of this rank goes: sums over windows, and single steps, in RUN_DIR/trace.

The handler reports when a step is done, and `runtime/time_spent.py` has the waits; the rest of a step is computation,
and whatever else the program does by itself. Windows get longer as the attempt does, and single steps rarer, so the
file of a day is hardly larger than that of an hour.
"""

import atexit
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hpcdist.cluster.environment import read_environment, trace_mode
from hpcdist.run.trace_file import TraceFile
from hpcdist.runtime.mpi import MPI
from hpcdist.runtime.processes import process_began
from hpcdist.runtime.time_spent import Span, TimeSpent, time_spent
from hpcdist.runtime.world import World

#: Least length of a window, in seconds and as a part of the attempt so far.
WINDOW_S = 1.0
WINDOW_SHARE = 0.001
#: Least time between two lines of the log about the pace, in seconds and as a part of the attempt so far.
REPORT_S = 60.0
REPORT_SHARE = 0.01
_WAITS = ("input_s", "communication_s", "save_s", "between_s")
#: Number of first steps of which each is recorded.
N_FIRST = 32
#: Writes a second of all ranks together, roughly: a file server has other work too.
WRITES_PER_S = 20
#: A poll that takes less has done nothing.
_NOTHING_S = 2e-5
#: Longest wait at the exit for records that are not written yet.
_EXIT_S = 2.0


def is_recorded(n_before: int) -> bool:
    """Return whether a step is recorded by itself: equal on all ranks, and true of fewer and fewer steps.

    The first 32 steps are; from then on two in a row at 16 places between each power of two and the next.

    Args:
        n_before: number of earlier polls of this attempt that came after a step.
    """
    return n_before < N_FIRST or n_before % (1 << (n_before.bit_length() - 5)) < 2


class Window:
    """Sums over the steps since the last window ended.

    Waits are those of the process while the window lasts, without waits between steps.

    Args:
        began_s: time at which the window begins, by time.monotonic.
        spent: the waits of this process.

    Attributes:
        began_s: time at which the window begins, by time.monotonic.
    """

    def __init__(self, began_s: float, spent: TimeSpent) -> None:
        self.began_s = began_s
        self._first: int | None = None
        self._last = 0
        self._n_steps = 0
        self._longest_step = 0
        self._stalest = 0
        self._step_s = 0.0
        self._between_s = 0.0
        self._longest_s = 0.0
        self._other_input_s = 0.0
        self._other_communication_s = 0.0
        self._other_rows = 0
        self._before = spent.input_s, spent.communication_s, spent.save_s, spent.rows, spent.stale

    def add_steps(self, step: int, n_steps: int, length_s: float, stale: int) -> None:
        """Add the `n_steps` steps up to `step`.

        Args:
            step: number of the last step.
            n_steps: number of steps.
            length_s: seconds that the steps took together, without saves.
            stale: number of pushes of other workers that the pushes of these steps had not seen.
        """
        if self._first is None:
            self._first = step - n_steps + 1
        self._last = step
        self._n_steps += n_steps
        self._step_s += length_s
        if length_s > n_steps * self._longest_s:
            self._longest_s = length_s / n_steps
            self._longest_step = step
        if stale > self._stalest:
            self._stalest = stale

    def add_between(
        self, length_s: float, input_s: float, communication_s: float, rows: int
    ) -> None:
        """Add time between steps, without saves, with the waits and the rows read in this time."""
        self._between_s += length_s
        self._other_input_s += input_s
        self._other_communication_s += communication_s
        self._other_rows += rows

    def facts(self, ended_s: float, spent: TimeSpent) -> dict[str, Any]:
        """Return the sums, in seconds.

        Args:
            ended_s: time at which the window ends, by time.monotonic.
            spent: the waits of this process.
        """
        input_s, communication_s, save_s, rows, stale = self._before
        step_input_s = spent.input_s - input_s - self._other_input_s
        step_communication_s = spent.communication_s - communication_s - self._other_communication_s
        return {
            "window": [_short(self.began_s), _short(ended_s)],
            "steps": None if self._first is None else [self._first, self._last],
            "n_steps": self._n_steps,
            "step_s": _short(self._step_s),
            "input_s": _short(step_input_s),
            "communication_s": _short(max(0.0, step_communication_s)),
            "save_s": _short(spent.save_s - save_s),
            "between_s": _short(self._between_s),
            "longest": [self._longest_step, _short(self._longest_s)],
            "rows": spent.rows - rows - self._other_rows,
            "stale": [spent.stale - stale, self._stalest],
        }


def pace_of(windows: Sequence[dict[str, Any]]) -> str:
    """Return where the time of some windows went, such as `3.1 ms a step; of the time: input 2 %, ...`."""
    totals: dict[str, Any] = {}
    for key in ("n_steps", "step_s", "rows", *_WAITS):
        totals[key] = sum(window[key] for window in windows)
    began_s, _ = windows[0]["window"]
    _, ended_s = windows[-1]["window"]
    length_s = ended_s - began_s
    shares = []
    for key in _WAITS:
        percent = 100 * totals[key] / length_s
        shares.append(f"{key.removesuffix('_s')} {percent:.0f} %")
    step = "no step"
    if totals["n_steps"]:
        step_ms = 1e3 * totals["step_s"] / totals["n_steps"]
        step = f"{step_ms:.3g} ms a step"
    pace = f"{step}; of the time: {', '.join(shares)}"
    if totals["rows"]:
        pace += f"; {totals['rows'] / length_s:.3g} rows/s"
    return pace


class StepTimes:
    """Records the times of the steps of this rank, from one poll of the handler to the next.

    Not collective.

    Args:
        file: takes the records.
        header: the first record.
        step: steps so far, earlier attempts included.
        records_all: whether each step is recorded by itself.
        spent: the waits of this process.
        clock: monotonic seconds.

    Cost: with the waits 1.6 microseconds a step in a loop without other work, and 29 for a step that is recorded by
        itself; a training step of 1 ms took 0.6 to 1.2 % longer (2 ranks, three launches, one core each of an AMD Zen
        5).
    """

    def __init__(
        self,
        file: TraceFile,
        header: dict[str, Any],
        step: int,
        records_all: bool = False,
        spent: TimeSpent = time_spent,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._file = file
        self._spent = spent
        self._clock = clock
        self._records_all = records_all
        self._step = step
        self._n_polls = 0
        self._began_s = clock()
        self._left_s = self._began_s
        self._window = Window(self._began_s, spent)
        self._due_s = self._began_s + WINDOW_S
        self._input_s = spent.input_s
        self._communication_s = spent.communication_s
        self._save_s = spent.save_s
        self._rows = spent.rows
        self._stale = spent.stale
        self._unreported: list[dict[str, Any]] = []
        self._is_ended = False
        file.add(header)
        atexit.register(self.end)

    def arrive(self, step: int) -> None:
        """Record that the program is between two steps, with `step` done."""
        now = self._clock()
        spent = self._spent
        save_s = spent.save_s
        communication_s = spent.communication_s
        length_s = now - self._left_s - (save_s - self._save_s)
        if step > self._step:
            self._window.add_steps(step, step - self._step, length_s, spent.stale - self._stale)
            if self._records_all or is_recorded(self._n_polls):
                self._record_step(step, now)
            self._n_polls += 1
        else:
            waited_s = communication_s - self._communication_s
            self._window.add_between(
                length_s, spent.input_s - self._input_s, waited_s, spent.rows - self._rows
            )
        self._step = step
        self._left_s = now
        self._save_s = save_s
        self._communication_s = communication_s
        self._input_s = spent.input_s
        self._rows = spent.rows
        self._stale = spent.stale

    def leave(self) -> str | None:
        """Record that the program resumes: the time since `arrive` was a save, or time between steps.

        Returns:
            Where the time went, as a text for the log: at most once a minute, otherwise None.
        """
        now = self._clock()
        # as at almost every step: a part of the next one
        if now - self._left_s < _NOTHING_S and now < self._due_s:
            return None
        spent = self._spent
        length_s = now - self._left_s - (spent.save_s - self._save_s)
        self._window.add_between(length_s, 0.0, spent.communication_s - self._communication_s, 0)
        self._left_s = now
        self._save_s = spent.save_s
        self._communication_s = spent.communication_s
        if now < self._due_s:
            return None
        self._close(now)
        elapsed_s = now - self._began_s
        unreported_s = now - self._unreported[0]["window"][0]
        if unreported_s < max(REPORT_S, REPORT_SHARE * elapsed_s):
            return None
        text = pace_of(self._unreported)
        self._unreported = []
        return text

    def _close(self, now: float) -> None:
        facts = self._window.facts(now, self._spent)
        self._file.add(facts)
        self._unreported.append(facts)
        self._window = Window(now, self._spent)
        self._due_s = now + max(WINDOW_S, WINDOW_SHARE * (now - self._began_s))

    def _record_step(self, step: int, now: float) -> None:
        spans, background = self._spent.spans_since(self._left_s)
        record = {
            "step": step,
            "time": [_short(self._left_s), _short(now)],
            "spans": [_record_of(span) for span in spans],
        }
        if background:
            record["background"] = [_record_of(span) for span in background]
        self._file.add(record)

    def end(self) -> None:
        """Write the records that wait, for at most some seconds; also called when the program ends."""
        if self._is_ended:
            return
        self._is_ended = True
        atexit.unregister(self.end)
        self.arrive(self._step)
        self._close(self._clock())
        self._file.flush(_EXIT_S)


def begin_step_times(world: World, run_folder: Path, attempt: int, step: int) -> StepTimes | None:
    """Begin to record the steps of an attempt on this rank; None if HPCDIST_TRACE is off, and on evaluators.

    Collective over the ranks of the role.

    Args:
        world: the ranks.
        run_folder: the run folder.
        attempt: number of the attempt, on the chief; 0 on other ranks.
        step: steps so far.
    """
    number = world.all_reduce_int(attempt, MPI.MAX, world.role_comm)
    mode = trace_mode(read_environment())
    if mode == "off" or world.task.type not in ("chief", "worker"):
        return None
    path = trace_folder(run_folder, number) / f"rank-{world.rank:05d}.jsonl"
    every_s = max(WINDOW_S, world.role_comm.size / WRITES_PER_S)
    file = TraceFile(path, every_s, first_s=world.role_comm.rank / WRITES_PER_S)
    header = {
        "attempt": number,
        "rank": world.rank,
        "size": world.size,
        "role": f"{world.task.type}:{world.task.index}",
        "host": MPI.Get_processor_name(),
        "clock": [time.monotonic(), time.time()],
        "process_began": round(process_began(), 3),
        "step": step,
    }
    return StepTimes(file, header, step, records_all=mode == "all")


def trace_folder(run_folder: Path, attempt: int) -> Path:
    """Return where the ranks of an attempt record their steps."""
    return run_folder / "trace" / f"{attempt:04d}"


def _short(seconds: float) -> float:
    """Return seconds to the microsecond: records are many."""
    return round(seconds, 6)


def _record_of(span: Span) -> list[Any]:
    return [span.kind, span.name, _short(span.began_s), _short(span.ended_s)]

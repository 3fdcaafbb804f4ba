"""What a run has recorded: attempts, metrics, and where the time of each rank's steps went.

Records that are torn, as by a kill, are left out.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcdist.errors import UsageError

#: Where the time of a step goes, in the order of pictures.
PARTS = ("compute", "input", "communication", "save", "between")


@dataclass(frozen=True)
class Window:
    """Sums over some steps of a rank, in seconds; times are since 1970. `steps` is None where none was made."""

    began: float
    ended: float
    steps: tuple[int, int] | None
    n_steps: int
    rows: int
    longest: tuple[int, float]
    seconds: dict[str, float]

    @property
    def step_s(self) -> float:
        """Seconds in steps."""
        return self.seconds["compute"] + self.seconds["input"] + self.seconds["communication"]


@dataclass(frozen=True)
class RankRecords:
    """What one rank has recorded of one attempt.

    Attributes:
        rank, role, host: who it is.
        process_began: when its process was started, in seconds since 1970.
        clock: a time by its monotonic clock, and the same time in seconds since 1970.
        windows: in the order of time.
        steps: records of single steps, with times of the monotonic clock: {"step", "time", "spans", "background"}.
    """

    rank: int
    role: str
    host: str
    process_began: float
    clock: tuple[float, float]
    windows: tuple[Window, ...]
    steps: tuple[dict[str, Any], ...]

    @property
    def total(self) -> dict[str, float]:
        """Seconds of each part."""
        return {part: sum(one.seconds[part] for one in self.windows) for part in PARTS}

    @property
    def n_steps(self) -> int:
        """Steps in the windows."""
        return sum(one.n_steps for one in self.windows)


@dataclass(frozen=True)
class AttemptRecords:
    """One attempt: what its ledger says, and its ranks' records.

    Attributes:
        number: of it.
        events: of the ledger, each {"event": ..., ...}.
        ranks: those with records, by number; the chief's is the first.
    """

    number: int
    events: tuple[dict[str, Any], ...]
    ranks: tuple[RankRecords, ...]

    def last(self, event: str) -> dict[str, Any] | None:
        """Return the last event of a kind."""
        return next((one for one in reversed(self.events) if one["event"] == event), None)

    @property
    def commits(self) -> list[dict[str, Any]]:
        """Checkpoints: {"step", "nbytes", "took_s", "time_s"}."""
        return [one for one in self.events if one["event"] == "commit" and "nbytes" in one]

    @property
    def resumed_step(self) -> int:
        """The step that it resumed from; 0 for a new run."""
        said = self.last("resume")
        return int(said["step"]) if said else 0

    @property
    def began(self) -> float | None:
        """When its first process was started, as far as is known."""
        said = self.last("begin") or {}
        return min([rank.process_began for rank in self.ranks], default=said.get("time_s"))

    @property
    def ended(self) -> float | None:
        """When it did the last thing that is known."""
        known = [rank.windows[-1].ended for rank in self.ranks if rank.windows]
        known += [one["time_s"] for one in self.events if "time_s" in one]
        return max(known, default=None)


@dataclass(frozen=True)
class Run:
    """All that is recorded of a run."""

    folder: Path
    attempts: tuple[AttemptRecords, ...]
    metrics: tuple[dict[str, Any], ...]
    config: dict[str, Any]
    decision: dict[str, Any]


# -- reading -----------------------------------------------------------------------------------------------------------


def read_run(folder: Path) -> Run:
    """Return what a run folder holds. Reads only.

    Raises:
        UsageError: for a folder that is none of a run.
    """
    ledgers = {
        int(path.stem): path for path in (folder / "checkpoints" / "attempts").glob("*.jsonl") if path.stem.isdecimal()
    }
    traces = {int(path.name): path for path in (folder / "trace").glob("*") if path.name.isdecimal()}
    if not ledgers and not traces:
        raise UsageError(
            f"hpcdist: expected the folder of a run, with checkpoints/attempts or trace, got {str(folder)!r}; correct "
            f"it."
        )
    attempts = []
    for number in sorted({*ledgers, *traces}):
        events = tuple(one for one in _records(ledgers.get(number)) if isinstance(one.get("event"), str))
        ranks = [_rank_of(path) for path in sorted(traces[number].glob("rank-*.jsonl"))] if number in traces else []
        attempts.append(AttemptRecords(number, events, tuple(one for one in ranks if one is not None)))
    metrics = tuple(one for one in _records(folder / "metrics.jsonl") if type(one.get("step")) is int)
    return Run(folder, tuple(attempts), metrics, _content(folder / "config.json"), _content(folder / "decision.json"))


def _numbered(folder: Path, pattern: str) -> dict[int, Path]:
    return {int(path.stem): path for path in folder.glob(pattern) if path.stem.isdecimal()}


def _records(path: Path | None) -> list[dict[str, Any]]:
    """Return the records of a file of JSON lines, without those that are torn; none of one that is not there."""
    if path is None or not path.is_file():
        return []
    found = []
    with open(path, errors="replace") as file:
        for line in file:
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(record, dict):
                found.append(record)
    return found


def _content(path: Path) -> dict[str, Any]:
    """Return the object in a file of JSON; an empty one where there is none."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _rank_of(path: Path) -> RankRecords | None:
    """Return a rank's records; None where the first one is torn."""
    records = _records(path)
    try:
        header = records[0]
        monotonic, unix = (float(one) for one in header["clock"])
        windows = tuple(_window_of(one, unix - monotonic) for one in records if "window" in one)
        steps = tuple(one for one in records[1:] if "spans" in one and "time" in one)
        who = int(header["rank"]), str(header["role"]), str(header["host"])
        return RankRecords(*who, float(header["process_began"]), (monotonic, unix), windows, steps)
    except (IndexError, KeyError, TypeError, ValueError):
        return None


def _window_of(record: dict[str, Any], to_unix: float) -> Window:
    began, ended = (float(one) + to_unix for one in record["window"])
    seconds = {part: float(record[f"{part}_s"]) for part in PARTS if part != "compute"}
    seconds["compute"] = max(0.0, float(record["step_s"]) - seconds["input"] - seconds["communication"])
    steps = None if record["steps"] is None else (int(record["steps"][0]), int(record["steps"][1]))
    longest = int(record["longest"][0]), float(record["longest"][1])
    return Window(began, ended, steps, int(record["n_steps"]), int(record["rows"]), longest, seconds)

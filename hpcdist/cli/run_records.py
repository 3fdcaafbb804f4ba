"""What a run has recorded: attempts, metrics, and where the time of each rank's steps went.

What is torn, as by a kill, or is not what hpcdist writes, is left out: a run folder may hold anything.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from hpcdist.checkpoint.read import read_text
from hpcdist.errors import UsageError

#: Where the time of a step goes, in the order of pictures.
PARTS = ("compute", "input", "communication", "save", "between")
#: Values beyond this cannot be drawn, and times and steps beyond it are none.
_LARGEST = 1e100
_LARGEST_TIME_S = 1e11
_LARGEST_STEP = 1 << 53
#: Longest file of one object that is read.
_MAX_CONTENT_BYTES = 16 << 20
_Record = TypeVar("_Record")


@dataclass(frozen=True)
class Window:
    """Sums over some steps of a rank, in seconds; times are since 1970.

    Attributes:
        steps: the first and the last; None where none was made.
        longest: a step, and its seconds.
        seconds: by part.
        stale: how many pushes of other workers parameter servers had applied that this one had not seen at its own: the
            sum over its steps, and the most.
    """

    began: float
    ended: float
    steps: tuple[int, int] | None
    n_steps: int
    rows: int
    longest: tuple[int, float]
    seconds: dict[str, float]
    stale: tuple[int, int] = (0, 0)

    @property
    def step_s(self) -> float:
        """Seconds in steps."""
        return self.seconds["compute"] + self.seconds["input"] + self.seconds["communication"]


@dataclass(frozen=True)
class StepRecord:
    """One step of a rank, with its waits as (kind, name, began, ended); times are of its monotonic clock."""

    step: int
    began: float
    ended: float
    spans: tuple[tuple[str, str, float, float], ...]
    background: tuple[tuple[str, str, float, float], ...] = ()


@dataclass(frozen=True)
class RankRecords:
    """What one rank has recorded of one attempt.

    Attributes:
        rank, role, host: who it is.
        process_began: when its process was started, in seconds since 1970.
        clock: a time by its monotonic clock, and the same time in seconds since 1970.
        first_step: steps before the attempt.
        windows: in the order of time.
        steps: those that were recorded by themselves, if they were asked for.
    """

    rank: int
    role: str
    host: str
    process_began: float
    clock: tuple[float, float]
    first_step: int = 0
    windows: tuple[Window, ...] = ()
    steps: tuple[StepRecord, ...] = ()

    @property
    def total(self) -> dict[str, float]:
        """Seconds of each part."""
        return {part: sum(window.seconds[part] for window in self.windows) for part in PARTS}

    @property
    def n_steps(self) -> int:
        """Steps in the windows."""
        return sum(window.n_steps for window in self.windows)


@dataclass(frozen=True)
class Commit:
    """A checkpoint: its step, bytes, the seconds that it took, and when it was complete, in seconds since 1970."""

    step: int
    nbytes: int
    took_s: float
    time_s: float


@dataclass(frozen=True)
class AttemptRecords:
    """One attempt: what its ledger says, and its ranks' records.

    Attributes:
        number: of it.
        times: of events in its ledger, in seconds since 1970.
        job, nodes: where it ran, as far as is known.
        resumed_step: the step that it resumed from, by its ledger; None for none.
        commits: its checkpoints.
        end: how and why it ended; empty if that is not known.
        ranks: those with records, by number.
    """

    number: int
    times: tuple[float, ...] = ()
    job: str = ""
    nodes: tuple[str, ...] = ()
    resumed_step: int | None = None
    commits: tuple[Commit, ...] = ()
    end: str = ""
    ranks: tuple[RankRecords, ...] = ()

    @property
    def chief(self) -> RankRecords | None:
        """The records of the chief: of the rank of that role, or else of the first one."""
        chiefs = [rank for rank in self.ranks if rank.role.startswith("chief")]
        return next(iter([*chiefs, *self.ranks]), None)

    @property
    def first_step(self) -> int | None:
        """Steps before it; None if it died before it had restored."""
        if self.resumed_step is not None:
            return self.resumed_step
        return None if self.chief is None else self.chief.first_step

    @property
    def began(self) -> float | None:
        """When the chief's process was started, as far as is known; by the clock of the chief's host, as all here."""
        return min(self.times, default=None) if self.chief is None else self.chief.process_began

    @property
    def ended(self) -> float | None:
        """When the chief did the last thing that is known."""
        windows = () if self.chief is None else self.chief.windows[-1:]
        return max([*self.times, *(window.ended for window in windows)], default=None)


@dataclass(frozen=True)
class SideError:
    """The last error of an evaluator, TensorBoard or a metrics file, from RUN/errors.

    Attributes:
        name: name of the thing, such as "evaluator-0".
        error: one line.
        n_failures: how often in a row.
        time_s: time of the error, or of its end, in seconds since 1970.
        is_over: whether it works again.
    """

    name: str
    error: str
    n_failures: int
    time_s: float
    is_over: bool

    def __str__(self) -> str:
        if self.is_over:
            return f"{self.name} works again, after {self.n_failures} failures: {self.error}"
        return f"{self.name} has failed {self.n_failures} times in a row: {self.error}"


def read_side_errors(folder: Path) -> list[SideError]:
    """Return the errors beside training that a run folder holds."""
    errors = []
    for path in sorted((folder / "errors").glob("*.json")):
        content = {"name": path.stem, **_content(path)}
        errors += _checked(_side_error_of, iter([content]))
    return errors


def _side_error_of(content: dict[str, Any]) -> SideError:
    return SideError(
        _text(content["name"]),
        _text(content["error"]),
        _whole(content["n_failures"]),
        _time(content["time_s"]),
        content.get("is_over") is True,
    )


@dataclass(frozen=True)
class Run:
    """All that is recorded of a run.

    Attributes:
        folder: of the run.
        attempts: by number.
        metrics: records of metrics.jsonl: name -> numbers with their steps.
        config: rows of config.json: name, value, origin.
        config_attempt: the attempt that these are of; 0 without any.
        verdict: what decision.json says, and why; empty without any.
        side_errors: last errors of what runs beside training.
    """

    folder: Path
    attempts: tuple[AttemptRecords, ...]
    metrics: dict[str, list[tuple[int, float]]]
    config: tuple[tuple[str, str, str], ...] = ()
    config_attempt: int = 0
    verdict: str = ""
    side_errors: tuple["SideError", ...] = ()

    @property
    def last_trained(self) -> AttemptRecords | None:
        """The last attempt that made steps."""
        return next(
            (
                attempt
                for attempt in reversed(self.attempts)
                if any(rank.n_steps for rank in attempt.ranks)
            ),
            None,
        )


def read_run(folder: Path, steps_of: int | None = None) -> Run:
    """Return what a run folder holds. Reads only.

    Args:
        folder: of the run.
        steps_of: the number of the attempt of which single steps are read, too.

    Raises:
        UsageError: if the folder is not a run folder.
    """
    ledgers = {
        int(ledger_path.stem): ledger_path
        for ledger_path in (folder / "checkpoints" / "attempts").glob("*.jsonl")
        if _is_number(ledger_path)
    }
    traces = {
        int(trace_folder.name): trace_folder
        for trace_folder in (folder / "trace").glob("*")
        if _is_number(trace_folder) and trace_folder.is_dir()
    }
    if not ledgers and not traces:
        raise UsageError(
            f"expected the folder of a run, with checkpoints/attempts or trace, got {str(folder)!r}; "
            f"give what --run-dir names in the job."
        )
    attempts = []
    for number in sorted({*ledgers, *traces}):
        files = sorted(traces[number].glob("rank-*.jsonl")) if number in traces else []
        ranks = [_rank_of(path, has_steps=number == steps_of) for path in files]
        events = list(_records(ledgers[number])) if number in ledgers else []
        attempts.append(
            _attempt_of(number, events, tuple(rank for rank in ranks if rank is not None))
        )
    config = _content(folder / "config.json")
    decision = _content(folder / "decision.json")
    verdict = [
        str(decision[name])
        for name in ("decision", "reason")
        if isinstance(decision.get(name), str)
    ]
    of_attempt = config.get("attempt")
    return Run(
        folder,
        tuple(attempts),
        _numbers(_records(folder / "metrics.jsonl")),
        _rows_of(config),
        of_attempt if type(of_attempt) is int else 0,
        ": ".join(verdict),
        tuple(read_side_errors(folder)),
    )


def _is_number(path: Path) -> bool:
    return path.stem.isascii() and path.stem.isdecimal()


def _records(path: Path, *markers: str) -> Iterator[dict[str, Any]]:
    """Yield the objects in a file of JSON lines; none of one that is not there.

    Args:
        path: of the file.
        markers: lines are read that hold one of these texts; by default all are.
    """
    if not path.is_file():
        return
    with open(path, errors="replace") as file:
        for line in file:
            if not markers or any(marker in line for marker in markers):
                record = _parsed(line)
                if isinstance(record, dict):
                    yield record


def _content(path: Path) -> dict[str, Any]:
    """Return the object in a file of JSON; an empty one where there is none."""
    try:
        document = _parsed(read_text(path, _MAX_CONTENT_BYTES, errors="replace"))
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _checked(
    read: Callable[[dict[str, Any]], _Record], records: Iterator[dict[str, Any]]
) -> list[_Record]:
    """Return what `read` makes of records; those of another shape are left out."""
    accepted_records = []
    for record in records:
        try:
            accepted_records.append(read(record))
        except (KeyError, TypeError, ValueError, OverflowError, IndexError):
            continue
    return accepted_records


def _number(value: Any, largest: float = _LARGEST) -> float:
    """Return a finite number; raise for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= largest:
        raise ValueError(f"{str(value)[:20]!r} is no number")
    return float(value)


def _time(value: Any) -> float:
    return _number(value, _LARGEST_TIME_S)


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _LARGEST_STEP:
        raise ValueError(f"{str(value)[:20]!r} is no count")
    return value


def _text(value: Any) -> str:
    """Return a text that can be printed: JSON may hold halves of characters."""
    if not isinstance(value, str):
        raise TypeError(f"{str(value)[:20]!r} is no text")
    return value.encode("utf-8", "replace").decode()


def _attempt_of(
    number: int, events: list[dict[str, Any]], ranks: tuple[RankRecords, ...]
) -> AttemptRecords:
    """Return an attempt, given the events in its ledger."""
    times = _checked(lambda event: _time(event["time_s"]), iter(events))
    commits = _checked(_commit_of, (event for event in events if event.get("event") == "commit"))
    begins = _checked(_place_of, (event for event in events if event.get("event") == "begin"))
    resumed = _checked(
        lambda event: _whole(event["step"]),
        (event for event in events if event.get("event") == "resume"),
    )
    ends = _checked(
        lambda event: f"{_text(event['how'])}: {_text(event['reason'])}",
        (event for event in events if event.get("event") == "end"),
    )
    job, nodes = begins[-1] if begins else ("", ())
    step = resumed[-1] if resumed else None
    return AttemptRecords(
        number, tuple(times), job, nodes, step, tuple(commits), ends[-1] if ends else "", ranks
    )


def _commit_of(event: dict[str, Any]) -> Commit:
    return Commit(
        _whole(event["step"]),
        _whole(event["nbytes"]),
        _time(event["took_s"]),
        _time(event["time_s"]),
    )


def _place_of(event: dict[str, Any]) -> tuple[str, tuple[str, ...]]:
    job = event.get("job")
    return "" if job is None else _text(job), tuple(_text(node) for node in event["nodes"])


def _rank_of(path: Path, has_steps: bool) -> RankRecords | None:
    """Return a rank's records: those of the process that wrote last; None where it has none that is sound.

    A run whose folder was used before may have an attempt of the same number.
    """
    headers = _checked(_header_of, _records(path, '"process_began"'))
    if not headers:
        return None
    last = headers[-1]
    windows: list[Window] = []
    steps: list[StepRecord] = []
    is_last = False
    monotonic, unix = last.clock
    for record in _records(path, *(() if has_steps else ('"process_began"', '"window"'))):
        if "process_began" in record:
            is_last = record["process_began"] == last.process_began
        elif is_last and "window" in record:
            windows += _checked(
                lambda window_record: _window_of(window_record, unix - monotonic), iter([record])
            )
        elif is_last and has_steps:
            steps += _checked(_step_of, iter([record]))
    return RankRecords(
        last.rank,
        last.role,
        last.host,
        last.process_began,
        last.clock,
        last.first_step,
        tuple(windows),
        tuple(steps),
    )


def _header_of(record: dict[str, Any]) -> RankRecords:
    monotonic, unix = record["clock"]
    return RankRecords(
        _whole(record["rank"]),
        _text(record["role"]),
        _text(record["host"]),
        _time(record["process_began"]),
        (_time(monotonic), _time(unix)),
        _whole(record["step"]),
    )


def _window_of(record: dict[str, Any], to_unix: float) -> Window:
    began, ended = (_time(timestamp) + to_unix for timestamp in record["window"])
    seconds = {part: _time(record[f"{part}_s"]) for part in PARTS if part != "compute"}
    seconds["compute"] = max(
        0.0, _time(record["step_s"]) - seconds["input"] - seconds["communication"]
    )
    steps = None
    n_steps = _whole(record["n_steps"])
    if record["steps"] is not None:
        first, last = (_whole(step_number) for step_number in record["steps"])
        if last < first or n_steps < 1:
            raise ValueError("steps run forward")
        steps = first, last
    (step, length_s) = record["longest"]
    (stale, stalest) = record["stale"]
    longest = (_whole(step), _time(length_s))
    behind = (_whole(stale), _whole(stalest))
    return Window(began, ended, steps, n_steps, _whole(record["rows"]), longest, seconds, behind)


def _step_of(record: dict[str, Any]) -> StepRecord:
    began, ended = record["time"]
    spans, background = (
        [_span_of(span) for span in record.get(name, [])] for name in ("spans", "background")
    )
    return StepRecord(
        _whole(record["step"]), _time(began), _time(ended), tuple(spans), tuple(background)
    )


def _span_of(record: Any) -> tuple[str, str, float, float]:
    kind, name, began, ended = record
    return _text(kind), _text(name), _time(began), _time(ended)


def _numbers(records: Iterator[dict[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """Return the numbers in records of metrics by name, each with its step."""
    points_by_name: dict[str, list[tuple[int, float]]] = {}
    for name, step, value in _checked(_point_of, _pairs(records)):
        points_by_name.setdefault(name, []).append((step, value))
    return points_by_name


def _pairs(records: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield each value of records of metrics by itself."""
    for record in records:
        for name, value in record.items():
            if name not in ("step", "epoch"):
                yield {"name": name, "step": record.get("step"), "value": value}


def _point_of(pair: dict[str, Any]) -> tuple[str, int, float]:
    return _text(pair["name"]), _whole(pair["step"]), _number(pair["value"])


def _rows_of(config: dict[str, Any]) -> tuple[tuple[str, str, str], ...]:
    """Return what config.json says as rows: name, value, origin."""
    program, hosts, settings, versions = (
        config.get(name) for name in ("program", "hosts", "settings", "versions")
    )
    rows: list[tuple[str, Any, str]] = []
    if isinstance(program, list):
        rows += [("program", " ".join(map(str, program)), "")]
    if isinstance(hosts, dict):
        rows += [("hosts", ", ".join(f"{name} ({ranks})" for name, ranks in hosts.items()), "")]
    if isinstance(settings, dict):
        valid_settings = {
            name: setting for name, setting in settings.items() if isinstance(setting, dict)
        }
        rows += [
            (name, setting.get("value"), str(setting.get("from")))
            for name, setting in valid_settings.items()
        ]
    if isinstance(versions, dict):
        rows += [(name, value, "") for name, value in versions.items() if value is not None]
    return tuple((_text(name), _text(str(value)), _text(origin)) for name, value, origin in rows)

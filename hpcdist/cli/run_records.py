"""What a run has recorded: attempts, metrics, and where the time of each rank's steps went.

Files are parsed here, and nowhere else. A run folder may hold anything: a record that is torn, as by a kill, or that
hpcdist does not write, is left out.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from hpcdist.checkpoint.read import read_text
from hpcdist.errors import UsageError

#: Where the time of a step goes, in the order of pictures.
PARTS = ("compute", "input", "communication", "save", "between")
#: Numbers beyond this cannot be drawn. Times and steps beyond their limits are damage.
_LARGEST = 1e100
_LARGEST_TIME_S = 1e11
_LARGEST_STEP = 1 << 53
#: Longest file of one object that is read.
_MAX_CONTENT_BYTES = 16 << 20
#: Keys that only headers of ranks, and only windows, have.
_HEADER_MARKER = '"process_began"'
_WINDOW_MARKER = '"window"'
_JsonObject = dict[str, Any]
_Parsed = TypeVar("_Parsed")
_Default = TypeVar("_Default")


class StepRange(NamedTuple):
    """The first and the last of some steps."""

    first: int
    last: int


class LongestStep(NamedTuple):
    """The longest of some steps, and how long it took."""

    step: int
    seconds: float


class Staleness(NamedTuple):
    """Pushes of other workers that parameter servers had applied, and a push of this worker had not seen.

    Attributes:
        total: sum over the steps.
        most: largest number of one step.
    """

    total: int
    most: int


_NOT_STALE = Staleness(0, 0)


@dataclass(frozen=True)
class Window:
    """Sums over some steps of a rank. Times are in seconds since 1970.

    Attributes:
        began: start of the window.
        ended: end of the window.
        steps: range of the steps. None if the rank made no step in the window.
        n_steps: number of the steps.
        rows: number of rows that the steps used.
        longest: longest step.
        seconds: seconds in each part of `PARTS`.
        stale: how far the pushes were behind those of other workers.
    """

    began: float
    ended: float
    steps: StepRange | None
    n_steps: int
    rows: int
    longest: LongestStep
    seconds: dict[str, float]
    stale: Staleness = _NOT_STALE

    @property
    def step_s(self) -> float:
        """Seconds in steps."""
        return self.seconds["compute"] + self.seconds["input"] + self.seconds["communication"]


class Span(NamedTuple):
    """One wait of a rank. Times are of its monotonic clock, in seconds."""

    kind: str
    name: str
    began: float
    ended: float


@dataclass(frozen=True)
class StepRecord:
    """One step of a rank. Times are of its monotonic clock, in seconds.

    Attributes:
        step: number of the step.
        began: start of the step.
        ended: end of the step.
        spans: waits of the step.
        background: sums that were made in the background.
    """

    step: int
    began: float
    ended: float
    spans: tuple[Span, ...]
    background: tuple[Span, ...] = ()


class ClockReading(NamedTuple):
    """The same moment by the monotonic clock of a rank, and in seconds since 1970."""

    monotonic: float
    unix: float


@dataclass(frozen=True)
class RankRecords:
    """What one rank has recorded of one attempt.

    Attributes:
        rank: number of the rank in the job.
        role: its role and index, such as "worker:0".
        host: name of its host.
        process_began: start of its process, in seconds since 1970.
        clock: reading of its two clocks.
        first_step: number of steps before the attempt.
        windows: sums over steps, in the order of time.
        steps: steps that were recorded by themselves. Empty unless the caller asked for them.
    """

    rank: int
    role: str
    host: str
    process_began: float
    clock: ClockReading
    first_step: int = 0
    windows: tuple[Window, ...] = ()
    steps: tuple[StepRecord, ...] = ()

    @property
    def clock_offset(self) -> float:
        """Seconds to add to its monotonic clock for seconds since 1970, by the clock of its host."""
        monotonic, unix = self.clock
        return unix - monotonic

    @property
    def total(self) -> dict[str, float]:
        """Seconds of each part."""
        return {part: self.seconds_in(part) for part in PARTS}

    @property
    def n_steps(self) -> int:
        """Steps in the windows."""
        return sum(window.n_steps for window in self.windows)

    def seconds_in(self, part: str) -> float:
        """Return the seconds of one part in all windows."""
        return sum(window.seconds[part] for window in self.windows)


@dataclass(frozen=True)
class Commit:
    """A checkpoint.

    Attributes:
        step: number of optimizer steps in it.
        nbytes: size of the file.
        took_s: seconds from the request until the file was complete.
        time_s: when it was complete, in seconds since 1970.
    """

    step: int
    nbytes: int
    took_s: float
    time_s: float


@dataclass(frozen=True)
class AttemptRecords:
    """One attempt, by its ledger and the records of its ranks.

    Attributes:
        number: number of the attempt, from 1.
        times: times of the events in its ledger, in seconds since 1970.
        job: number of the batch job. Empty if it is not known.
        nodes: names of its nodes. Empty if they are not known.
        resumed_step: step that it resumed from, by its ledger. None if it resumed from no checkpoint.
        commits: checkpoints that it wrote.
        end: how and why it ended. Empty if that is not known.
        ranks: records of the ranks that have any, by number.
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
        """Records of the rank with the role of the chief, or else of the first rank. None without ranks."""
        for rank in self.ranks:
            if rank.role.startswith("chief"):
                return rank
        return self.ranks[0] if self.ranks else None

    @property
    def chief_windows(self) -> tuple[Window, ...]:
        """Windows of the chief. Empty without a chief."""
        return () if self.chief is None else self.chief.windows

    @property
    def trained_ranks(self) -> list[RankRecords]:
        """Records of the ranks that have made steps."""
        return [rank for rank in self.ranks if rank.n_steps]

    @property
    def first_step(self) -> int | None:
        """Steps before the attempt. None if it died before it had restored."""
        if self.resumed_step is not None:
            return self.resumed_step
        return None if self.chief is None else self.chief.first_step

    @property
    def began(self) -> float | None:
        """When the chief's process was started, as far as is known, by the clock of the chief's host."""
        if self.chief is None:
            return min(self.times, default=None)
        return self.chief.process_began

    @property
    def ended(self) -> float | None:
        """Time of the last thing that the chief is known to have done, by the clock of its host."""
        times = list(self.times)
        if self.chief_windows:
            times.append(self.chief_windows[-1].ended)
        return max(times, default=None)


@dataclass(frozen=True)
class SideError:
    """The last error of an evaluator, TensorBoard or a metrics file, from RUN/errors.

    Attributes:
        name: name of what failed, such as "evaluator-0".
        error: text of the error, in one line.
        n_failures: number of failures in a row.
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


class MetricPoint(NamedTuple):
    """Value of a metric after a step."""

    step: int
    value: float


class Setting(NamedTuple):
    """Something that the run was started with, and where it came from, as texts."""

    name: str
    value: str
    origin: str


@dataclass(frozen=True)
class Run:
    """All that is recorded of a run.

    Attributes:
        folder: folder of the run.
        attempts: records of the attempts, by number.
        metrics: points of each metric in metrics.jsonl, by its name.
        config: settings in config.json.
        config_attempt: attempt that wrote config.json. 0 if the file has none.
        verdict: decision in decision.json, and its reason. Empty if the file has none.
        side_errors: last errors of what runs beside training.
    """

    folder: Path
    attempts: tuple[AttemptRecords, ...]
    metrics: dict[str, list[MetricPoint]]
    config: tuple[Setting, ...] = ()
    config_attempt: int = 0
    verdict: str = ""
    side_errors: tuple[SideError, ...] = ()

    @property
    def last_trained(self) -> AttemptRecords | None:
        """The last attempt that made steps. None if no attempt did."""
        for attempt in reversed(self.attempts):
            if attempt.trained_ranks:
                return attempt
        return None


def read_run(folder: Path, steps_of: int | None = None) -> Run:
    """Return what a run folder holds. Reads only.

    Args:
        folder: folder of the run.
        steps_of: number of the attempt whose single steps are read too. None for no attempt.

    Raises:
        UsageError: if the folder is not a run folder.
    """
    ledgers = _find_ledgers(folder)
    traces = _find_traces(folder)
    if not ledgers and not traces:
        raise UsageError(
            f"expected the folder of a run, with checkpoints/attempts or trace, got {str(folder)!r}; "
            f"give what --run-dir names in the job."
        )
    attempts: list[AttemptRecords] = []
    for number in sorted({*ledgers, *traces}):
        ranks: list[RankRecords] = []
        if number in traces:
            has_steps = number == steps_of
            ranks = _read_ranks(traces[number], has_steps)
        events: list[_JsonObject] = []
        if number in ledgers:
            events = list(_read_records(ledgers[number]))
        attempts.append(_attempt_of(number, events, ranks))
    config = _read_object(folder / "config.json")
    decision = _read_object(folder / "decision.json")
    config_attempt = config.get("attempt")
    return Run(
        folder=folder,
        attempts=tuple(attempts),
        metrics=_metrics_of(_read_records(folder / "metrics.jsonl")),
        config=tuple(_settings_of(config)),
        config_attempt=config_attempt if type(config_attempt) is int else 0,
        verdict=_verdict_of(decision),
        side_errors=tuple(read_side_errors(folder)),
    )


def read_side_errors(folder: Path) -> list[SideError]:
    """Return the errors beside training that a run folder holds."""
    errors: list[SideError] = []
    for path in sorted((folder / "errors").glob("*.json")):
        content = {"name": path.stem, **_read_object(path)}
        errors += _accept_all(_side_error_of, [content])
    return errors


# -- files ---------------------------------------------------------------------------------------------------------


def _find_ledgers(folder: Path) -> dict[int, Path]:
    """Return the ledger of each attempt that has one, by the number of the attempt."""
    ledgers: dict[int, Path] = {}
    for ledger_path in (folder / "checkpoints" / "attempts").glob("*.jsonl"):
        if _is_number(ledger_path.stem):
            ledgers[int(ledger_path.stem)] = ledger_path
    return ledgers


def _find_traces(folder: Path) -> dict[int, Path]:
    """Return the folder of the ranks' records of each attempt that has one, by the number of the attempt."""
    traces: dict[int, Path] = {}
    for trace_folder in (folder / "trace").glob("*"):
        if _is_number(trace_folder.name) and trace_folder.is_dir():
            traces[int(trace_folder.name)] = trace_folder
    return traces


def _is_number(name: str) -> bool:
    return name.isascii() and name.isdecimal()


def _read_ranks(trace_folder: Path, has_steps: bool) -> list[RankRecords]:
    """Return the records of the ranks of an attempt, by number. Ranks without a sound record are left out."""
    ranks: list[RankRecords] = []
    for path in sorted(trace_folder.glob("rank-*.jsonl")):
        rank = _read_rank(path, has_steps)
        if rank is not None:
            ranks.append(rank)
    return ranks


def _read_rank(path: Path, has_steps: bool) -> RankRecords | None:
    """Return the records of a rank by the process that wrote last. None if no record is sound.

    A run whose folder was used before may have an attempt of the same number.

    Args:
        path: file of the rank.
        has_steps: whether single steps are read too.
    """
    headers = _accept_all(_header_of, _read_records(path, _HEADER_MARKER))
    if not headers:
        return None
    header = headers[-1]
    windows: list[Window] = []
    steps: list[StepRecord] = []
    markers = () if has_steps else (_HEADER_MARKER, _WINDOW_MARKER)
    is_last_process = False
    for record in _read_records(path, *markers):
        if "process_began" in record:
            is_last_process = record["process_began"] == header.process_began
        elif is_last_process and "window" in record:
            window = _accept(_window_of, record, header.clock_offset)
            if window is not None:
                windows.append(window)
        elif is_last_process and has_steps:
            step = _accept(_step_of, record)
            if step is not None:
                steps.append(step)
    return replace(header, windows=tuple(windows), steps=tuple(steps))


def _read_records(path: Path, *markers: str) -> Iterator[_JsonObject]:
    """Yield the objects in a file of JSON lines. Yields nothing if there is no such file.

    Args:
        path: path of the file.
        markers: texts of which a line must hold one to be read. By default all lines are read.
    """
    if not path.is_file():
        return
    with open(path, errors="replace") as file:
        for line in file:
            if not markers or any(marker in line for marker in markers):
                record = _decode_json(line)
                if isinstance(record, dict):
                    yield record


def _read_object(path: Path) -> _JsonObject:
    """Return the object in a file of JSON. Empty if the file holds none, or cannot be read."""
    try:
        document = _decode_json(read_text(path, _MAX_CONTENT_BYTES, errors="replace"))
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


def _decode_json(text: str) -> Any:
    """Return the value of a text in JSON. None for any other text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


# -- records -------------------------------------------------------------------------------------------------------


def _accept(parse: Callable[..., _Parsed], *contents: Any) -> _Parsed | None:
    """Return what `parse` makes of some contents of a file. None if they are of another shape."""
    try:
        return parse(*contents)
    except (KeyError, TypeError, ValueError, OverflowError, IndexError):
        return None


def _accept_all(
    parse: Callable[[_JsonObject], _Parsed], records: Iterable[_JsonObject]
) -> list[_Parsed]:
    """Return what `parse` makes of records. Records of another shape are left out."""
    accepted: list[_Parsed] = []
    for record in records:
        parsed = _accept(parse, record)
        if parsed is not None:
            accepted.append(parsed)
    return accepted


@dataclass(frozen=True)
class _Launch:
    """Where an attempt began: number of its batch job and names of its nodes, as far as they are known."""

    job: str = ""
    nodes: tuple[str, ...] = ()


def _attempt_of(
    number: int, events: Sequence[_JsonObject], ranks: Sequence[RankRecords]
) -> AttemptRecords:
    """Return the records of an attempt.

    Args:
        number: number of the attempt.
        events: events in its ledger.
        ranks: records of its ranks.
    """
    launches = _accept_all(_launch_of, _events_of_kind(events, "begin"))
    resumed_steps = _accept_all(_resumed_step_of, _events_of_kind(events, "resume"))
    ends = _accept_all(_end_of, _events_of_kind(events, "end"))
    launch = _last(launches, _Launch())
    return AttemptRecords(
        number,
        times=tuple(_accept_all(_time_of, events)),
        job=launch.job,
        nodes=launch.nodes,
        resumed_step=_last(resumed_steps, None),
        commits=tuple(_accept_all(_commit_of, _events_of_kind(events, "commit"))),
        end=_last(ends, ""),
        ranks=tuple(ranks),
    )


def _events_of_kind(events: Sequence[_JsonObject], kind: str) -> list[_JsonObject]:
    return [event for event in events if event.get("event") == kind]


def _last(parsed: Sequence[_Parsed], default: _Default) -> _Parsed | _Default:
    return parsed[-1] if parsed else default


def _time_of(event: _JsonObject) -> float:
    return _parse_time(event["time_s"])


def _launch_of(event: _JsonObject) -> _Launch:
    job = event.get("job")
    return _Launch(
        job="" if job is None else _parse_text(job),
        nodes=tuple(map(_parse_text, event["nodes"])),
    )


def _resumed_step_of(event: _JsonObject) -> int:
    return _parse_count(event["step"])


def _commit_of(event: _JsonObject) -> Commit:
    return Commit(
        step=_parse_count(event["step"]),
        nbytes=_parse_count(event["nbytes"]),
        took_s=_parse_time(event["took_s"]),
        time_s=_parse_time(event["time_s"]),
    )


def _end_of(event: _JsonObject) -> str:
    how = _parse_text(event["how"])
    reason = _parse_text(event["reason"])
    return f"{how}: {reason}"


def _header_of(record: _JsonObject) -> RankRecords:
    monotonic, unix = record["clock"]
    return RankRecords(
        rank=_parse_count(record["rank"]),
        role=_parse_text(record["role"]),
        host=_parse_text(record["host"]),
        process_began=_parse_time(record["process_began"]),
        clock=ClockReading(_parse_time(monotonic), _parse_time(unix)),
        first_step=_parse_count(record["step"]),
    )


def _window_of(record: _JsonObject, clock_offset: float) -> Window:
    """Return a window, whose record has times of the rank's monotonic clock."""
    began, ended = record["window"]
    longest_step, longest_s = record["longest"]
    total_stale, most_stale = record["stale"]
    step_s = _parse_time(record["step_s"])
    input_s = _parse_time(record["input_s"])
    communication_s = _parse_time(record["communication_s"])
    seconds = {
        "compute": max(0.0, step_s - input_s - communication_s),
        "input": input_s,
        "communication": communication_s,
        "save": _parse_time(record["save_s"]),
        "between": _parse_time(record["between_s"]),
    }
    n_steps = _parse_count(record["n_steps"])
    return Window(
        began=_parse_time(began) + clock_offset,
        ended=_parse_time(ended) + clock_offset,
        steps=_step_range_of(record["steps"], n_steps),
        n_steps=n_steps,
        rows=_parse_count(record["rows"]),
        longest=LongestStep(_parse_count(longest_step), _parse_time(longest_s)),
        seconds=seconds,
        stale=Staleness(_parse_count(total_stale), _parse_count(most_stale)),
    )


def _step_range_of(steps: Any, n_steps: int) -> StepRange | None:
    if steps is None:
        return None
    first, last = map(_parse_count, steps)
    if last < first or n_steps < 1:
        raise ValueError("steps run forward")
    return StepRange(first, last)


def _step_of(record: _JsonObject) -> StepRecord:
    began, ended = record["time"]
    spans = record.get("spans", [])
    background = record.get("background", [])
    return StepRecord(
        step=_parse_count(record["step"]),
        began=_parse_time(began),
        ended=_parse_time(ended),
        spans=tuple(map(_span_of, spans)),
        background=tuple(map(_span_of, background)),
    )


def _span_of(record: Any) -> Span:
    kind, name, began, ended = record
    return Span(
        kind=_parse_text(kind),
        name=_parse_text(name),
        began=_parse_time(began),
        ended=_parse_time(ended),
    )


def _side_error_of(content: _JsonObject) -> SideError:
    return SideError(
        name=_parse_text(content["name"]),
        error=_parse_text(content["error"]),
        n_failures=_parse_count(content["n_failures"]),
        time_s=_parse_time(content["time_s"]),
        is_over=content.get("is_over") is True,
    )


def _metrics_of(records: Iterable[_JsonObject]) -> dict[str, list[MetricPoint]]:
    """Return the points of each metric, by its name. Values that are no numbers are left out."""
    points_by_name: dict[str, list[MetricPoint]] = {}
    for record in records:
        for name, value in record.items():
            if name in ("step", "epoch"):
                continue
            point = _accept(_metric_point_of, record.get("step"), value)
            if point is not None:
                points = points_by_name.setdefault(_parse_text(name), [])
                points.append(point)
    return points_by_name


def _metric_point_of(step: Any, value: Any) -> MetricPoint:
    return MetricPoint(_parse_count(step), _parse_number(value))


def _settings_of(config: _JsonObject) -> list[Setting]:
    """Return the settings in config.json, in the order in which people read them."""
    program = config.get("program")
    hosts = config.get("hosts")
    settings = config.get("settings")
    versions = config.get("versions")
    rows: list[Setting] = []
    if isinstance(program, list):
        command_line = " ".join(map(str, program))
        rows.append(_setting_of("program", command_line))
    if isinstance(hosts, dict):
        ranks_by_host = [f"{host} ({ranks})" for host, ranks in hosts.items()]
        text = ", ".join(ranks_by_host)
        rows.append(_setting_of("hosts", text))
    if isinstance(settings, dict):
        for name, setting in settings.items():
            if isinstance(setting, dict):
                value = setting.get("value")
                origin = setting.get("from")
                rows.append(_setting_of(name, value, str(origin)))
    if isinstance(versions, dict):
        for name, version in versions.items():
            if version is not None:
                rows.append(_setting_of(name, version))
    return rows


def _setting_of(name: str, value: Any, origin: str = "") -> Setting:
    return Setting(
        name=_parse_text(name),
        value=_parse_text(str(value)),
        origin=_parse_text(origin),
    )


def _verdict_of(decision: _JsonObject) -> str:
    texts: list[str] = []
    for name in ("decision", "reason"):
        text = decision.get(name)
        if isinstance(text, str):
            texts.append(text)
    return ": ".join(texts)


# -- values --------------------------------------------------------------------------------------------------------


def _parse_number(value: Any, largest: float = _LARGEST) -> float:
    """Return a finite number.

    Raises:
        ValueError: for anything else.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not abs(value) <= largest:
        raise ValueError(f"{str(value)[:20]!r} is no number")
    return float(value)


def _parse_time(value: Any) -> float:
    return _parse_number(value, _LARGEST_TIME_S)


def _parse_count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _LARGEST_STEP:
        raise ValueError(f"{str(value)[:20]!r} is no count")
    return value


def _parse_text(value: Any) -> str:
    """Return a text that can be printed: JSON may hold halves of characters.

    Raises:
        TypeError: for anything else.
    """
    if not isinstance(value, str):
        raise TypeError(f"{str(value)[:20]!r} is no text")
    return value.encode("utf-8", "replace").decode()

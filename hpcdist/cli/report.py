"""`hpcdist report`: what a run did and where its time went, as one HTML file, and its pictures as PNG files."""

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from hpcdist.checkpoint import durable
from hpcdist.cli.other_metrics import read_curves
from hpcdist.cli.output import echo
from hpcdist.cli.run_facts import Goodput, StepClock, goodput_of, stragglers_of, sums_of
from hpcdist.cli.run_records import (
    PARTS,
    AttemptRecords,
    MetricPoint,
    RankRecords,
    Run,
    Window,
    read_run,
)
from hpcdist.errors import ConfigurationError

if TYPE_CHECKING:
    from hpcdist.cli.charts import Chart

#: Ranks that a picture shows. Of more ranks, it shows those whose own part of a step is longest.
_N_RANKS = 32
#: Metrics of metrics.jsonl, and metrics of tables and events, that are drawn, each in one picture.
_N_METRICS = 8
_N_CURVES = 12
#: Points of a line about step times. If there are more windows, neighbours are joined.
_N_POINTS = 400
#: Checkpoints in the table.
_N_CHECKPOINTS = 20
_DARK = {
    "--text": "#ececf1",
    "--muted": "#9a9aa5",
    "--line": "#34343b",
    "--series-1": "#5b9cf0",
    "--series-2": "#35c08f",
    "--series-3": "#f0b429",
    "--series-4": "#b18cff",
    "--series-5": "#ff7b79",
}


@dataclass(frozen=True)
class Section:
    """A part of the page: a text, pictures, and a table."""

    title: str
    text: str = ""
    charts: "Sequence[Chart]" = ()
    head: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = field(default_factory=tuple)
    is_text: bool = False


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "--out", type=click.Path(path_type=Path), help="Folder; default: report, in the run folder."
)
def command(folder: Path, out: Path | None) -> None:
    """Write report.html about the run of a run folder, and its pictures as PNG: one file, which needs no network.

    It shows metrics against steps and time, with marks where the run was started again; where each rank's time goes,
    and which rank others wait for; how much of the time went into steps that were kept; checkpoints, attempts, and what
    the run was started with. The job may be running.

    \b
    hpcdist report runs/train
    """
    run = read_run(folder)
    try:
        import jinja2

        from hpcdist.cli.charts import COLOURS
    except ImportError as error:
        raise ConfigurationError(
            f"hpcdist report: expected matplotlib and Jinja2, got {error}; pip install 'hpcdist[report]'."
        ) from error
    goodput = goodput_of(run)
    sections = sections_of(run, goodput)
    target = out or folder / "report"
    durable.make_folders(durable.Disk(), target)
    source = (Path(__file__).parent / "report.html").read_text()
    template = jinja2.Environment(autoescape=True).from_string(source)
    verdict = run.verdict or "The job has written no decision yet"
    page = template.render(
        title=f"Run {folder.resolve()}",
        subtitle=f"{verdict}. Report of {_date(time.time())}.",
        tiles=_tiles(run, goodput),
        findings=_findings_of(run),
        sections=sections,
        light=_style(COLOURS),
        dark=_style(_DARK),
    )
    # a run folder may hold halves of characters
    text = page.encode("utf-8", "backslashreplace").decode()
    durable.replace_text(durable.Disk(), target / "report.html", text)
    n_charts = 0
    for section in sections:
        for chart in section.charts:
            chart.save(target)
            n_charts += 1
    echo(f"{target / 'report.html'}, and {n_charts} pictures beside it")


def _style(colours: Mapping[str, str]) -> str:
    return " ".join(f"{name}: {colour};" for name, colour in colours.items())


def _findings_of(run: Run) -> list[str]:
    """Return a line for everything that is wrong."""
    findings = list(map(str, run.side_errors))
    if run.last_trained is not None:
        findings += stragglers_of(run.last_trained.ranks)
    return findings


class _Tile(NamedTuple):
    """A number at the top of the page, and a text that says what it is."""

    value: str
    label: str


def _tiles(run: Run, goodput: Goodput) -> list[_Tile]:
    n_attempts = len(run.attempts)
    attempts = "attempts" if n_attempts > 1 else "attempt"
    tiles = [_Tile(f"{n_attempts}", attempts)]
    if run.last_trained is not None:
        tiles += _tiles_of_attempt(run.last_trained)
    if goodput.elapsed_s:
        share = f"{100 * goodput.share:.0f} %"
        tiles.append(_Tile(share, "of the time in steps that were kept"))
    return tiles


def _tiles_of_attempt(attempt: AttemptRecords) -> list[_Tile]:
    """Return how far an attempt came, and how fast. Empty if its chief has recorded no steps."""
    chief = attempt.chief
    if chief is None or not chief.n_steps:
        return []
    last_steps = [window.steps.last for window in chief.windows if window.steps]
    if not last_steps:  # a damaged file counts steps that it does not name
        return []
    sums = sums_of(chief.windows)
    mean_s = sums.step_s / sums.n_steps
    tiles = [
        _Tile(f"{max(last_steps)}", "last step"),
        _Tile(f"{len(attempt.ranks)}", "ranks with records"),
        _Tile(_seconds(mean_s), "a step"),
    ]
    if sums.n_rows and sums.length_s > 0:
        rate = sums.n_rows / sums.length_s
        rounded_rate = float(f"{rate:.3g}")
        tiles.append(_Tile(f"{rounded_rate:,g}", "rows a second"))
    return tiles


def sections_of(run: Run, goodput: Goodput) -> list[Section]:
    """Return the parts of the page that there are records for."""
    sections: list[Section | None] = [
        _metrics_section(run),
        _curves_section(run),
        _ranks_section(run.last_trained),
        _time_section(goodput),
        _pace_section(run),
        _checkpoints_section(run),
        _attempts_section(run),
        _settings_section(run),
    ]
    return list(filter(None, sections))


def _metrics_section(run: Run) -> Section | None:
    if not run.metrics:
        return None
    restarts = _restarts_of(run)
    clock = StepClock(run.attempts)
    charts: list[Chart] = []
    for index, name in enumerate(list(run.metrics)[:_N_METRICS]):
        file = _file(name, index)
        charts += _charts_of_metric(file, name, run.metrics[name], clock, restarts)
    text = "From metrics.jsonl. Dotted lines: restarts."
    n_more = len(run.metrics) - _N_METRICS
    if n_more > 0:
        text += f" {n_more} more are in metrics.jsonl."
    return Section("Metrics", text, charts)


@dataclass(frozen=True)
class _Restarts:
    """Where a run was started again.

    Attributes:
        began: start of the first attempt, in seconds since 1970. 0 if it is not known.
        steps: steps that attempts resumed from.
        times_s: starts of these attempts, in seconds since the first one.
    """

    began: float
    steps: Sequence[int]
    times_s: Sequence[float]


def _restarts_of(run: Run) -> _Restarts:
    """Return the restarts of a run, without attempts that died before they had restored."""
    began = run.attempts[0].began or 0.0
    steps: list[int] = []
    times_s: list[float] = []
    for attempt in run.attempts[1:]:
        if attempt.first_step is None:
            continue
        steps.append(attempt.first_step)
        if attempt.began is not None:
            times_s.append(attempt.began - began)
    return _Restarts(began, steps, times_s)


def _charts_of_metric(
    file: str, name: str, points: Sequence[MetricPoint], clock: StepClock, restarts: _Restarts
) -> "list[Chart]":
    """Return the pictures of a metric: against steps and, where times of its steps are known, against time.

    Args:
        file: beginning of the names of their files.
        name: name of the metric.
        points: points of the metric.
        clock: clock of the run.
        restarts: restarts of the run.
    """
    from hpcdist.cli.charts import line_chart

    by_step = line_chart(
        name=f"{file}-step",
        title=f"{name} against step",
        axes=("step", name),
        lines={name: points},
        marks=restarts.steps,
    )
    times_s: list[float] = []
    values: list[float] = []
    for step, value in points:
        time_s = clock.time_of(step)
        if time_s is not None:
            times_s.append(time_s - restarts.began)
            values.append(value)
    if not times_s:
        return [by_step]
    unit, scale = _unit_of(max(times_s))
    times = [time_s / scale for time_s in times_s]
    marks = [time_s / scale for time_s in restarts.times_s]
    by_time = line_chart(
        name=f"{file}-time",
        title=f"{name} against time",
        axes=(f"{unit} since the first start", name),
        lines={name: list(zip(times, values, strict=True))},
        marks=marks,
    )
    return [by_step, by_time]


def _curves_section(run: Run) -> Section | None:
    from hpcdist.cli.charts import line_chart

    curves = read_curves(run.folder)
    if not curves:
        return None
    charts = []
    for index, curve in enumerate(curves[:_N_CURVES]):
        chart = line_chart(
            name=_file(curve.name, index).replace("metric", "curve"),
            title=f"{curve.name} of {curve.origin}",
            axes=(curve.against, curve.name),
            lines={curve.name: curve.points},
        )
        charts.append(chart)
    text = "From files of CSVLogger and TensorBoard in the run folder."
    n_more = len(curves) - _N_CURVES
    if n_more > 0:
        text += f" {n_more} more are there."
    return Section("Tables and events", text, charts)


def _ranks_section(attempt: AttemptRecords | None) -> Section | None:
    from hpcdist.cli.charts import bar_chart

    if attempt is None:
        return None
    ranks = attempt.trained_ranks
    shown_ranks = ranks
    if len(ranks) > _N_RANKS:
        slowest_first = sorted(ranks, key=_own_s, reverse=True)
        shown_ranks = slowest_first[:_N_RANKS]
    has_staleness = any(map(_is_stale, ranks))
    bars: dict[str, dict[str, float]] = {}
    rows: list[list[str]] = []
    for rank in shown_ranks:
        bar: dict[str, float] = {}
        row = [f"rank {rank.rank}", rank.host, f"{rank.n_steps}"]
        for part in PARTS:
            seconds = rank.seconds_in(part)
            bar[part] = 1e3 * seconds / rank.n_steps
            row.append(_seconds(seconds / rank.n_steps))
        if has_staleness:
            row += _staleness_of(rank)
        bars[row[0]] = bar
        rows.append(row)
    head = ["rank", "host", "steps", *PARTS]
    text = (
        "Communication is time in collectives, waiting for slower ranks included: the rank with the least of it is the "
        "one that the others wait for. Evaluations, callbacks and agreements are between steps."
    )
    if len(ranks) > _N_RANKS:
        text += f" Of {len(ranks)} ranks the {_N_RANKS} with the longest own part."
    if has_staleness:
        head += ["staleness", "at most"]
        text += " Staleness is how many pushes of other workers a push had not seen."
    title = f"Attempt {attempt.number}: where the time goes"
    chart = bar_chart("ranks", title, "ms for each step", bars)
    return Section(
        title="Ranks",
        text=text,
        charts=[chart],
        head=head,
        rows=rows,
    )


def _own_s(rank: RankRecords) -> float:
    """Return the seconds of a step in which a rank does not wait for others."""
    own_s = rank.seconds_in("compute") + rank.seconds_in("input")
    return own_s / rank.n_steps


def _is_stale(rank: RankRecords) -> bool:
    """Return whether a push of a rank had not seen pushes of other workers."""
    return sums_of(rank.windows).most_stale > 0


def _staleness_of(rank: RankRecords) -> list[str]:
    """Return the mean and the largest staleness of a rank."""
    sums = sums_of(rank.windows)
    mean_stale = sums.total_stale / sums.n_steps
    return [f"{mean_stale:.2f}", f"{sums.most_stale}"]


def _time_section(goodput: Goodput) -> Section | None:
    from hpcdist.cli.charts import bar_chart

    if not goodput.elapsed_s:
        return None
    unit, scale = _unit_of(goodput.elapsed_s)
    bar: dict[str, float] = {}
    rows: list[list[str]] = []
    for part, seconds in goodput.parts.items():
        bar[part] = seconds / scale
        percent = 100 * seconds / goodput.elapsed_s
        row = [
            part,
            _seconds(seconds),
            f"{percent:.1f} %",
        ]
        rows.append(row)
    chart = bar_chart("goodput", "The whole run", unit, {"run": bar})
    text = "From the start of the first process to the last record of the chief."
    if goodput.n_lost:
        text += f" {goodput.n_lost} steps were lost and repeated."
    return Section(
        title="Goodput",
        text=text,
        charts=[chart],
        head=["", "time", "share"],
        rows=rows,
    )


def _pace_section(run: Run) -> Section | None:
    from hpcdist.cli.charts import line_chart

    windows: list[Window] = []
    for attempt in run.attempts:
        windows += [window for window in attempt.chief_windows if window.steps]
    if len(windows) < 3:
        return None
    n_joined = -(-len(windows) // _N_POINTS)
    longest: list[tuple[float, float]] = []
    mean: list[tuple[float, float]] = []
    for start in range(0, len(windows), n_joined):
        group = windows[start : start + n_joined]
        step_range = group[-1].steps
        last_step = float(step_range.last) if step_range else 0.0
        longest_s = max(window.longest.seconds for window in group)
        longest.append((last_step, 1e3 * longest_s))
        sums = sums_of(group)
        mean_ms = 1e3 * sums.step_s / sums.n_steps
        mean.append((last_step, mean_ms))
    chart = line_chart(
        name="pace",
        title="Length of a step, on the chief",
        axes=("step", "ms"),
        lines={"longest": longest, "mean": mean},
        is_log=True,
    )
    return Section("Pace", charts=[chart])


def _checkpoints_section(run: Run) -> Section | None:
    rows: list[list[str]] = []
    for attempt in run.attempts:
        for commit in attempt.commits:
            row = [
                f"{commit.step}",
                f"{attempt.number}",
                f"{commit.nbytes / 1e6:.3g} MB",
                _seconds(commit.took_s),
            ]
            rows.append(row)
    if not rows:
        return None
    text = "Time from the request until the file was read back. Training waits only while the state is copied."
    if len(rows) > _N_CHECKPOINTS:
        text += f" The last {_N_CHECKPOINTS}."
    return Section(
        title="Checkpoints",
        text=text,
        head=["step", "attempt", "size", "time"],
        rows=rows[-_N_CHECKPOINTS:],
    )


def _attempts_section(run: Run) -> Section:
    rows: list[list[str]] = []
    for attempt in run.attempts:
        origin = "nothing was restored"
        if attempt.first_step is not None:
            origin = f"step {attempt.first_step}"
        unknown_end = "died by a signal or an error"
        if attempt is run.attempts[-1]:
            unknown_end = "runs, or died by a signal or an error"
        row = [
            f"{attempt.number}",
            _date(attempt.began),
            attempt.job or "-",
            ", ".join(attempt.nodes) or "unknown",
            origin,
            attempt.end or unknown_end,
        ]
        rows.append(row)
    return Section(
        title="Attempts",
        head=["attempt", "began", "job", "nodes", "from", "end"],
        rows=rows,
        is_text=True,
    )


def _settings_section(run: Run) -> Section | None:
    if not run.config:
        return None
    return Section(
        title="Started with",
        text=f"Of attempt {run.config_attempt}, from config.json.",
        head=["", "value", "from"],
        rows=run.config,
        is_text=True,
    )


# -- texts ---------------------------------------------------------------------------------------------------------


def _file(name: str, index: int) -> str:
    """Return the beginning of the name of a metric's pictures.

    It has a number, as metrics may differ in characters that names of files do not hold.

    Args:
        name: name of the metric.
        index: number of the metric, from 0.
    """
    text = re.sub("[^A-Za-z0-9_-]", "-", name)
    return f"metric-{index + 1}-{text[:40]}"


def _unit_of(seconds: float) -> tuple[str, float]:
    """Return a unit in which a time is 2 or more, if there is one, and its seconds."""
    if seconds >= 2 * 3600.0:
        return "hours", 3600.0
    if seconds >= 2 * 60.0:
        return "minutes", 60.0
    return "s", 1.0


def _seconds(seconds: float) -> str:
    """Return a time as people write it."""
    if seconds >= 120:
        unit, scale = _unit_of(seconds)
        return f"{seconds / scale:.1f} {unit}"
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{1e3 * seconds:.3g} ms"


def _date(time_s: float | None) -> str:
    """Return a time since 1970 as a date."""
    if time_s is None or not 0 <= time_s < 1e11:
        return "unknown"
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time_s))

"""`hpcdist report`: what a run did and where its time went, as one HTML file, and its pictures as PNG files."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpcdist.checkpoint import durable
from hpcdist.cli.other_metrics import read_curves
from hpcdist.cli.output import echo
from hpcdist.cli.run_facts import Goodput, StepClock, goodput_of, stragglers_of
from hpcdist.cli.run_records import PARTS, AttemptRecords, RankRecords, Run, read_run
from hpcdist.errors import ConfigurationError

if TYPE_CHECKING:
    from hpcdist.cli.charts import Chart

#: Ranks that a picture shows: those with the longest own part of a step come first where there are more.
_N_RANKS = 32
#: Metrics that are drawn, each in a picture of its own; and those of tables and events.
_N_METRICS = 8
_N_CURVES = 12
#: Points of a line about step times: windows are joined.
_N_POINTS = 400
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
    template = jinja2.Environment(autoescape=True).from_string(
        (Path(__file__).parent / "report.html").read_text()
    )
    page = template.render(
        title=f"Run {folder.resolve()}",
        subtitle=f"{run.verdict or 'The job has written no decision yet'}. Report of {_date(time.time())}.",
        tiles=_tiles(run, goodput),
        findings=[
            *(str(error) for error in run.side_errors),
            *(stragglers_of(run.last_trained.ranks) if run.last_trained else []),
        ],
        sections=sections,
        light=_style(COLOURS),
        dark=_style(_DARK),
    )
    # a run folder may hold halves of characters
    text = page.encode("utf-8", "backslashreplace").decode()
    durable.replace_text(durable.Disk(), target / "report.html", text)
    charts = [chart for section in sections for chart in section.charts]
    for chart in charts:
        chart.save(target)
    echo(f"{target / 'report.html'}, and {len(charts)} pictures beside it")


def _style(colours: dict[str, str]) -> str:
    return " ".join(f"{name}: {colour};" for name, colour in colours.items())


def _tiles(run: Run, goodput: Goodput) -> list[tuple[str, str]]:
    """Return the numbers at the top of the page, with what they are."""
    tiles = [(f"{len(run.attempts)}", "attempts" if len(run.attempts) > 1 else "attempt")]
    last = run.last_trained
    chief = None if last is None else last.chief
    if last is not None and chief is not None and chief.n_steps:
        tiles += [
            (f"{max(window.steps[1] for window in chief.windows if window.steps)}", "last step")
        ]
        tiles += [(f"{len(last.ranks)}", "ranks with records")]
        tiles += [
            (_seconds(sum(window.step_s for window in chief.windows) / chief.n_steps), "a step")
        ]
        rows = sum(window.rows for window in chief.windows)
        length_s = sum(window.ended - window.began for window in chief.windows)
        tiles += (
            [(f"{float(f'{rows / length_s:.3g}'):,g}", "rows a second")]
            if rows and length_s > 0
            else []
        )
    tiles += (
        [(f"{100 * goodput.share:.0f} %", "of the time in steps that were kept")]
        if goodput.elapsed_s
        else []
    )
    return tiles


def sections_of(run: Run, goodput: Goodput) -> list[Section]:
    """Return the parts of the page that there are records for."""
    sections = [_metrics_section(run), _curves_section(run)]
    sections += [_ranks_section(run.last_trained), _time_section(goodput), _pace_section(run)]
    sections += [_checkpoints_section(run), _attempts_section(run), _settings_section(run)]
    return [section for section in sections if section is not None]


def _metrics_section(run: Run) -> Section | None:
    from hpcdist.cli.charts import line_chart

    if not run.metrics:
        return None
    resumed = [attempt.first_step for attempt in run.attempts[1:] if attempt.first_step is not None]
    clock = StepClock(run.attempts)
    began = run.attempts[0].began or 0.0
    starts = [
        attempt.began - began
        for attempt in run.attempts[1:]
        if attempt.began is not None and attempt.first_step is not None
    ]
    charts = []
    for number, (name, points) in enumerate(list(run.metrics.items())[:_N_METRICS]):
        file = _file(name, number)
        by_step = {name: points}
        charts.append(
            line_chart(f"{file}-step", f"{name} against step", ("step", name), by_step, resumed)
        )
        times = [
            (at - began, value) for step, value in points if (at := clock.time_of(step)) is not None
        ]
        if times:
            unit, scale = _unit_of(max(at for at, _ in times))
            by_time = {name: [(at / scale, value) for at, value in times]}
            axes = (f"{unit} since the first start", name)
            marks = [at / scale for at in starts]
            charts.append(line_chart(f"{file}-time", f"{name} against time", axes, by_time, marks))
    more = (
        f" {len(run.metrics) - _N_METRICS} more are in metrics.jsonl."
        if len(run.metrics) > _N_METRICS
        else ""
    )
    return Section("Metrics", f"From metrics.jsonl. Dotted lines: restarts.{more}", charts)


def _curves_section(run: Run) -> Section | None:
    from hpcdist.cli.charts import line_chart

    curves = read_curves(run.folder)
    if not curves:
        return None
    charts = []
    for number, curve in enumerate(curves[:_N_CURVES]):
        file = _file(curve.name, number).replace("metric", "curve")
        title = f"{curve.name} of {curve.origin}"
        charts.append(
            line_chart(file, title, (curve.against, curve.name), {curve.name: curve.points})
        )
    more = f" {len(curves) - _N_CURVES} more are there." if len(curves) > _N_CURVES else ""
    return Section(
        "Tables and events",
        f"From files of CSVLogger and TensorBoard in the run folder.{more}",
        charts,
    )


def _ranks_section(attempt: AttemptRecords | None) -> Section | None:
    from hpcdist.cli.charts import bar_chart

    if attempt is None:
        return None
    ranks = [rank for rank in attempt.ranks if rank.n_steps]
    shown = sorted(ranks, key=_own_s, reverse=True)[:_N_RANKS] if len(ranks) > _N_RANKS else ranks
    rows = {
        f"rank {rank.rank}": {part: 1e3 * rank.total[part] / rank.n_steps for part in PARTS}
        for rank in shown
    }
    chart = bar_chart(
        "ranks", f"Attempt {attempt.number}: where the time goes", "ms for each step", rows
    )
    table = [
        [
            f"rank {rank.rank}",
            rank.host,
            f"{rank.n_steps}",
            *(_seconds(rank.total[part] / rank.n_steps) for part in PARTS),
        ]
        for rank in shown
    ]
    head = ["rank", "host", "steps", *PARTS]
    if any(window.stale[1] for rank in ranks for window in rank.windows):
        head += ["staleness", "at most"]
        for row, rank in zip(table, shown, strict=True):
            mean = sum(window.stale[0] for window in rank.windows) / rank.n_steps
            row += [f"{mean:.2f}", f"{max(window.stale[1] for window in rank.windows)}"]
    less = (
        f" Of {len(ranks)} ranks the {len(shown)} with the longest own part."
        if len(shown) < len(ranks)
        else ""
    )
    text = (
        "Communication is time in collectives, waiting for slower ranks included: the rank with the least of it is the "
        f"one that the others wait for. Evaluations, callbacks and agreements are between steps.{less}"
    )
    if len(head) > len(PARTS) + 3:
        text += " Staleness is how many pushes of other workers a push had not seen."
    return Section("Ranks", text, [chart], head, table)


def _own_s(rank: RankRecords) -> float:
    return (rank.total["compute"] + rank.total["input"]) / rank.n_steps


def _time_section(goodput: Goodput) -> Section | None:
    from hpcdist.cli.charts import bar_chart

    if not goodput.elapsed_s:
        return None
    unit, scale = _unit_of(goodput.elapsed_s)
    parts = {name: seconds / scale for name, seconds in goodput.parts.items()}
    chart = bar_chart("goodput", "The whole run", unit, {"run": parts})
    rows = [
        [name, _seconds(s), f"{100 * s / goodput.elapsed_s:.1f} %"]
        for name, s in goodput.parts.items()
    ]
    lost = f" {goodput.n_lost} steps were lost and repeated." if goodput.n_lost else ""
    text = f"From the start of the first process to the last record of the chief.{lost}"
    return Section("Goodput", text, [chart], ["", "time", "share"], rows)


def _pace_section(run: Run) -> Section | None:
    from hpcdist.cli.charts import line_chart

    chiefs = [attempt.chief for attempt in run.attempts if attempt.chief is not None]
    windows = [window for chief in chiefs for window in chief.windows if window.steps]
    if len(windows) < 3:
        return None
    n_joined = -(-len(windows) // _N_POINTS)
    groups = [windows[start : start + n_joined] for start in range(0, len(windows), n_joined)]
    lines: dict[str, list[tuple[float, float]]] = {"longest": [], "mean": []}
    for group in groups:
        at = float(group[-1].steps[1]) if group[-1].steps else 0.0
        lines["longest"].append((at, 1e3 * max(window.longest[1] for window in group)))
        lines["mean"].append(
            (
                at,
                1e3
                * sum(window.step_s for window in group)
                / sum(window.n_steps for window in group),
            )
        )
    chart = line_chart("pace", "Length of a step, on the chief", ("step", "ms"), lines, is_log=True)
    return Section("Pace", "", [chart])


def _checkpoints_section(run: Run) -> Section | None:
    rows = [
        [
            f"{commit.step}",
            f"{attempt.number}",
            f"{commit.nbytes / 1e6:.3g} MB",
            _seconds(commit.took_s),
        ]
        for attempt in run.attempts
        for commit in attempt.commits
    ]
    if not rows:
        return None
    text = "Time from the request until the file was read back. Training waits only while the state is copied."
    truncation_note = " The last 20." if len(rows) > 20 else ""
    return Section(
        "Checkpoints", text + truncation_note, (), ["step", "attempt", "size", "time"], rows[-20:]
    )


def _attempts_section(run: Run) -> Section:
    rows = []
    for attempt in run.attempts:
        unknown = (
            "runs, or died without notice" if attempt is run.attempts[-1] else "died without notice"
        )
        origin = (
            "nothing was restored" if attempt.first_step is None else f"step {attempt.first_step}"
        )
        where = ", ".join(attempt.nodes) or "unknown"
        row = [
            f"{attempt.number}",
            _date(attempt.began),
            attempt.job or "-",
            where,
            origin,
            attempt.end or unknown,
        ]
        rows.append(row)
    head = ["attempt", "began", "job", "nodes", "from", "end"]
    return Section("Attempts", "", (), head, rows, is_text=True)


def _settings_section(run: Run) -> Section | None:
    if not run.config:
        return None
    text = f"Of attempt {run.config_attempt}, from config.json."
    return Section("Started with", text, (), ["", "value", "from"], run.config, is_text=True)


def _file(name: str, number: int) -> str:
    """Return the beginning of a picture's name: numbered, as names of metrics may differ in what none can hold."""
    text = "".join(
        character if character.isascii() and (character.isalnum() or character in "-_") else "-"
        for character in name
    )
    return f"metric-{number + 1}-{text[:40]}"


def _unit_of(seconds: float) -> tuple[str, float]:
    return next(
        (unit, scale)
        for unit, scale in (("hours", 3600.0), ("minutes", 60.0), ("s", 1.0))
        if seconds >= 2 * scale or scale == 1.0
    )


def _seconds(seconds: float) -> str:
    """Return a time as people write it."""
    if seconds >= 120:
        unit, scale = _unit_of(seconds)
        return f"{seconds / scale:.1f} {unit}"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def _date(at: float | None) -> str:
    return (
        "unknown"
        if at is None or not 0 <= at < 1e11
        else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
    )

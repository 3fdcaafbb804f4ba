"""`hpcdist report`: what a run did and where its time went, as one HTML file, and its pictures as PNG files."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpcdist.checkpoint import durable
from hpcdist.cli.run_facts import goodput_of, numbers_of, steps_in_time, stragglers_of
from hpcdist.cli.run_records import PARTS, AttemptRecords, RankRecords, Run, read_run
from hpcdist.errors import ConfigurationError

if TYPE_CHECKING:
    from hpcdist.cli.charts import Chart

#: Ranks that a picture shows: those with the longest own part of a step come first where there are more.
_N_RANKS = 32
#: Metrics that are drawn, each in a picture of its own.
_N_METRICS = 8
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
    "--out", type=click.Path(path_type=Path), help="Folder for the files; default: report, in the run folder."
)
def command(folder: Path, out: Path | None) -> None:
    """Write report.html about the run of a run folder, and its pictures as PNG: one file, which needs no network.

    It shows metrics against steps and time, with marks where the run was started again; where each rank's time goes,
    and which rank others wait for; how much of the time went into steps that were kept; checkpoints, attempts, and what
    the run was started with. It reads files only: the job may be running.

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
    sections = sections_of(run)
    target = out or folder / "report"
    durable.make_folders(durable.Disk(), target)
    template = jinja2.Environment(autoescape=True).from_string((Path(__file__).parent / "report.html").read_text())
    page = template.render(
        title=f"Run {folder}",
        subtitle=_subtitle(run),
        tiles=_tiles(run),
        findings=[line for attempt in run.attempts[-1:] for line in stragglers_of(attempt.ranks)],
        sections=sections,
        light=_style(COLOURS),
        dark=_style(_DARK),
    )
    durable.replace_text(durable.Disk(), target / "report.html", page)
    charts = [chart for section in sections for chart in section.charts]
    for chart in charts:
        chart.save(target)
    click.echo(f"{target / 'report.html'}, and {len(charts)} pictures beside it")


def _style(colours: dict[str, str]) -> str:
    return " ".join(f"{name}: {colour};" for name, colour in colours.items())


def _subtitle(run: Run) -> str:
    said = run.decision
    state = f"{said.get('decision', 'no decision')}: {said.get('reason', 'it has written none')}"
    return f"{state}. Written {time.strftime('%Y-%m-%d %H:%M:%S')}."


def _tiles(run: Run) -> list[tuple[str, str]]:
    """Return the numbers at the top of the page, with what they are."""
    last, goodput = run.attempts[-1], goodput_of(run)
    steps = [one.steps[1] for rank in last.ranks[:1] for one in rank.windows if one.steps]
    found = [(f"{len(run.attempts)}", "attempts" if len(run.attempts) > 1 else "attempt")]
    found += [(f"{steps[-1]}", "last step")] if steps else []
    found += [(f"{len(last.ranks)}", "ranks with records")] if last.ranks else []
    if last.ranks and last.ranks[0].n_steps:
        chief = last.ranks[0]
        step_s = sum(one.step_s for one in chief.windows) / chief.n_steps
        rows, length_s = sum(one.rows for one in chief.windows), sum(one.ended - one.began for one in chief.windows)
        found += [(_seconds(step_s), "a step")]
        found += [(f"{float(f'{rows / length_s:.3g}'):,g}", "rows a second")] if rows and length_s else []
    found += [(f"{100 * goodput.share:.0f} %", "of the time in steps that were kept")] if goodput.elapsed_s else []
    return found


def sections_of(run: Run) -> list[Section]:
    """Return the parts of the page that there are records for."""
    found = [_metrics_section(run), _ranks_section(run.attempts), _time_section(run), _pace_section(run)]
    found += [_checkpoints_section(run), _attempts_section(run), _settings_section(run)]
    return [one for one in found if one is not None]


def _metrics_section(run: Run) -> Section | None:
    from hpcdist.cli.charts import line_chart

    numbers = numbers_of(run.metrics)
    if not numbers:
        return None
    resumed = [one.resumed_step for one in run.attempts[1:]]
    clock, began = steps_in_time(run), run.attempts[0].began or 0.0
    starts = [one.began - began for one in run.attempts[1:] if one.began is not None]
    charts = []
    for name, points in list(numbers.items())[:_N_METRICS]:
        charts.append(
            line_chart(f"{_file(name)}-step", f"{name} against step", ("step", name), {name: points}, resumed)
        )
        times = [(at - began, value) for step, value in points if (at := clock.time_of(step)) is not None]
        if times:
            unit, scale = _unit_of(max(at for at, _ in times))
            line = {name: [(at / scale, value) for at, value in times]}
            marks = [at / scale for at in starts]
            title = f"{name} against time"
            charts.append(
                line_chart(f"{_file(name)}-time", title, (f"{unit} since the first start", name), line, marks)
            )
    more = f" {len(numbers) - _N_METRICS} more are in metrics.jsonl." if len(numbers) > _N_METRICS else ""
    return Section("Metrics", f"From metrics.jsonl. Dotted lines: an attempt resumed.{more}", charts)


def _ranks_section(attempts: Sequence[AttemptRecords]) -> Section | None:
    from hpcdist.cli.charts import bar_chart

    attempt = next((one for one in reversed(attempts) if any(rank.n_steps for rank in one.ranks)), None)
    if attempt is None:
        return None
    ranks = [one for one in attempt.ranks if one.n_steps]
    shown = sorted(ranks, key=_own_s, reverse=True)[:_N_RANKS] if len(ranks) > _N_RANKS else ranks
    rows = {f"rank {one.rank}": {part: 1e3 * one.total[part] / one.n_steps for part in PARTS} for one in shown}
    chart = bar_chart("ranks", f"Attempt {attempt.number}: where the time goes", "ms for each step", rows)
    table = [
        [f"rank {one.rank}", one.host, f"{one.n_steps}", *(_seconds(one.total[part] / one.n_steps) for part in PARTS)]
        for one in shown
    ]
    less = f" Of {len(ranks)} ranks the {len(shown)} with the longest own part." if len(shown) < len(ranks) else ""
    text = (
        "Communication is time in collectives: waiting for a slower rank is a part of it, so the rank with the least "
        f"of it is the one that others wait for. Between steps are evaluations, callbacks and restores.{less}"
    )
    return Section("Ranks", text, [chart], ["rank", "host", "steps", *PARTS], table)


def _own_s(rank: RankRecords) -> float:
    return (rank.total["compute"] + rank.total["input"]) / rank.n_steps


def _time_section(run: Run) -> Section | None:
    from hpcdist.cli.charts import bar_chart

    goodput = goodput_of(run)
    if not goodput.elapsed_s:
        return None
    unit, scale = _unit_of(goodput.elapsed_s)
    parts = {name: seconds / scale for name, seconds in goodput.parts.items()}
    chart = bar_chart("goodput", "The whole run", unit, {"run": parts})
    rows = [[name, _seconds(s), f"{100 * s / goodput.elapsed_s:.1f} %"] for name, s in goodput.parts.items()]
    lost = f" {goodput.n_lost} steps were lost and made again." if goodput.n_lost else ""
    text = f"From the start of the first process to the last record, by the chief.{lost}"
    return Section("Goodput", text, [chart], ["", "time", "share"], rows)


def _pace_section(run: Run) -> Section | None:
    from hpcdist.cli.charts import line_chart

    windows = [one for attempt in run.attempts for rank in attempt.ranks[:1] for one in rank.windows if one.n_steps]
    if len(windows) < 3:
        return None
    n_joined = -(-len(windows) // _N_POINTS)
    groups = [windows[start : start + n_joined] for start in range(0, len(windows), n_joined)]
    lines: dict[str, list[tuple[float, float]]] = {"longest": [], "mean": []}
    for group in groups:
        at = float(group[-1].steps[1]) if group[-1].steps else 0.0
        lines["longest"].append((at, 1e3 * max(one.longest[1] for one in group)))
        lines["mean"].append((at, 1e3 * sum(one.step_s for one in group) / sum(one.n_steps for one in group)))
    chart = line_chart("pace", "Length of a step, on the chief", ("step", "ms"), lines, is_log=True)
    return Section("Pace", "", [chart])


def _checkpoints_section(run: Run) -> Section | None:
    rows = [
        [f"{one['step']}", f"{attempt.number}", f"{one['nbytes'] / 1e6:.3g} MB", _seconds(one["took_s"])]
        for attempt in run.attempts
        for one in attempt.commits
    ]
    if not rows:
        return None
    text = (
        "Time from the request until the file was read back; training goes on meanwhile, but for a copy of the state."
    )
    left = f" The last 20 of {len(rows)}." if len(rows) > 20 else ""
    return Section("Checkpoints", text + left, (), ["step", "attempt", "size", "time"], rows[-20:])


def _attempts_section(run: Run) -> Section:
    rows = []
    for attempt in run.attempts:
        begin, end, resumed = attempt.last("begin") or {}, attempt.last("end"), attempt.last("resume")
        how = f"{end['how']}: {end['reason']}" if end else "runs, or died without notice"
        nodes = ", ".join(str(one) for one in begin.get("nodes", ())) or "unknown"
        origin = f"step {resumed['step']}" if resumed else "a new run"
        rows.append([f"{attempt.number}", _date(attempt.began), str(begin.get("job") or "-"), nodes, origin, how])
    head = ["attempt", "began", "job", "nodes", "from", "end"]
    return Section("Attempts", "", (), head, rows, is_text=True)


def _settings_section(run: Run) -> Section | None:
    if not run.config:
        return None
    rows = [["program", " ".join(str(one) for one in run.config.get("program", ())), ""]]
    rows += [["hosts", ", ".join(f"{name} ({ranks})" for name, ranks in run.config.get("hosts", {}).items()), ""]]
    rows += [
        [name, str(one.get("value")), str(one.get("from"))] for name, one in run.config.get("settings", {}).items()
    ]
    rows += [[name, str(value), ""] for name, value in run.config.get("versions", {}).items() if value is not None]
    text = f"Of attempt {run.config.get('attempt')}, from config.json."
    return Section("Started with", text, (), ["", "value", "from"], rows, is_text=True)


def _file(name: str) -> str:
    return "".join(one if one.isalnum() or one in "-_" else "-" for one in name)


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
    return "unknown" if at is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))

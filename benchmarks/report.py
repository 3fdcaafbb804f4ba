"""The report of a benchmark: a table on the screen, raw samples as JSON, a log-log picture."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from command_line import write_json
from harness import (
    AGAIN,
    Block,
    Samples,
    bootstrap_interval,
    gate_ratio,
    median_of_rounds,
    paired_ratios,
    passes_gate,
    per_round,
    run_rounds,
    strongest,
)

#: A case of a report, with the entries that `case` makes.
Case = dict[str, Any]
#: A report: its label, its environment and its cases.
Report = dict[str, Any]
#: (case, contender) -> labels of launches.
Labels = dict[tuple[str, str], set[str]]
#: The lines of a picture, one for each launch.
_LINES = ("o-", "s--", "^:")
#: The columns of a table: a contender and its times; its factor, the interval, and the difference.
_TIMES = "  {:44s} {:>10s} {:>10s}"
_FACTORS = "  {:>6s} {:14s} {:>10s}"
_HEADER = _TIMES.format("", "wall", "CPU") + _FACTORS.format(
    "factor", "95 % interval", "difference"
)


def case(
    name: str,
    samples: Samples,
    cpu: Samples,
    baselines: list[str],
    nbytes: int | None = None,
) -> Case:
    """Return one case of a report.

    Args:
        name: name of the case.
        samples: contender -> wall seconds per call or step, round by round.
        cpu: contender -> CPU-seconds per call or step, round by round.
        baselines: names of the contenders that others are compared with.
        nbytes: bytes that a call sums; None if calls do not differ by bytes.
    """
    return {
        "case": name,
        "bytes": nbytes,
        "baselines": baselines,
        "samples": samples,
        "cpu": cpu,
    }


def compare(
    name: str,
    blocks: dict[str, Block],
    baselines: list[str],
    n_rounds: int,
    nbytes: int | None = None,
) -> Case:
    """Run contenders in turn, and the first baseline under two names; return the case.

    Args:
        name: name of the case.
        blocks: contender -> function that runs a block.
        baselines: names of the contenders that others are compared with.
        n_rounds: number of rounds.
        nbytes: see `case`.
    """
    timed_baselines = [baseline for baseline in baselines if baseline in blocks]
    reference = timed_baselines[0]
    blocks[reference + AGAIN] = blocks[reference]
    wall, cpu = run_rounds(blocks, n_rounds)
    return case(name, wall, cpu, baselines, nbytes)


def table(measured_case: Case) -> str:
    """Return the rows of a case, the strongest baseline first, then by time.

    The factor tells how many times faster a contender is than the strongest baseline, with its 95 % interval; the
    difference is in time. There are no factors if the gate is not passed.
    """
    samples = measured_case["samples"]
    first = strongest(samples, measured_case["baselines"])
    ratio = gate_ratio(samples)
    is_quotable = passes_gate(ratio)
    places = {}
    for name, times in samples.items():
        if not name.endswith(AGAIN):
            places[name] = (name != first, median_of_rounds(times))
    title = measured_case["case"]
    verdict = _verdict(ratio)
    lines = [f"{title}: {verdict}", _HEADER]
    for name in sorted(places, key=places.__getitem__):
        row = _row(name, measured_case, first, is_quotable)
        lines.append(row)
    return "\n".join(lines)


def _verdict(ratio: float | None) -> str:
    """Return whether the gate is passed, as text."""
    if ratio is None:
        return "NOISY? the same code was not run on both sides: no factors"
    verdict = "passed" if passes_gate(ratio) else "DISCARDED, the machine was too noisy: no factors"
    return f"A/A {ratio:.3f}, {verdict}"


def _row(name: str, measured_case: Case, first: str, is_quotable: bool) -> str:
    """Return the row of a contender.

    Args:
        name: name of the contender.
        measured_case: case of a report.
        first: name of the strongest baseline.
        is_quotable: whether the gate is passed, so that a factor may be shown.
    """
    wall_samples = measured_case["samples"][name]
    cpu_samples = measured_case["cpu"][name]
    wall = duration(median_of_rounds(wall_samples))
    cpu = duration(median_of_rounds(cpu_samples))
    row = _TIMES.format(name, wall, cpu)
    if not is_quotable:
        return row
    if name == first:
        return f"{row}    1.00 strongest baseline"
    first_samples = measured_case["samples"][first]
    ratios = paired_ratios(first_samples, wall_samples)
    interval = bootstrap_interval(ratios)
    factor = f"{interval.median:.2f}"
    bounds = f"{interval.low:.2f} .. {interval.high:.2f}"
    differences = per_round(wall_samples) - per_round(first_samples)
    difference = float(np.median(differences))
    sign = "+" if difference > 0 else "-"
    difference_text = sign + duration(abs(difference))
    return row + _FACTORS.format(factor, bounds, difference_text)


def duration(seconds: float) -> str:
    """Return a time with three digits and its unit."""
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "us")):
        value = seconds * factor
        if value >= 1000:
            return f"{value:.0f} {unit}"
        if value >= 1 or unit == "us":
            return f"{value:.3g} {unit}"
    raise AssertionError("the last unit takes everything")


def merge(reports: list[Report]) -> list[Case]:
    """Return the cases of several launches side by side, as if they had been one.

    Rounds of launches with the same label follow each other. A name that two labels share gets its label added. Rounds
    are paired by their number, so launches should take turns. A merged case has the baselines of all launches.
    """
    labels_of = _labels_of_names(reports)
    merged: dict[str, Case] = {}
    for report in reports:
        label = report["label"]
        for measured_case in report["cases"]:
            title = measured_case["case"]
            if title not in merged:
                nbytes = measured_case["bytes"]
                merged[title] = case(title, {}, {}, [], nbytes)
            for name in measured_case["samples"]:
                labels = labels_of[title, name]
                new_name = _labelled(name, label, labels)
                _add(merged[title], measured_case, name, new_name)
    for measured_case in merged.values():
        _cut_to_shortest(measured_case)
    return list(merged.values())


def _labels_of_names(reports: list[Report]) -> Labels:
    """Return (case, contender) -> labels of the launches that timed it."""
    labels_of: Labels = defaultdict(set)
    for report in reports:
        label = report["label"]
        for measured_case in report["cases"]:
            title = measured_case["case"]
            for name in measured_case["samples"]:
                labels_of[title, name].add(label)
    return labels_of


def _labelled(name: str, label: str, labels: set[str]) -> str:
    """Return the name of a contender in a merged case, with its label if there are several."""
    if len(labels) == 1:
        return name
    if name.endswith(AGAIN):
        first_name = name.removesuffix(AGAIN)
        return f"{first_name} [{label}]{AGAIN}"
    return f"{name} [{label}]"


def _add(
    target: Case,
    source: Case,
    name: str,
    new_name: str,
) -> None:
    """Add the samples of a contender to a merged case."""
    for kind in ("samples", "cpu"):
        samples = target[kind].setdefault(new_name, [])
        samples.extend(source[kind][name])
    if name in source["baselines"] and new_name not in target["baselines"]:
        target["baselines"].append(new_name)


def _cut_to_shortest(measured_case: Case) -> None:
    """Drop the last rounds of contenders that have more rounds than others."""
    n_rounds = min(map(len, measured_case["samples"].values()))
    for kind in ("samples", "cpu"):
        for name, values in measured_case[kind].items():
            measured_case[kind][name] = values[:n_rounds]


def publish_merged(paths: list[Path], folder: Path, stem: str) -> None:
    """Publish the cases of several launches side by side, given the files of their reports."""
    reports = [json.loads(path.read_text()) for path in paths]
    environments = [report["environment"] for report in reports]
    cases = merge(reports)
    publish(
        {"label": "merged", "environment": environments, "cases": cases},
        folder,
        stem,
    )


def publish(report: Report, folder: Path, stem: str) -> None:
    """Print the tables and write `stem`.json and `stem`.png to the folder. On rank 0 only."""
    path = write_json(folder, stem, report)
    tables = map(table, report["cases"])
    print("\n\n".join(tables), flush=True)
    outcome = picture(report, folder / f"{stem}.png")
    print(f"raw samples: {path}; {outcome}", flush=True)


def picture(report: Report, path: Path) -> str:
    """Draw time against bytes, or without bytes against cases, log-log; return a text about the outcome."""
    try:
        import matplotlib as mpl
    except ImportError:
        return "no picture: matplotlib is not installed (pip install 'hpcdist[report]')"
    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 6), layout="constrained")
    places_of: dict[str, list[Any]] = defaultdict(list)
    times_of: dict[str, list[float]] = defaultdict(list)
    sizes = []
    for measured_case in report["cases"]:
        nbytes = measured_case["bytes"]
        sizes.append(nbytes)
        for name, samples in measured_case["samples"].items():
            if not name.endswith(AGAIN):
                places_of[name].append(nbytes or measured_case["case"])
                times_of[name].append(median_of_rounds(samples))
    colors: dict[str, int] = {}
    styles: dict[str, int] = {}
    for name, places in places_of.items():
        contender, _, label = name.partition(" [")  # the label of the launch, in merged reports
        color_number = colors.setdefault(contender, len(colors))
        color = f"C{color_number}"
        style = styles.setdefault(label, len(styles))
        line = _LINES[style % len(_LINES)]
        axes.plot(places, times_of[name], line, color=color, label=name, markersize=4)
    axes.set_yscale("log")
    if all(sizes):
        axes.set_xscale("log", base=2)
    if sizes[0]:
        axes.set_xlabel("bytes per rank")
    axes.set_ylabel("seconds (slowest rank, median)")
    axes.legend(fontsize="small")
    axes.grid(True, which="both", alpha=0.3)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return f"picture: {path}"

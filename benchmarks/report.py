"""The report of a benchmark: a table on the screen, raw samples as JSON, a log-log picture."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from harness import (
    AGAIN,
    Samples,
    bootstrap_interval,
    gate_ratio,
    median_of_rounds,
    paired_ratios,
    passes_gate,
    per_round,
    strongest,
)

#: A case of a report, with the entries that `case` makes.
Case = dict[str, Any]
#: A report: its label, its environment and its cases.
Report = dict[str, Any]
_TIME_COLUMNS = f"{'wall':>10s} {'CPU':>10s}"
_FACTOR_COLUMNS = f"{'factor':>6s} {'95 % interval':14s} {'difference':>10s}"
_HEADER = f"  {'':44s} {_TIME_COLUMNS}  {_FACTOR_COLUMNS}"


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
    return {"case": name, "bytes": nbytes, "baselines": baselines, "samples": samples, "cpu": cpu}


def table(measured_case: Case) -> str:
    """Return the rows of a case, the strongest baseline first, then by time.

    The factor tells how many times faster a contender is than the strongest baseline, with its 95 % interval; the
    difference is in time. There are no factors if the gate is not passed.
    """
    samples = measured_case["samples"]
    first = strongest(samples, measured_case["baselines"])
    ratio = gate_ratio(samples)
    names = [name for name in samples if not name.endswith(AGAIN)]
    names.sort(key=lambda name: (name != first, median_of_rounds(samples[name])))
    lines = [f"{measured_case['case']}: {_verdict(ratio)}", _HEADER]
    for name in names:
        lines.append(_row(name, measured_case, first, passes_gate(ratio)))
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
    samples = measured_case["samples"]
    wall = duration(median_of_rounds(samples[name]))
    cpu = duration(median_of_rounds(measured_case["cpu"][name]))
    row = f"  {name:44s} {wall:>10s} {cpu:>10s}"
    if not is_quotable:
        return row
    if name == first:
        return f"{row}  {'1.00':>6s} strongest baseline"
    interval = bootstrap_interval(paired_ratios(samples[first], samples[name]))
    bounds = f"{interval.low:.2f} .. {interval.high:.2f}"
    differences = per_round(samples[name]) - per_round(samples[first])
    difference = float(np.median(differences))
    sign = "+" if difference > 0 else "-"
    difference_text = sign + duration(abs(difference))
    return f"{row}  {interval.median:6.2f} {bounds:14s} {difference_text:>10s}"


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
        for measured_case in report["cases"]:
            title = measured_case["case"]
            if title not in merged:
                merged[title] = case(title, {}, {}, [], measured_case["bytes"])
            for name in measured_case["samples"]:
                new_name = _labelled(name, report["label"], labels_of[title, name])
                _add(merged[title], measured_case, name, new_name)
    for measured_case in merged.values():
        _cut_to_shortest(measured_case)
    return list(merged.values())


def _labels_of_names(reports: list[Report]) -> dict[tuple[str, str], set[str]]:
    """Return (case, contender) -> labels of the launches that timed it."""
    labels_of: dict[tuple[str, str], set[str]] = {}
    for report in reports:
        for measured_case in report["cases"]:
            for name in measured_case["samples"]:
                labels = labels_of.setdefault((measured_case["case"], name), set())
                labels.add(report["label"])
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


def publish(report: Report, folder: Path, stem: str) -> None:
    """Print the tables and write `stem`.json and `stem`.png to the folder. On rank 0 only."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{stem}.json"
    path.write_text(json.dumps(report, indent=1))
    tables = [table(measured_case) for measured_case in report["cases"]]
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
    cases_of: dict[str, list[Case]] = {}
    for measured_case in report["cases"]:
        for name in measured_case["samples"]:
            if not name.endswith(AGAIN):
                cases_of.setdefault(name, []).append(measured_case)
    colors: dict[str, int] = {}
    styles: dict[str, int] = {}
    for name, cases in cases_of.items():
        places = [measured_case["bytes"] or measured_case["case"] for measured_case in cases]
        times = [median_of_rounds(measured_case["samples"][name]) for measured_case in cases]
        contender, _, label = name.partition(" [")  # the label of the launch, in merged reports
        color = colors.setdefault(contender, len(colors))
        style = styles.setdefault(label, len(styles))
        line = ("o-", "s--", "^:")[style % 3]
        axes.plot(places, times, line, color=f"C{color}", label=name, markersize=4)
    axes.set_yscale("log")
    if all(measured_case["bytes"] for measured_case in report["cases"]):
        axes.set_xscale("log", base=2)
    first_case = report["cases"][0]
    axes.set_xlabel("bytes per rank" if first_case["bytes"] else "")
    axes.set_ylabel("seconds (slowest rank, median)")
    axes.legend(fontsize="small")
    axes.grid(True, which="both", alpha=0.3)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return f"picture: {path}"

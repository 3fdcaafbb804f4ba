"""What a benchmark leaves behind: a table on the screen, raw samples as JSON, a log-log picture."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from harness import (
    AGAIN,
    Samples,
    bootstrap_interval,
    gate_ratio,
    paired_ratios,
    passes_gate,
    per_round,
    strongest,
)


def case(
    name: str, samples: Samples, cpu: Samples, baselines: list[str], nbytes: int | None = None
) -> dict[str, Any]:
    """Return one case of a report: what was timed, in seconds per call or step, round by round."""
    return {"case": name, "bytes": nbytes, "baselines": baselines, "samples": samples, "cpu": cpu}


def table(measured_case: dict[str, Any]) -> str:
    """Return the rows of a case, the strongest baseline first, then by time.

    The factor is how many times faster than the strongest baseline, with its 95 % interval; the difference is in time.
    Where the gate is not passed there is no factor.
    """
    samples = measured_case["samples"]
    first = strongest(measured_case["samples"], measured_case["baselines"])
    ratio = gate_ratio(samples)
    shown = [name for name in samples if not name.endswith(AGAIN)]
    shown.sort(key=lambda name: (name != first, float(np.median(per_round(samples[name])))))
    lines = [f"{measured_case['case']}: {_verdict(ratio)}"]
    lines.append(
        f"  {'':44s} {'wall':>10s} {'CPU':>10s}  {'factor':>6s} {'95 % interval':14s} {'difference':>10s}"
    )
    lines += [_row(name, measured_case, first, passes_gate(ratio)) for name in shown]
    return "\n".join(lines)


def _verdict(ratio: float | None) -> str:
    if ratio is None:
        return "NOISY? the same code was not run on both sides: no factors"
    verdict = "passed" if passes_gate(ratio) else "DISCARDED, the machine was too noisy: no factors"
    return f"A/A {ratio:.3f}, {verdict}"


def _row(name: str, measured_case: dict[str, Any], first: str, is_quotable: bool) -> str:
    samples = measured_case["samples"]
    wall, cpu = (
        float(np.median(per_round(values[name]))) for values in (samples, measured_case["cpu"])
    )
    row = f"  {name:44s} {duration(wall):>10s} {duration(cpu):>10s}"
    if not is_quotable:
        return row
    if name == first:
        return f"{row}  {'1.00':>6s} strongest baseline"
    interval = bootstrap_interval(paired_ratios(samples[first], samples[name]))
    difference = float(np.median(per_round(samples[name]) - per_round(samples[first])))
    bounds = f"{interval.low:.2f} .. {interval.high:.2f}"
    sign = "+" if difference > 0 else "-"
    return f"{row}  {interval.median:6.2f} {bounds:14s} {sign + duration(abs(difference)):>10s}"


def duration(seconds: float) -> str:
    """Return a time with three digits and its unit."""
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "us")):
        if seconds * factor >= 1 or unit == "us":
            return (
                f"{seconds * factor:.3g} {unit}"
                if seconds * factor < 1000
                else f"{seconds * factor:.0f} {unit}"
            )
    raise AssertionError("the last unit takes everything")


def merge(reports: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the cases of several launches side by side, as if they had been one.

    Rounds of launches with the same label follow each other. A name that two labels share gets its label added. Rounds
    are paired by their number, so launches should take turns. Of a case, the baselines of all launches count.
    """
    labels_of: dict[tuple[str, str], list[str]] = {}
    for report in reports:
        for measured_case in report["cases"]:
            for name in measured_case["samples"]:
                labels = labels_of.setdefault((measured_case["case"], name), [])
                labels += [report["label"]] if report["label"] not in labels else []
    merged: dict[str, dict[str, Any]] = {}
    for report in reports:
        for measured_case in report["cases"]:
            target = merged.setdefault(
                measured_case["case"],
                case(measured_case["case"], {}, {}, [], measured_case["bytes"]),
            )
            for name in measured_case["samples"]:
                _add(
                    target,
                    measured_case,
                    name,
                    _labelled(name, report["label"], labels_of[measured_case["case"], name]),
                )
    for measured_case in merged.values():
        _cut_to_shortest(measured_case)
    return list(merged.values())


def _labelled(name: str, label: str, labels: list[str]) -> str:
    if len(labels) == 1:
        return name
    return (
        f"{name[: -len(AGAIN)]} [{label}]{AGAIN}" if name.endswith(AGAIN) else f"{name} [{label}]"
    )


def _add(target: dict[str, Any], source: dict[str, Any], name: str, new_name: str) -> None:
    for kind in ("samples", "cpu"):
        target[kind].setdefault(new_name, []).extend(source[kind][name])
    if name in source["baselines"] and new_name not in target["baselines"]:
        target["baselines"].append(new_name)


def _cut_to_shortest(measured_case: dict[str, Any]) -> None:
    n_rounds = min(len(values) for values in measured_case["samples"].values())
    for kind in ("samples", "cpu"):
        measured_case[kind] = {
            name: values[:n_rounds] for name, values in measured_case[kind].items()
        }


def publish(report: dict[str, Any], folder: Path, stem: str) -> None:
    """Print the tables and write `stem`.json and `stem`.png to the folder. Rank 0 only."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{stem}.json"
    path.write_text(json.dumps(report, indent=1))
    print("\n\n".join(table(measured_case) for measured_case in report["cases"]), flush=True)
    print(f"raw samples: {path}; {picture(report, folder / f'{stem}.png')}", flush=True)


def picture(report: dict[str, Any], path: Path) -> str:
    """Draw time against bytes (or, without bytes, one bar per contender), log-log; return what became of it."""
    try:
        import matplotlib as mpl
    except ImportError:
        return "no picture: matplotlib is not installed (pip install 'hpcdist[report]')"
    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 6), layout="constrained")
    contenders: dict[str, int] = {}
    labels: dict[str, int] = {}
    names = dict.fromkeys(
        name
        for measured_case in report["cases"]
        for name in measured_case["samples"]
        if not name.endswith(AGAIN)
    )
    for name in names:
        cases = [
            measured_case for measured_case in report["cases"] if name in measured_case["samples"]
        ]
        places = [measured_case["bytes"] or measured_case["case"] for measured_case in cases]
        times = [np.median(per_round(measured_case["samples"][name])) for measured_case in cases]
        contender, _, label = name.partition(" [")  # of merged reports: the launch
        color = f"C{contenders.setdefault(contender, len(contenders))}"
        style = ("o-", "s--", "^:")[labels.setdefault(label, len(labels)) % 3]
        axes.plot(places, times, style, color=color, label=name, markersize=4)
    axes.set_yscale("log")
    if all(measured_case["bytes"] for measured_case in report["cases"]):
        axes.set_xscale("log", base=2)
    axes.set(
        xlabel="bytes per rank" if report["cases"][0]["bytes"] else "",
        ylabel="seconds (slowest rank, median)",
    )
    axes.legend(fontsize="small")
    axes.grid(True, which="both", alpha=0.3)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return f"picture: {path}"

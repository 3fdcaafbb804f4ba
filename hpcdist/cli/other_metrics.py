"""Metrics that a program has left beside metrics.jsonl: tables of CSVLogger, and events for TensorBoard."""

import contextlib
import csv
import io
import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from hpcdist.checkpoint.read import read_text
from hpcdist.training.event_file import read_scalars

#: Files are looked for this many folders below the run folder, and this many are read.
_MAX_DEPTH = 3
_MAX_FILES = 32
#: Longest file that is read.
_MAX_BYTES = 64 << 20


class Curve(NamedTuple):
    """A metric of one file: its name, where it is from, what it is against, and its points."""

    name: str
    origin: str
    against: str
    points: list[tuple[int, float]]


def read_curves(folder: Path) -> list[Curve]:
    """Return the metrics of tables and events in a run folder; those of broken files are left out. Reads only."""
    curves: list[Curve] = []
    for path in _files(folder, "*.csv"):
        curves += _curves_of_table(path, str(path.relative_to(folder)))
    event_folders = sorted({path.parent for path in _files(folder, "events.out.tfevents.*")})
    for event_folder in event_folders:
        curves += _curves_of_events(event_folder, str(event_folder.relative_to(folder)))
    return curves


def _files(folder: Path, pattern: str) -> Iterator[Path]:
    patterns = ["/".join(["*"] * depth + [pattern]) for depth in range(_MAX_DEPTH + 1)]
    paths = itertools.chain(*(sorted(folder.glob(one_level)) for one_level in patterns))
    return itertools.islice((path for path in paths if path.is_file()), _MAX_FILES)


def _curves_of_table(path: Path, origin: str) -> list[Curve]:
    """Return the columns of a table whose first column is the epoch, as CSVLogger writes it."""
    try:
        text = read_text(path, _MAX_BYTES, errors="replace")
        dialect = (
            csv.Sniffer().sniff(text.partition("\n")[0], ",;\t") if "\n" in text else csv.excel
        )
        rows = list(csv.DictReader(io.StringIO(text, newline=""), dialect=dialect))
    except (OSError, ValueError, csv.Error):
        return []
    names = list(rows[0]) if rows else []
    if not names or names[0] != "epoch":
        return []
    curves: list[Curve] = []
    for name in names[1:]:
        points = [
            point
            for row in rows
            if (point := _point_of(row.get("epoch"), row.get(name))) is not None
        ]
        if name and points:
            curves.append(Curve(name, origin, "epoch", points))
    return curves


def _point_of(epoch: str | None, value: str | None) -> tuple[int, float] | None:
    """Return a point; None for fields that are no numbers, such as NA."""
    with contextlib.suppress(ValueError, TypeError):
        number = float(value or "")
        if math.isfinite(number):
            return int(epoch or ""), number
    return None


def _curves_of_events(folder: Path, origin: str) -> list[Curve]:
    """Return the scalars of event files, as TensorBoard shows them; none without the package tensorboard."""
    curves: list[Curve] = []
    for tag, scalars in read_scalars(folder).items():
        points = [(step, value) for step, value in scalars if math.isfinite(value)]
        if points:
            curves.append(Curve(tag, origin, "step", points))
    return curves

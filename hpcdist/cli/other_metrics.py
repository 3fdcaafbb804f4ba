"""Metrics that a program has left beside metrics.jsonl: tables of CSVLogger, and events for TensorBoard."""

import contextlib
import csv
import io
import itertools
import math
from pathlib import Path
from typing import NamedTuple

from hpcdist.checkpoint.read import read_text
from hpcdist.training.event_file import read_scalars

#: Files are searched this many folders below the run folder, and this many are read.
_MAX_DEPTH = 3
_MAX_FILES = 32
#: Longest file that is read.
_MAX_BYTES = 64 << 20


class Curve(NamedTuple):
    """A metric of one file.

    Attributes:
        name: name of the metric.
        origin: path of its file or folder, in the run folder.
        against: quantity on the first axis: "epoch" or "step".
        points: epochs or steps with the values of the metric.
    """

    name: str
    origin: str
    against: str
    points: list[tuple[int, float]]


def read_curves(folder: Path) -> list[Curve]:
    """Return the metrics of tables and events in a run folder. Broken files are left out. Reads only."""
    curves: list[Curve] = []
    for table in _find_files(folder, "*.csv"):
        origin = str(table.relative_to(folder))
        curves += _curves_of_table(table, origin)
    event_folders = {path.parent for path in _find_files(folder, "events.out.tfevents.*")}
    for event_folder in sorted(event_folders):
        origin = str(event_folder.relative_to(folder))
        curves += _curves_of_events(event_folder, origin)
    return curves


def _find_files(folder: Path, pattern: str) -> list[Path]:
    """Return the first files whose names fit a pattern, in a folder before the folders below it."""
    paths: list[Path] = []
    for depth in range(_MAX_DEPTH + 1):
        paths += sorted(folder.glob("*/" * depth + pattern))
    files = filter(Path.is_file, paths)
    return list(itertools.islice(files, _MAX_FILES))


def _curves_of_table(path: Path, origin: str) -> list[Curve]:
    """Return the columns of a table whose first column is the epoch, as CSVLogger writes it."""
    try:
        text = read_text(path, _MAX_BYTES, errors="replace")
        rows = _rows_of_table(text)
    except (OSError, ValueError, csv.Error):
        return []
    names = list(rows[0]) if rows else []
    if not names or names[0] != "epoch":
        return []
    curves: list[Curve] = []
    for name in names[1:]:
        points: list[tuple[int, float]] = []
        for row in rows:
            point = _point_of(row.get("epoch"), row.get(name))
            if point is not None:
                points.append(point)
        if name and points:
            curves.append(Curve(name, origin, "epoch", points))
    return curves


def _rows_of_table(text: str) -> list[dict[str, str]]:
    """Return the fields of each row of a table by the names of their columns.

    Raises:
        csv.Error: for a text that is no table.
    """
    dialect: type[csv.Dialect] = csv.excel
    head, line_break, _ = text.partition("\n")
    if line_break:
        dialect = csv.Sniffer().sniff(head, ",;\t")
    return list(csv.DictReader(io.StringIO(text, newline=""), dialect=dialect))


def _point_of(epoch: str | None, value: str | None) -> tuple[int, float] | None:
    """Return a point. None for fields that are no numbers, such as NA."""
    with contextlib.suppress(ValueError, TypeError):
        number = float(value or "")
        if math.isfinite(number):
            return int(epoch or ""), number
    return None


def _curves_of_events(folder: Path, origin: str) -> list[Curve]:
    """Return the scalars of event files, as TensorBoard shows them. Empty without the package tensorboard."""
    curves: list[Curve] = []
    for tag, scalars in read_scalars(folder).items():
        points = [(step, value) for step, value in scalars if math.isfinite(value)]
        if points:
            curves.append(Curve(tag, origin, "step", points))
    return curves

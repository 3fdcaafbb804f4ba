"""The pictures of a report, by matplotlib: as SVG whose colours a page sets, for light and dark, and as PNG."""

import io
import operator
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

from hpcdist.checkpoint import durable

matplotlib.use("agg")

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

#: Colours of PNG files; in the page each becomes a CSS variable. Series stay distinct with red-green colour blindness.
COLOURS = {
    "--text": "#1d1d22",
    "--muted": "#6b6b74",
    "--line": "#d9d9de",
    "--series-1": "#2a78d6",
    "--series-2": "#1baf7a",
    "--series-3": "#eda100",
    "--series-4": "#8a3ffc",
    "--series-5": "#e34948",
}
SERIES = [colour for name, colour in COLOURS.items() if name.startswith("--series")]
#: All pictures have this width, and fill a card of one width, so that type has one size.
_WIDTH_IN = 5.2
_FONT_SIZE = 10.5
_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "hpcdist",
    "font.size": _FONT_SIZE,
    "axes.labelsize": _FONT_SIZE,
    "xtick.labelsize": _FONT_SIZE,
    "ytick.labelsize": _FONT_SIZE,
    "legend.fontsize": _FONT_SIZE,
    "text.parse_math": False,
    "text.color": COLOURS["--text"],
    "axes.labelcolor": COLOURS["--text"],
    "axes.edgecolor": COLOURS["--line"],
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": COLOURS["--line"],
    "xtick.color": COLOURS["--muted"],
    "ytick.color": COLOURS["--muted"],
    "legend.frameon": False,
}


@dataclass(frozen=True)
class Chart:
    """A picture with a title, as SVG for a page, and as a PNG file."""

    name: str
    title: str
    figure: Figure

    @property
    def svg(self) -> str:
        """The picture for a page whose style has the variables of `COLOURS`."""
        buffer = io.StringIO()
        self._save(buffer, format="svg", transparent=True, metadata={"Date": None})
        text = buffer.getvalue()
        text = text[text.index("<svg") :]
        for name, colour in COLOURS.items():
            text = text.replace(colour, f"var({name})")
        return text

    def save(self, folder: Path) -> Path:
        """Write the picture as PNG, in place of any file or link of its name; return its path."""
        path = folder / f"{self.name}.png"
        content = io.BytesIO()
        self._save(content, format="png", dpi=150, facecolor="white")
        durable.replace_file(durable.Disk(), path, [(0, content.getbuffer())])
        return path

    def _save(self, target: Any, **options: Any) -> None:
        with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph .* missing")  # a page has the reader's fonts
            self.figure.savefig(target, **options)


def line_chart(
    name: str,
    title: str,
    axes: tuple[str, str],
    lines: Mapping[str, Sequence[tuple[float, float]]],
    marks: Sequence[float] = (),
    is_log: bool = False,
) -> Chart:
    """Return lines over one axis, with vertical marks where the run was started again.

    Args:
        name: name of the file, without its suffix.
        title: title of the picture.
        axes: labels of the two axes.
        lines: points of each line, by its name. At most five lines.
        marks: places on the first axis where attempts resumed.
        is_log: whether values are drawn by their logarithm.
    """
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTH_IN, 2.6), layout="constrained")
        plot = figure.subplots()
        for (label, points), colour in zip(lines.items(), SERIES, strict=False):
            coordinates = zip(*points, strict=True)
            marker = "o" if len(points) == 1 else ""
            plot.plot(*coordinates, color=colour, linewidth=1.6, marker=marker, label=label)
        label_of_marks: str | None = "restart"
        for mark in marks:
            plot.axvline(
                mark,
                color=COLOURS["--muted"],
                linestyle=":",
                linewidth=1.2,
                label=label_of_marks,
            )
            label_of_marks = None  # the legend has one entry for all marks
        plot.set(xlabel=axes[0], ylabel=axes[1])
        if is_log:
            plot.set_yscale("log")
            plot.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            plot.yaxis.set_major_formatter("{x:g}")
            plot.yaxis.set_minor_formatter(NullFormatter())
        if len(lines) > 1 or marks:
            figure.legend(loc="outside upper right", ncols=4)
    return Chart(name, title, figure)


def bar_chart(
    name: str,
    title: str,
    unit: str,
    rows: Mapping[str, Mapping[str, float]],
) -> Chart:
    """Return a horizontal bar for each row, divided into its parts.

    Args:
        name: name of the file, without its suffix.
        title: title of the picture.
        unit: unit of the values.
        rows: value of each part, by row. All rows have the same parts.
    """
    parts = list(next(iter(rows.values())))
    legend_in = 0.2 * (len(parts) // 2)
    bars_in = 0.3 * len(rows)
    height_in = 1.2 + legend_in + bars_in
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTH_IN, height_in), layout="constrained")
        plot = figure.subplots()
        bar_ends = [0.0] * len(rows)
        for part, colour in zip(parts, _part_colours(len(parts)), strict=True):
            values = [row[part] for row in rows.values()]
            plot.barh(
                list(rows),
                values,
                left=bar_ends,
                height=0.62,
                color=colour,
                label=part,
            )
            bar_ends = list(map(operator.add, bar_ends, values))
        plot.invert_yaxis()
        plot.grid(visible=False, axis="y")
        plot.set(xlabel=unit)
        n_columns = 3 if max(map(len, parts)) < 16 else 2
        figure.legend(loc="outside upper left", ncols=n_columns)
    return Chart(name, title, figure)


def _part_colours(n: int) -> list[str]:
    """Return `n` colours: the colours of the series first, then greys."""
    colours = [*SERIES, COLOURS["--muted"], COLOURS["--line"]]
    return colours[:n]

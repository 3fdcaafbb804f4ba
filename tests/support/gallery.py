"""Runs the programs of jobs/ and writes a page about each to docs/gallery/: `make gallery`, three minutes.

    python tests/support/gallery.py [NAME ...]

A page has what the program shows, its command, how long it took, what it printed, and a picture: the curve that its
lines or its TensorBoard files give, or bars of several commands.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "gallery"
TIMEOUT_S = 300
#: Lines of output on a page; more are cut in the middle.
MAX_LINES = 14
WIDTH = 640
HEIGHT = 240
MARGIN = 46
STYLE = """
svg { font: 12px system-ui, sans-serif; }
text { fill: #57606a; }
line { stroke: #d8dee4; }
rect { fill: #0969da; }
polyline { fill: none; stroke: #0969da; stroke-width: 2; stroke-linejoin: round; }
@media (prefers-color-scheme: dark) {
text { fill: #9aa4af; }
line { stroke: #30363d; }
rect { fill: #58a6ff; }
polyline { stroke: #58a6ff; }
}
"""
Point = tuple[float, float]


@dataclass(frozen=True)
class Job:
    """A program of jobs/, and what its page says.

    Attributes:
        name: name of the file, without its ending.
        title: title of the page.
        text: what the program shows, as Markdown.
        arguments: its arguments, as they are typed.
        n_ranks: number of ranks.
        curve: pattern of its lines with two numbers, x and y; empty if it prints no series.
        scalars: folder of TensorBoard files and the name of a series in them, in place of a curve.
        variants: label -> further arguments, of commands that are compared; empty for one command.
        bar: pattern of the lines of a variant with the number that is compared.
        axes: what x and y are; of bars only the second one counts.
    """

    name: str
    title: str
    text: str
    arguments: str = ""
    n_ranks: int = 2
    curve: str = ""
    scalars: tuple[str, str] | None = None
    variants: tuple[tuple[str, str], ...] = ()
    bar: str = ""
    axes: tuple[str, str] = ("epoch", "loss")

    @property
    def commands(self) -> list[str]:
        """The commands as they are typed."""
        start = f"mpirun -n {self.n_ranks} python jobs/{self.name}.py {self.arguments}".rstrip()
        if not self.variants:
            return [start]
        return [f"{start} {more}".rstrip() for _, more in self.variants]

    @property
    def has_picture(self) -> bool:
        """Whether its results are a series, or numbers to compare."""
        return bool(self.curve or self.scalars or self.variants)


@dataclass(frozen=True)
class Outcome:
    """What a command printed, and how long it took."""

    command: str
    lines: list[str]
    seconds: float


JOBS = (
    Job(
        "train",
        "A training loop with everything",
        "Checkpoints, metrics, an evaluation after each epoch, parameter servers as an option, and a run folder for "
        "each run. The program to copy from.",
        "--run-dir runs/gallery/train",
        curve=r"epoch (\d+)/\d+ .*test accuracy (\S+)",
        axes=("epoch", "test accuracy"),
    ),
    Job(
        "fit",
        "compile and fit",
        "The same digits by `hpcdist.Model`, as with Keras, with callbacks for restarts, the best model and the "
        "learning rate.",
        "--run-dir runs/gallery/fit",
        curve=r"epoch (\d+)/\d+ .*val_accuracy (\S+)",
        axes=("epoch", "accuracy in validation"),
    ),
    Job(
        "own_script",
        "A script as people have them",
        "A CNN with a DataLoader with workers, AMP, a schedule, averaged weights, the best model and TensorBoard: "
        "[twelve lines differ](../how-to/full-script.md) from `own_script_plain.py`, which runs in one process.",
        "--run-dir runs/gallery/own",
        scalars=("runs/gallery/own/rank-0/tensorboard", "accuracy"),
        axes=("epoch", "accuracy of the averaged weights"),
    ),
    Job(
        "custom_loop",
        "The custom loop of the tf.distribute guides",
        "A training and a test step, run on each of eight replicas by `strategy.run`. The losses are the same to the "
        "last bit on any number of ranks.",
        "--replicas 8",
        curve=r"epoch (\d+) .*?loss (\d\S*)",
    ),
    Job(
        "keras_guide",
        "The Keras guide to distributed training",
        "Only the imports differ from the guide. The training function runs twice: the second call continues from the "
        "checkpoint of the first one.",
        "--folder runs/gallery/guide",
    ),
    Job(
        "linear_regression",
        "The first example of the guides",
        "One dense unit with weight decay, on a hundred equal rows: each loss can be computed by hand. As the rows are "
        "equal, hpcdist asks whether each rank has its own part.",
        curve=r"epoch (\d+)  loss (\S+)",
    ),
    Job(
        "numpy_digits",
        "Without torch",
        "Softmax regression in numpy: gradients by hand, summed by `all_reduce`, with exact restarts.",
        "--run-dir runs/gallery/numpy",
        curve=r"epoch (\d+)  loss (\S+)",
    ),
    Job(
        "gan",
        "Two models that train each other",
        "A small GAN with two optimizers, each of which steps between two batches.",
        "--steps 800",
        curve=r"step (\d+)  generator (\S+)",
        axes=("step", "loss of the generator"),
    ),
    Job(
        "gpt",
        "A small GPT",
        "A transformer that learns to write Python. Half precision, accumulated gradients and clipping are options.",
        "--epochs 3 --width 64 --layers 2 --kib 256 --run-dir runs/gallery/gpt",
        curve=r"epoch (\d+)/\d+ .*?loss (\S+)  ",
    ),
    Job(
        "estimator",
        "An Estimator",
        "`train_and_evaluate` of `hpcdist.estimator`, with roles from TF_CONFIG.",
        "--model-dir runs/gallery/estimator",
        curve=r"step (\d+)  .*loss (\S+)",
        axes=("step", "loss"),
    ),
    Job(
        "coordinated",
        "A coordinator",
        "The chief schedules steps on workers, as TensorFlow's ClusterCoordinator does; a ps rank holds the variables.",
        "--roles 'ps:1,chief:1,worker:*' --run-dir runs/gallery/coordinated",
        n_ranks=4,
        curve=r"epoch (\d+)\D.*?(0\.\d+)",
    ),
    Job(
        "stragglers",
        "Workers of uneven speed",
        "A tenth of the steps of each worker take six times as long. With a bounded staleness nobody waits for each of "
        "them.",
        "--roles 'ps:1,worker:*'",
        n_ranks=5,
        variants=(("staleness of at most 4", "--max-staleness 4"), ("synchronous", "--synchronous")),
        bar=r"([\d.]+) steps/s",
        axes=("", "steps/s of each worker"),
    ),
    Job(
        "wide_embedding",
        "A wide embedding",
        "200,000 rows, of which a step uses a few: workers push and pull only these; all of them with `--dense`.",
        "--roles 'ps:1,worker:*'",
        n_ranks=3,
        variants=(("sparse", ""), ("dense", "--dense")),
        bar=r"([\d.]+) steps/s",
        axes=("", "steps/s"),
    ),
)


def run(command: str, folder: Path) -> Outcome:
    """Run a command in a folder with a link to jobs/. Raises SystemExit if it fails."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    began = time.monotonic()
    done = subprocess.run(
        ["setsid", "--wait", "bash", "-c", command],
        cwd=folder,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"gallery: expected {command} to end with 0, got {done.returncode}:\n{done.stdout}")
    shown = done.stdout.replace(str(folder), "/home/you")
    lines = [line for line in shown.splitlines() if not line.startswith("hpcdist: attempt")]
    return Outcome(command, lines, time.monotonic() - began)


def points_of(job: Job, lines: Sequence[str]) -> list[Point]:
    """Return the points of the curve in a program's lines."""
    points: list[Point] = []
    for line in lines:
        match = re.search(job.curve, line)
        if match is not None:
            points.append((float(match[1]), float(match[2])))
    return points


def recorded_points(folder: Path, name: str) -> list[Point]:
    """Return a series in the TensorBoard files of a folder; its epochs count from 1."""
    events = EventAccumulator(str(folder))
    events.Reload()
    return [(event.step + 1, event.value) for event in events.Scalars(name)]


def picture_of(job: Job, outcomes: Sequence[Outcome], folder: Path) -> str:
    """Return the SVG of a program's results.

    Args:
        job: the program.
        outcomes: what its commands printed.
        folder: folder in which they ran.
    """
    if job.variants:
        values = []
        for outcome in outcomes:
            match = re.search(job.bar, "\n".join(outcome.lines))
            assert match is not None, outcome.lines
            values.append(float(match[1]))
        return bars_of(job, values)
    if job.scalars is not None:
        path, name = job.scalars
        return chart_of(job, recorded_points(folder / path, name))
    return chart_of(job, points_of(job, outcomes[0].lines))


def label_of(value: float) -> str:
    """Return a number at an axis, short enough for the margin."""
    if abs(value) < 0.1:
        return f"{value:.2g}"
    return f"{value:.3g}"


def bars_of(job: Job, values: Sequence[float]) -> str:
    """Return the SVG of a bar for each variant, with its number."""
    label_width = 190
    bar_height = 26
    scale = (WIDTH - label_width - 2 * MARGIN) / max(values)
    elements = [f'<text x="{label_width}" y="{MARGIN - 14}">{escape(job.axes[1])}</text>']
    top = MARGIN
    for (label, _), value in zip(job.variants, values, strict=True):
        width = value * scale
        middle = top + bar_height / 2 + 4
        elements += [
            f'<text x="{label_width - 8}" y="{middle:g}" text-anchor="end">{escape(label)}</text>',
            f'<rect x="{label_width}" y="{top}" width="{width:.1f}" height="{bar_height}"/>',
            f'<text x="{label_width + width + 6:.1f}" y="{middle:g}">{value:g}</text>',
        ]
        top += bar_height + 12
    labels = ", ".join(label for label, _ in job.variants)
    return drawing(f"{job.title}: {job.axes[1]}, {labels}", top + 8, elements)


def drawing(title: str, height: int, elements: Sequence[str]) -> str:
    """Return an SVG of our width."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">'
    return "\n".join([head, f"<title>{escape(title)}</title>", f"<style>{STYLE}</style>", *elements, "</svg>", ""])


def chart_of(job: Job, points: Sequence[Point]) -> str:
    """Return the SVG of a curve."""
    x_label, y_label = job.axes
    x_values = [x for x, _ in points]
    y_values = [y for _, y in points]
    lowest = min(y_values)
    highest = max(y_values)
    x_scale = (WIDTH - 2 * MARGIN) / ((x_values[-1] - x_values[0]) or 1)
    y_scale = (HEIGHT - 2 * MARGIN) / ((highest - lowest) or 1)
    bottom = HEIGHT - MARGIN
    places = []
    for x, y in points:
        places.append(f"{MARGIN + (x - x_values[0]) * x_scale:.1f},{bottom - (y - lowest) * y_scale:.1f}")
    right = WIDTH - MARGIN
    elements = [
        f'<line x1="{MARGIN}" x2="{right}" y1="{bottom}" y2="{bottom}"/>',
        f'<line x1="{MARGIN}" x2="{right}" y1="{MARGIN}" y2="{MARGIN}"/>',
        f'<polyline points="{" ".join(places)}"/>',
        f'<text x="{MARGIN - 6}" y="{bottom + 4}" text-anchor="end">{label_of(lowest)}</text>',
        f'<text x="{MARGIN - 6}" y="{MARGIN + 4}" text-anchor="end">{label_of(highest)}</text>',
        f'<text x="{MARGIN}" y="{bottom + 20}">{x_values[0]:g}</text>',
        f'<text x="{right}" y="{bottom + 20}" text-anchor="end">{x_label} {x_values[-1]:g}</text>',
        f'<text x="{MARGIN}" y="{MARGIN - 14}">{escape(y_label)}</text>',
    ]
    return drawing(f"{job.title}: {y_label} against {x_label}", HEIGHT, elements)


def page_of(job: Job, outcomes: Sequence[Outcome]) -> str:
    """Return the text of a page."""
    parts = [f"# {job.title}", "", job.text, ""]
    if job.has_picture:
        against = f" against {job.axes[0]}" if job.axes[0] else ""
        parts += [f"![{job.axes[1]}{against}]({job.name}.svg)", ""]
    parts.append("```console")
    seconds = 0.0
    for outcome in outcomes:
        lines = outcome.lines
        if len(lines) > MAX_LINES:
            lines = [*lines[: MAX_LINES - 4], "...", *lines[-3:]]
        parts += [f"$ {outcome.command}", *lines]
        seconds += outcome.seconds
    parts += [
        "```",
        "",
        f"On two cores this takes {seconds:.0f} s. The program is",
        f"[`jobs/{job.name}.py`](../../jobs/{job.name}.py).",
        "",
    ]
    return "\n".join(parts)


def index_of(jobs: Sequence[Job]) -> str:
    """Return the text of the gallery's first page."""
    lines = [
        "# Gallery",
        "",
        "What the programs in `jobs/` show. Each runs as it is, on other numbers of ranks too. `make gallery`",
        "has run them and written these pages.",
        "",
        "```{toctree}",
        ":maxdepth: 1",
        "",
        *(job.name for job in jobs),
        "notebook",
        "```",
        "",
    ]
    return "\n".join(lines)


def execute_notebook() -> None:
    """Execute the notebook, and keep its outputs in it."""
    path = FOLDER / "notebook.ipynb"
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        NotebookClient(notebook, timeout=TIMEOUT_S, resources={"metadata": {"path": folder}}).execute()
    for cell in notebook.cells:
        cell.metadata = {}
    nbformat.write(notebook, path)


def main(names: Sequence[str]) -> None:
    """Run programs, or all of them and the notebook, and write their pages."""
    FOLDER.mkdir(exist_ok=True)
    if not names or "notebook" in names:
        execute_notebook()
    (FOLDER / "index.md").write_text(index_of(JOBS))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "jobs").symlink_to(ROOT / "jobs")
        for job in JOBS:
            if names and job.name not in names:
                continue
            outcomes = [run(command, folder) for command in job.commands]
            if job.has_picture:
                (FOLDER / f"{job.name}.svg").write_text(picture_of(job, outcomes, folder))
            (FOLDER / f"{job.name}.md").write_text(page_of(job, outcomes))
            print(job.name, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

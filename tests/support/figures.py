"""Draws the figures of docs/concepts/ as SVG files in docs/figures/, in less than a second: `make figures`.

    python tests/support/figures.py

A figure is a list of boxes, arrows and texts at places in pixels. The files follow the reader's light or dark mode.
tests/unit/house/test_figures.py compares them with what this script draws.
"""

from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "figures"
LINE_HEIGHT = 18
STYLE = """
svg { font: 14px system-ui, sans-serif; }
text { fill: #24292f; }
.title { font-weight: 600; }
.small { fill: #57606a; font-size: 12px; }
rect { rx: 6; stroke-width: 1.3; }
.host { fill: none; stroke: #8c959f; stroke-dasharray: 5 4; }
.rank { fill: #ddf4ff; stroke: #0969da; }
.data { fill: #fff1e5; stroke: #cf5b00; }
.sum { fill: #dafbe1; stroke: #1a7f37; }
.disk { fill: #f6f8fa; stroke: #57606a; }
.stop { fill: #ffebe9; stroke: #cf222e; }
line { stroke: #57606a; stroke-width: 1.5; }
line.dashed { stroke-dasharray: 4 4; }
marker path { fill: #57606a; }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3; }
.small { fill: #9aa4af; }
.host { stroke: #7d8590; }
.rank { fill: #0c2d4f; stroke: #58a6ff; }
.data { fill: #3d1f00; stroke: #ff9a4d; }
.sum { fill: #0f2d17; stroke: #3fb950; }
.disk { fill: #21262d; stroke: #9aa4af; }
.stop { fill: #4a1512; stroke: #f85149; }
line { stroke: #9aa4af; }
marker path { fill: #9aa4af; }
}
"""
MARKER = (
    '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
    'orient="auto-start-reverse"><path d="M0 0L10 5L0 10z"/></marker></defs>'
)


@dataclass(frozen=True)
class Box:
    """A rectangle with lines of text in its middle, the first of them bold."""

    x: int
    y: int
    width: int
    height: int
    kind: str
    lines: tuple[str, ...] = ()

    def svg(self) -> str:
        """Return the elements of the box."""
        parts = [f'<rect class="{self.kind}" x="{self.x}" y="{self.y}" width="{self.width}" height="{self.height}"/>']
        middle = self.x + self.width // 2
        first_y = self.y + self.height // 2 - LINE_HEIGHT * (len(self.lines) - 1) // 2 + 5
        for number, line in enumerate(self.lines):
            kind = "small" if number else "title"
            parts.append(text_at(middle, first_y + number * LINE_HEIGHT, line, kind, "middle"))
        return "\n".join(parts)


@dataclass(frozen=True)
class Arrow:
    """A line with a head at its end, and at its start too if it goes both ways."""

    x1: int
    y1: int
    x2: int
    y2: int
    is_two_way: bool = False
    is_dashed: bool = False

    def svg(self) -> str:
        """Return the element of the arrow."""
        start = ' marker-start="url(#head)"' if self.is_two_way else ""
        kind = ' class="dashed"' if self.is_dashed else ""
        ends = f'x1="{self.x1}" y1="{self.y1}" x2="{self.x2}" y2="{self.y2}"'
        return f'<line{kind} {ends} marker-end="url(#head)"{start}/>'


@dataclass(frozen=True)
class Text:
    """A line of text that begins at a place, or has its middle or end there."""

    x: int
    y: int
    text: str
    kind: str = "small"
    anchor: str = "start"

    def svg(self) -> str:
        """Return the element of the text."""
        return text_at(self.x, self.y, self.text, self.kind, self.anchor)


Element = Box | Arrow | Text


@dataclass(frozen=True)
class Figure:
    """A drawing, with a sentence for people who cannot see it."""

    title: str
    width: int
    height: int
    elements: list[Element]

    def svg(self) -> str:
        """Return the file's text."""
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" role="img">'
        parts = [head, f"<title>{escape(self.title)}</title>", f"<style>{STYLE}</style>", MARKER]
        parts += [element.svg() for element in self.elements]
        return "\n".join([*parts, "</svg>", ""])


def text_at(x: int, y: int, text: str, kind: str, anchor: str) -> str:
    """Return the SVG element of a line of text."""
    return f'<text class="{kind}" x="{x}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>'


def replicas() -> Figure:
    """Draw a global batch on four ranks of two hosts."""
    elements: list[Element] = [Text(20, 24, "one step: a global batch of 64 rows", "title")]
    for number, x in enumerate((35, 235, 455, 655)):
        rank_lines = (f"rank {number}", f"replica {number}, a whole model")
        if number == 0:
            rank_lines = ("rank 0, the chief", "replica 0, a whole model")
        elements += [
            Box(x, 40, 170, 34, "data", (f"rows {16 * number} to {16 * number + 15}",)),
            Arrow(x + 85, 74, x + 85, 116),
            Box(x - 5, 118, 180, 66, "rank", rank_lines),
            Arrow(x + 85, 184, x + 85, 232),
        ]
    elements += [
        Text(130, 212, "gradients of 16 rows", "small"),
        Box(35, 234, 790, 40, "sum", ("the sum of all gradients, the same on every rank",)),
        Text(430, 298, "Each rank takes the same step, so that the copies stay equal.", "small", "middle"),
        Box(20, 92, 400, 108, "host"),
        Box(440, 92, 400, 108, "host"),
        Text(410, 110, "host A", "small", "end"),
        Text(830, 110, "host B", "small", "end"),
    ]
    return Figure("Four ranks share a global batch, sum their gradients and take the same step", 860, 312, elements)


def sums() -> Figure:
    """Draw the hierarchical all-reduce of two hosts."""
    elements: list[Element] = []
    for host, x in (("A", 20), ("B", 460)):
        first_rank = 0 if host == "A" else 2
        elements += [
            Box(x, 20, 360, 216, "host"),
            Text(x + 12, 40, f"host {host}"),
            Box(x + 20, 52, 140, 48, "rank", (f"rank {first_rank}", "its gradients")),
            Box(x + 200, 52, 140, 48, "rank", (f"rank {first_rank + 1}", "its gradients")),
            Arrow(x + 90, 100, x + 130, 158),
            Arrow(x + 270, 100, x + 230, 158),
            Text(x + 180, 126, "1", "title", "middle"),
            Box(x + 80, 160, 200, 50, "sum", (f"sum of host {host}", "in shared memory, or by NCCL")),
        ]
    elements += [
        Arrow(302, 185, 538, 185, is_two_way=True),
        Text(420, 174, "2", "title", "middle"),
        Text(420, 206, "by MPI, in chunks", "small", "middle"),
        Text(20, 266, "1  Ranks of a host add into memory that they share: nothing is sent."),
        Text(20, 288, "2  One sum for each host goes over the network, in a ring or by halving."),
        Text(
            20,
            310,
            "3  Every rank reads the total where it lies. Between hosts, buckets travel while backward still runs.",
        ),
    ]
    return Figure("Gradients are summed inside each host, then between hosts", 840, 326, elements)


def checkpoint() -> Figure:
    """Draw what a checkpoint holds, and what the next attempt does with it."""
    contents = (
        ("model", "parameters and buffers"),
        ("optimizer, schedule, scaler", "their state"),
        ("data", "epoch and number of the batch"),
        ("strategy", "seeds, by which random numbers follow"),
        ("numbers, texts, arrays", "what else the program keeps"),
    )
    elements: list[Element] = [Text(20, 24, "attempt 1 saves after step 320", "title")]
    for number, lines in enumerate(contents):
        y = 40 + 56 * number
        elements += [Box(20, y, 270, 48, "rank", lines), Arrow(290, y + 24, 356, 174)]
    elements += [
        Box(358, 128, 170, 92, "disk", ("one file", "step-00000320-0001.h5", "sizes and digests inside")),
        Arrow(528, 174, 596, 174),
        Text(828, 24, "attempt 2 goes on with step 321", "title", "end"),
        Box(598, 40, 230, 76, "data", ("the next batch", "the same rows, on any", "number of ranks")),
        Box(598, 136, 230, 76, "data", ("the same random numbers", "dropout by step, rows by", "epoch and row")),
        Box(
            598, 232, 230, 76, "sum", ("the same order of sums", "so that each step has the", "bits of an unbroken run")
        ),
    ]
    return Figure(
        "A checkpoint holds all that training changes, so that a restart has the same bits", 846, 330, elements
    )


def stopping() -> Figure:
    """Draw how a signal to one rank stops all of them after the same step."""
    elements: list[Element] = []
    for rank, y in ((0, 40), (1, 150)):
        elements.append(Text(16, y + 28, f"rank {rank}", "title"))
        for number, step in enumerate(("step 41", "step 42", "step 43")):
            elements.append(Box(80 + 150 * number, y, 134, 46, "rank", (step,)))
        elements += [
            Box(530, y, 120, 46, "disk", ("save",)),
            Box(666, y, 140, 46, "stop", ("exit 75", "run me again")),
        ]
    elements += [
        Arrow(290, 246, 290, 200),
        Text(290, 262, "SIGTERM, to one rank", "small", "middle"),
        Arrow(440, 150, 440, 88),
        Arrow(400, 86, 400, 148),
        Text(452, 116, "the sum of the gradients"),
        Text(452, 132, "carries the request"),
        Text(16, 290, "All ranks stop after the same step, between two iterations, whichever rank was asked."),
    ]
    return Figure("A signal to one rank stops all ranks after the same step", 822, 304, elements)


def roles() -> Figure:
    """Draw the four roles, and who sends what to whom."""
    elements: list[Element] = [
        Box(20, 20, 330, 150, "host"),
        Text(32, 40, "train"),
        Box(40, 56, 130, 92, "rank", ("chief", "trains, prints,", "writes checkpoints")),
        Box(200, 56, 130, 92, "rank", ("worker", "trains")),
        Arrow(170, 102, 200, 102, is_two_way=True),
        Text(185, 166, "gradients", "small", "middle"),
        Box(500, 56, 300, 92, "sum", ("ps", "holds shards of the variables,", "and steps them")),
        Arrow(350, 86, 500, 86),
        Text(425, 78, "push gradients", "small", "middle"),
        Arrow(500, 120, 350, 120),
        Text(425, 138, "pull values", "small", "middle"),
        Box(40, 226, 290, 72, "disk", ("run folder", "checkpoints, decision.json, logs")),
        Arrow(105, 148, 105, 226, is_two_way=True),
        Box(500, 226, 300, 72, "data", ("evaluator", "evaluates each new checkpoint,", "beside the training")),
        Arrow(330, 262, 500, 262),
        Text(415, 254, "reads", "small", "middle"),
    ]
    return Figure("Chief and workers train, ps ranks serve variables, evaluators read checkpoints", 820, 316, elements)


def staleness() -> Figure:
    """Draw three workers of different speed under max_staleness=2."""
    elements: list[Element] = [Text(20, 24, "max_staleness=2: steps that each worker has pushed", "title")]
    for number, (worker, n_steps) in enumerate((("worker 0", 7), ("worker 1", 6), ("worker 2", 4))):
        y = 44 + 56 * number
        elements.append(Text(20, y + 26, worker))
        for step in range(n_steps):
            elements.append(Box(100 + 74 * step, y, 68, 40, "rank", (str(step),)))
        if n_steps == 7:
            elements.append(Box(100 + 74 * 7, y, 128, 40, "stop", ("7 waits for 4",)))
        elif n_steps == 6:
            elements.append(Box(100 + 74 * 6, y, 68, 40, "data", ("6 runs",)))
        else:
            elements.append(Box(100 + 74 * 4, y, 68, 40, "data", ("4 runs",)))
    elements += [
        Text(
            20, 232, "Step 7 may begin once every other worker has pushed step 4: at most two pushes of it are missing."
        ),
        Text(20, 254, "With 0 the workers go in step. Without a bound nobody waits, and values may be older."),
    ]
    return Figure("A fast worker waits for the slowest one once it is more than two steps ahead", 820, 270, elements)


FIGURES: dict[str, Callable[[], Figure]] = {
    "replicas": replicas,
    "sums": sums,
    "checkpoint": checkpoint,
    "stopping": stopping,
    "roles": roles,
    "staleness": staleness,
}


def main() -> None:
    """Write all figures."""
    FOLDER.mkdir(exist_ok=True)
    for name, draw in FIGURES.items():
        (FOLDER / f"{name}.svg").write_text(draw().svg())
    print(f"{FOLDER}: {len(FIGURES)} figures")


if __name__ == "__main__":
    main()

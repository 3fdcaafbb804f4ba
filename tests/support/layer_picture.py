"""Draw docs/layers.svg from the layer table of ARCHITECTURE.md, in less than a second.

    python tests/support/layer_picture.py

tests/unit/house/test_layers.py fails where the picture is not that of the table.
"""

import re
import textwrap
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PICTURE = ROOT / "docs" / "layers.svg"
#: Rows of the table: number, names in backticks, what lives there.
ROW = re.compile(r"^\| (\d+) \| (`[^|]+`) \| ([^|]+) \|$", re.MULTILINE)
WIDTH = 940
ROW_HEIGHT = 44
LINE_HEIGHT = 15
#: Where the texts of a row begin, and how many characters fit into a line of them.
NAMES_X, MEANING_X = 54, 480
NAMES_COLUMNS, MEANING_COLUMNS = 52, 64
STYLE = """
svg { font: 13px system-ui, sans-serif; fill: #24292f; }
rect { fill: #f3f5f8; stroke: #c9d1d9; }
.layer { font-weight: 600; fill: #57606a; }
.names { font-family: ui-monospace, monospace; font-size: 12px; }
.meaning { fill: #57606a; font-size: 12px; }
@media (prefers-color-scheme: dark) {
svg { fill: #e6edf3; }
rect { fill: #161b22; stroke: #30363d; }
.layer, .meaning { fill: #9aa4af; }
}
"""


def picture_of(text: str) -> str:
    """Return the SVG of the layer table in a text: one box for each layer, the highest on top."""
    boxes = []
    top = 1
    for layer, names, meaning in joined_rows(text):
        names_lines = textwrap.wrap(names, NAMES_COLUMNS, break_long_words=False)
        meaning_lines = textwrap.wrap(meaning, MEANING_COLUMNS)
        n_lines = max(len(names_lines), len(meaning_lines))
        height = ROW_HEIGHT - LINE_HEIGHT * 2 + LINE_HEIGHT * n_lines
        boxes.append(f'<rect x="1" y="{top}" width="{WIDTH - 2}" height="{height}" rx="5"/>')
        boxes.append(f'<text class="layer" x="18" y="{top + 19}">{layer}</text>')
        boxes += text_lines("names", NAMES_X, top + 19, names_lines)
        boxes += text_lines("meaning", MEANING_X, top + 19, meaning_lines)
        top += height + 5
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top}" role="img">'
    title = "<title>The layers of hpcdist; imports go down only</title>"
    return "\n".join([head, title, f"<style>{STYLE}</style>", *boxes, "</svg>", ""])


def joined_rows(text: str) -> list[tuple[int, str, str]]:
    """Return (layer, names, meaning) of each layer; rows of the table with one number are one layer."""
    names_of: dict[int, list[str]] = {}
    meanings_of: dict[int, list[str]] = {}
    for number, names, meaning in ROW.findall(text):
        names_of.setdefault(int(number), []).append(names.replace("`", "").replace(".py", ""))
        meanings_of.setdefault(int(number), []).append(meaning.replace("`", "").strip())
    return [(layer, ", ".join(names_of[layer]), "; ".join(meanings_of[layer])) for layer in names_of]


def text_lines(kind: str, x: int, y: int, lines: list[str]) -> list[str]:
    """Return SVG elements of lines below each other."""
    elements = []
    for number, line in enumerate(lines):
        elements.append(f'<text class="{kind}" x="{x}" y="{y + number * LINE_HEIGHT}">{escape(line)}</text>')
    return elements


if __name__ == "__main__":
    PICTURE.write_text(picture_of((ROOT / "ARCHITECTURE.md").read_text()))
    print(PICTURE)

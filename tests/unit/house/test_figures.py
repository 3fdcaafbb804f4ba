"""The figures of docs/ are those that their script draws, each is on a page, and no text leaves its box or picture."""

import re
from pathlib import Path

import pytest
from figures import FIGURES, FOLDER, Box, Text

DOCS = Path(__file__).resolve().parents[3] / "docs"
#: Average width of a letter in wide fonts that browsers take for system-ui, in parts of the font's size.
LETTER = 0.56


def size_of(kind):
    if kind == "small":
        return 12
    return 14


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_is_as_drawn(name):
    """`make figures` draws it anew."""
    assert (FOLDER / f"{name}.svg").read_text() == FIGURES[name]().svg()


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_is_on_a_page(name):
    texts = "".join(path.read_text() for path in DOCS.rglob("*.md"))
    assert re.search(rf"!\[[^\]]{{20,}}\]\(\.\./figures/{name}\.svg\)", texts)


@pytest.mark.parametrize("name", FIGURES)
def test_texts_fit(name):
    figure = FIGURES[name]()
    for element in figure.elements:
        if isinstance(element, Box):
            assert min(element.x, element.y) >= 0
            assert element.x + element.width <= figure.width
            assert element.y + element.height <= figure.height
            for number, line in enumerate(element.lines):
                width = len(line) * LETTER * size_of("small" if number else "title")
                assert width < element.width, line
        elif isinstance(element, Text):
            width = len(element.text) * LETTER * size_of(element.kind)
            begin = {"start": element.x, "middle": element.x - width / 2, "end": element.x - width}[element.anchor]
            assert begin >= 0, element.text
            assert begin + width <= figure.width, element.text
            assert element.y <= figure.height

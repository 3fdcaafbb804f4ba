"""Examples in the docstrings of pure modules give what they say. Others need ranks, and the pages show them."""

import doctest
import importlib
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[3] / "hpcdist"
#: Rooms whose functions compute, and neither communicate nor read files.
PURE = ("plan", "cluster")
EXTRA = ("dtypes", "nest", "ps.layout", "ps.clocks")


def names():
    paths = [f"{room}.{path.stem}" for room in PURE for path in sorted((PACKAGE / room).glob("*.py"))]
    return [*(name for name in paths if not name.endswith("__init__")), *EXTRA]


@pytest.mark.parametrize("name", names())
def test_examples(name):
    outcome = doctest.testmod(importlib.import_module(f"hpcdist.{name}"))
    assert outcome.failed == 0


def test_there_are_examples():
    modules = [importlib.import_module(f"hpcdist.{name}") for name in names()]
    assert sum(len(test.examples) for module in modules for test in doctest.DocTestFinder().find(module)) > 10

"""Examples in the docstrings of pure modules give what they say. Others need ranks, and the pages show them."""

import doctest
import importlib
from pathlib import Path

import pytest

import hpcdist

PACKAGE = Path(__file__).resolve().parents[3] / "hpcdist"
#: Rooms whose functions compute, and neither communicate nor read files.
PURE = ("plan", "cluster")
EXTRA = ("dtypes", "nest", "ps.layout", "ps.clocks")


def names():
    listed = list(EXTRA)
    for room in PURE:
        stems = [path.stem for path in sorted((PACKAGE / room).glob("*.py"))]
        listed += [f"{room}.{stem}" for stem in stems if stem != "__init__"]
    return listed


@pytest.mark.parametrize("name", names())
def test_examples(name):
    outcome = doctest.testmod(importlib.import_module(f"hpcdist.{name}"), extraglobs={"hpcdist": hpcdist})
    assert outcome.failed == 0


def test_there_are_examples():
    n_examples = 0
    for name in names():
        for test in doctest.DocTestFinder().find(importlib.import_module(f"hpcdist.{name}")):
            n_examples += len(test.examples)
    assert n_examples > 10

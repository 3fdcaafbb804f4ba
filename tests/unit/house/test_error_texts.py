"""The one test of how errors are worded: `OPERATION: expected FACT, got VALUE; ADVICE.` Others look for facts."""

import re

import pytest
from error_texts import VALUE, text_of, texts_of

from hpcdist import errors

NAMES = {name for name, item in vars(errors).items() if isinstance(item, type) and issubclass(item, Exception)}
TEMPLATE = re.compile(r"([^:;]+: )?expected .+[,;:] (.+ )?(got|found) .+; .+\.", re.DOTALL)
#: Texts that carry an error of the program's own, or whose ends are put together elsewhere.
CARRIERS = {
    f"{VALUE}: {VALUE}",
    f"{VALUE} ({VALUE} in {VALUE})",
    f"a function failed, and its error cannot be read here: {VALUE}",
    f"update_state: expected {VALUE}; reshape one of them.",
    "ZeroRedundancyOptimizer: expected a strategy with one replica on each rank, whose optimizers all are "
    f"ZeroRedundancyOptimizers, got {VALUE}.",
    f"schedule: expected {VALUE} to run, got it cancelled, as {VALUE}.",
}


def all_texts(root):
    """Yield (place, text) of every error of the package."""
    for path in sorted((root / "hpcdist").rglob("*.py")):
        for line, text in texts_of(path, NAMES):
            yield f"{path.relative_to(root)}:{line}", text


def test_errors_say_what_was_expected_what_came_and_what_to_do(root):
    texts = list(all_texts(root))
    assert len(texts) > 500
    assert [(place, text) for place, text in texts if not TEMPLATE.fullmatch(text) and text not in CARRIERS] == []


def test_carriers_are_in_use(root):
    assert {text for _, text in all_texts(root)} >= CARRIERS


@pytest.mark.parametrize(
    "text",
    [
        "save: expected a step of 0 or more, got -1; count steps from 0.",
        f"expected one job, got {VALUE}, an array with {VALUE}; name one of them.",
    ],
)
def test_what_fits_the_template(text):
    assert TEMPLATE.fullmatch(text)


@pytest.mark.parametrize(
    "text",
    [
        "save: wrong step",
        "save: expected a step, got -1.",
        "save: expected a step; count.",
        "save: got -1; count from 0.",
    ],
)
def test_what_does_not_fit_the_template(text):
    assert not TEMPLATE.fullmatch(text)


def test_texts_are_read_from_the_source(tmp_path):
    path = tmp_path / "some.py"
    path.write_text('UsageError(f"a: {x}" + " b")\nUsageError(value)\nother("c")\nraise DataError("d", 3)\n')
    assert texts_of(path, {"UsageError", "DataError"}) == [(1, f"a: {VALUE} b"), (4, "d")]
    assert text_of(__import__("ast").parse("f(1)").body[0].value) is None

"""Features: each has a test that shows it, or a note that says why not; tests name features that exist."""

import re

import features
import pytest
from features import MARKS, STATES, Feature

ALL = features.read_features()


def faults_of(feature):
    """Return what is wrong with a feature, as texts."""
    faults = {
        "name": not re.fullmatch(r"[a-z-]+\.[a-z0-9]+(-[a-z0-9]+)*", feature.name),
        "mark": feature.mark not in MARKS,
        "meaning": feature.meaning != feature.meaning.strip() or not feature.meaning or "\n" in feature.meaning,
        "tests": feature.state in ("works", "partly") and not feature.tests,
        "note": (feature.state == "works") != (feature.note == ""),
    }
    return [f"{feature.name}: wrong {fault}" for fault, is_wrong in faults.items() if is_wrong]


def test_every_feature_is_shown_or_explained():
    assert [fault for feature in ALL for fault in faults_of(feature)] == []
    assert len(ALL) > 300


def test_the_scorecard_is_up_to_date():
    """`make docs` writes it."""
    assert features.PAGE.read_text() == features.page_with(features.scorecard_of(ALL))


RIGHT = Feature("launch.a-name", "MUST", "Users can do it.", "works", "", ("tests/test_it.py::test_it",))


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({}, None),
        ({"mark": "SHOULD"}, "mark"),
        ({"name": "launch.A name"}, "name"),
        ({"meaning": "two\nlines"}, "meaning"),
        ({"tests": ()}, "tests"),
        ({"state": "missing"}, "note"),
        ({"note": "something"}, "note"),
    ],
)
def test_wrong_features_are_found(changes, fault):
    expected = [] if fault is None else [f"wrong {fault}"]
    assert [text.split(": ")[1] for text in faults_of(Feature(**{**vars(RIGHT), **changes}))] == expected


@pytest.fixture
def folder(tmp_path):
    """Return a folder of tests with two features, one of them shown."""
    tests = tmp_path / "tests"
    tests.mkdir()
    (tests / "features.toml").write_text('[launch]\nfirst = "MUST: One: two."\nsecond = "CHECK: Three."\n')
    (tests / "feature_notes.toml").write_text('[missing]\n"launch.second" = "Nobody asked."\n')
    lines = ["import pytest", "class TestIt:", '    @pytest.mark.feature("launch.first", "launch.first")']
    (tests / "test_it.py").write_text("\n".join([*lines, "    def test_method(self): ...", ""]))
    return tests


def test_marks_of_tests_are_read(folder):
    first, second = features.read_features(folder)
    assert first == Feature(
        "launch.first", "MUST", "One: two.", "works", "", ("tests/test_it.py::TestIt::test_method",) * 2
    )
    assert (second.state, second.note, second.tests) == ("missing", "Nobody asked.", ())


@pytest.mark.parametrize("where", ["test_it.py", "feature_notes.toml"])
def test_a_name_that_is_no_feature_is_refused(folder, where):
    path = folder / where
    path.write_text(path.read_text().replace("launch.first", "launch.none").replace("launch.second", "launch.none"))
    with pytest.raises(ValueError, match=re.escape("got ['launch.none']")):
        features.read_features(folder)


def test_the_table(folder):
    pair = features.read_features(folder)
    lines = {line.split()[0]: line.split()[1:] for line in features.table_of(pair).splitlines()}
    assert lines["mark"] == ["features", *STATES]
    assert lines["MUST"] == ["1", "1", "0", "0", "0"]
    assert lines["CHECK"] == ["1", "0", "0", "0", "1"]
    assert features.unfinished_of(pair) == "missing CHECK    launch.second: Nobody asked."
    assert "tests/test_it.py::TestIt::test_method" in features.tests_of(pair)

"""tests/features.toml: valid rows, of tests that exist."""

import ast
import functools
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("tomllib", reason="Python 3.10 reads no TOML")
import features

ROOT = Path(__file__).resolve().parents[3]
ROWS = features.read()
GROUPS = {
    *("launch", "strategies", "collectives", "parameter-servers", "input", "training", "checkpoints", "slurm"),
    *("evaluation", "observability", "debugging", "gpu"),
}
#: Groups of behaviour, whose rows are marked CHECK.
CHECKED_GROUPS = {"semantics", "complaints"}
VALID = {
    "name": "a-name",
    "group": "launch",
    "mark": "MUST",
    "what": "Users can do it.",
    "state": "works",
    "tests": ["tests/unit/house/test_features.py::test_wrong_rows_are_found"],
    "note": "",
    "before": "missing",
}


@functools.cache
def definitions_of(path):
    """Return the names that a file defines, methods as CLASS::METHOD; none if there is no file."""
    if not (ROOT / path).is_file():
        return set()
    tree = ast.parse((ROOT / path).read_text())
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    methods = {f"{one.name}::{node.name}" for one in classes for node in one.body if isinstance(node, ast.FunctionDef)}
    return methods | {node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}


def is_one_line(text):
    return isinstance(text, str) and text == text.strip() != "" and "\n" not in text


def is_test(test):
    path, _, name = test.partition("::")
    return Path(path).name.startswith("test_") and "test_" in name and name in definitions_of(path)


def faults_of(row):
    """Return what is wrong with a row, as texts that begin with its name."""
    if set(row) != set(VALID):
        return [f"{row.get('name')}: expected the keys {list(VALID)}, got {list(row)}"]
    is_kebab = row["name"].replace("-", "").isalnum() and row["name"] == row["name"].lower().strip("-")
    faults = {
        "name": not is_kebab,
        "group": row["group"] not in GROUPS | CHECKED_GROUPS,
        "mark": row["mark"] not in features.MARKS,
        "mark of its group": (row["mark"] == "CHECK") != (row["group"] in CHECKED_GROUPS),
        "what": not is_one_line(row["what"]),
        "state": row["state"] not in features.STATES,
        "before": row["before"] not in features.STATES,
        "tests": row["state"] in ("works", "partly") and not row["tests"],
        "tests listed twice": len(set(row["tests"])) < len(row["tests"]),
        "note": row["note"] != "" if row["state"] == "works" else not is_one_line(row["note"]),
    }
    missing = [f"{row['name']}: there is no {test}" for test in row["tests"] if not is_test(test)]
    return [f"{row['name']}: wrong {key}" for key, is_wrong in faults.items() if is_wrong] + missing


def test_every_row_is_valid_and_its_tests_exist():
    assert [fault for row in ROWS for fault in faults_of(row)] == []


def test_names_are_unique():
    assert [name for name, times in Counter(row["name"] for row in ROWS).items() if times > 1] == []


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({}, ""),
        ({"state": "done", "note": "something"}, "wrong state"),
        ({"before": ""}, "wrong before"),
        ({"mark": "CHECK"}, "wrong mark of its group"),
        ({"name": "A name"}, "wrong name"),
        ({"what": "two\nlines"}, "wrong what"),
        ({"tests": []}, "wrong tests"),
        ({"state": "missing"}, "wrong note"),
        ({"note": "something"}, "wrong note"),
        ({"group": "other"}, "wrong group"),
        ({"tests": ["tests/unit/house/test_features.py::test_nothing"]}, "there is no tests/unit/house"),
        ({"tests": ["tests/unit/house/none.py::test_nothing"]}, "there is no tests/unit/house"),
        ({"more": 1}, "expected the keys"),
    ],
)
def test_wrong_rows_are_found(changes, fault):
    faults = faults_of({**VALID, **changes})
    assert len(faults) == bool(fault)
    assert all(fault in text for text in faults)


def test_the_table_counts_rows_before_and_now():
    rows = [{**VALID, "before": "partly"}, {**VALID, "mark": "BEYOND"}, {**VALID, "state": "missing", "note": "all"}]
    lines = {line.split()[0]: " ".join(line.split()[1:]) for line in features.table(rows).splitlines()}
    assert lines["mark"] == "rows works partly differs missing"
    assert lines["MUST"] == "2 0 -> 1 1 -> 0 0 -> 0 1 -> 1"
    assert lines["BEYOND"] == "1 0 -> 1 0 -> 0 0 -> 0 1 -> 0"
    assert features.unfinished(rows) == "\nlaunch\n  MUST      missing  a-name: all"

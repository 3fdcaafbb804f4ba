"""Counts the rows of tests/features.toml: by mark and state, then those that do not work (`--missing`: these alone)."""

import argparse
from collections import Counter
from pathlib import Path
from typing import TypedDict

import tomllib

FILE = Path(__file__).resolve().parents[1] / "features.toml"
MARKS = ("MUST", "MUST-M", "EXPECTED", "BEYOND", "CHECK")
STATES = ("works", "partly", "differs", "missing")


class Feature(TypedDict):
    """One row of the file.

    Attributes:
        what: what a user can do.
        mark: MUST: TensorFlow's guides use it. MUST-M: the purpose of hpcdist. EXPECTED: users of such libraries take
            it for granted. BEYOND: few libraries have it. CHECK: behaviour that is easily overlooked.
        state, before: one of STATES, now and in the first edition.
        tests: what shows it, as FILE::FUNCTION or FILE::CLASS::METHOD.
        note: what falls short; empty text for what works.
    """

    name: str
    group: str
    mark: str
    what: str
    state: str
    tests: list[str]
    note: str
    before: str


def read(file: Path = FILE) -> list[Feature]:
    """Return the rows in the order of the file."""
    rows: list[Feature] = tomllib.loads(file.read_text())["feature"]
    return rows


def table(rows: list[Feature]) -> str:
    """Return a table of rows by mark and state, each cell as before -> now."""
    before, now = (Counter((row["mark"], row[when]) for row in rows) for when in ("before", "state"))
    lines = [f"{'mark':10}{'rows':>6}" + "".join(f"{state:>14}" for state in STATES)]
    for mark in MARKS:
        cells = [f"{before[mark, state]} -> {now[mark, state]}" for state in STATES]
        n_rows = sum(row["mark"] == mark for row in rows)
        lines.append(f"{mark:10}{n_rows:>6}" + "".join(f"{cell:>14}" for cell in cells))
    return "\n".join(lines)


def unfinished(rows: list[Feature]) -> str:
    """Return the rows that do not work, by group."""
    lines = []
    for group in dict.fromkeys(row["group"] for row in rows):
        own = [row for row in rows if row["group"] == group and row["state"] != "works"]
        lines += [f"\n{group}"] * bool(own)
        lines += [f"  {row['mark']:8}  {row['state']:7}  {row['name']}: {row['note']}" for row in own]
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--missing", action="store_true", help="list the rows that do not work, without the table")
    features = read()
    is_list = parser.parse_args().missing
    print(unfinished(features).lstrip() if is_list else f"{table(features)}\n{unfinished(features)}")

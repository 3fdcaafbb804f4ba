"""Print which features hpcdist has, by the tests that show them: a table, then what is not fully there. Takes seconds.

    python tests/support/features.py            the table
    python tests/support/features.py --tests    every feature with its tests
    python tests/support/features.py --page     writes the scorecard of docs/reference/how-we-test.md

A test names what it shows: @pytest.mark.feature("GROUP.NAME"). tests/features.toml says what each name means, and
tests/feature_notes.toml what falls short.
"""

import argparse
import ast
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TESTS = Path(__file__).resolve().parents[1]
PAGE = TESTS.parent / "docs" / "reference" / "how-we-test.md"
#: Where the scorecard begins on its page, which it ends.
SCORECARD = "## Scorecard\n"
#: Mark of features.toml -> what it means, for readers of the page.
MEANINGS = {
    "MUST": "what hpcdist is for",
    "MUST-M": "what it is for, in this or another form",
    "EXPECTED": "what users of DDP, Horovod or TensorFlow have",
    "BEYOND": "what only some of these have",
    "CHECK": "exact behaviour of tf.distribute, and complaints of users of others",
}
MARKS = ("MUST", "MUST-M", "EXPECTED", "BEYOND", "CHECK")
STATES = ("works", "partly", "differs", "missing")


@dataclass(frozen=True)
class Feature:
    """A feature, and what shows it.

    Attributes:
        name: GROUP.NAME.
        mark: one of MARKS; features.toml explains them.
        meaning: what a user can do.
        state: one of STATES.
        note: what falls short; empty for what works.
        tests: names of the tests that show it, as FILE::FUNCTION or FILE::CLASS::METHOD.
    """

    name: str
    mark: str
    meaning: str
    state: str
    note: str
    tests: tuple[str, ...]


def read_features(folder: Path = TESTS) -> list[Feature]:
    """Return the features in the order of features.toml.

    Raises:
        ValueError: if a test or a note names a feature that features.toml does not have.
    """
    groups = tomllib.loads((folder / "features.toml").read_text())
    notes = tomllib.loads((folder / "feature_notes.toml").read_text())
    tests = tests_by_feature(folder)
    features = []
    for group, names in groups.items():
        features += [make_feature(f"{group}.{name}", text, notes, tests) for name, text in names.items()]
    named = set(tests)
    for state in notes.values():
        named.update(state)
    unknown = named - {feature.name for feature in features}
    if unknown:
        raise ValueError(f"expected features of features.toml, got {sorted(unknown)}")
    return features


def make_feature(name: str, text: str, notes: dict[str, dict[str, str]], tests: dict[str, list[str]]) -> Feature:
    """Return a feature whose state follows from its notes.

    Args:
        name: GROUP.NAME.
        text: its line, as "MARK: what a user can do".
        notes: state -> name -> what falls short.
        tests: name -> tests that show it.
    """
    mark, _, meaning = text.partition(": ")
    states = [state for state in STATES if name in notes.get(state, {})]
    state = states[0] if states else "works"
    note = notes[state][name] if states else ""
    return Feature(name, mark, meaning, state, note, tuple(tests.get(name, ())))


def tests_by_feature(folder: Path) -> dict[str, list[str]]:
    """Return the tests below a folder that carry the mark `feature`, by the names in it."""
    tests: dict[str, list[str]] = defaultdict(list)
    for path in sorted(folder.rglob("test_*.py")):
        for name, features in marked_functions(ast.parse(path.read_text())):
            for feature in features:
                tests[feature].append(f"{path.relative_to(folder.parent)}::{name}")
    return tests


def marked_functions(tree: ast.Module) -> list[tuple[str, list[str]]]:
    """Return (name, features) of the functions, methods and classes of a file that carry the mark."""
    marked = []
    definitions = []
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            definitions.append((node.name, node))
    for class_name, node in definitions:
        methods = node.body if isinstance(node, ast.ClassDef) else []
        inner = []
        for method in methods:
            if isinstance(method, ast.FunctionDef):
                inner.append((f"{class_name}::{method.name}", method))
        for name, definition in [(class_name, node), *inner]:
            features = features_of(definition.decorator_list)
            if features:
                marked.append((name, features))
    return marked


def features_of(decorators: list[ast.expr]) -> list[str]:
    """Return the arguments of `@pytest.mark.feature(...)`."""
    names: list[str] = []
    for decorator in decorators:
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.feature":
            names += list(map(ast.literal_eval, decorator.args))
    return names


def table_of(features: list[Feature]) -> str:
    """Return the number of features by mark and state."""
    counts = Counter((feature.mark, feature.state) for feature in features)
    lines = [f"{'mark':10}{'features':>9}" + "".join(f"{state:>9}" for state in STATES)]
    for mark in MARKS:
        numbers = [counts[mark, state] for state in STATES]
        lines.append(f"{mark:10}{sum(numbers):>9}" + "".join(f"{number:>9}" for number in numbers))
    return "\n".join(lines)


def scorecard_of(features: list[Feature]) -> str:
    """Return the scorecard of the page: features by mark and state, then what falls short of each group."""
    counts = Counter((feature.mark, feature.state) for feature in features)
    lines = [
        SCORECARD,
        "Each of these features works in a test that carries its name, or the list below says what falls",
        "short. `python tests/support/features.py --tests` prints all of them with their tests.",
        "",
        "| features | works | partly | differs | missing |",
        "|---|---|---|---|---|",
    ]
    for mark in MARKS:
        numbers = " | ".join(str(counts[mark, state]) for state in STATES)
        lines.append(f"| {MEANINGS[mark]} | {numbers} |")
    lines += ["", "| falls short | | why |", "|---|---|---|"]
    for feature in features:
        if feature.state != "works":
            lines.append(f"| {feature.name.replace('-', ' ').replace('.', ': ')} | {feature.state} | {feature.note} |")
    return "\n".join([*lines, ""])


def page_with(scorecard: str) -> str:
    """Return the text of the page with a scorecard in place of the one that it has."""
    before, _, _ = PAGE.read_text().partition(SCORECARD)
    return before + scorecard


def unfinished_of(features: list[Feature]) -> str:
    """Return a line for each feature that does not fully work."""
    unfinished = [feature for feature in features if feature.state != "works"]
    return "\n".join(f"{item.state:8}{item.mark:9}{item.name}: {item.note}" for item in unfinished)


def tests_of(features: list[Feature]) -> str:
    """Return every feature with its tests."""
    lines = []
    for feature in features:
        lines.append(f"{feature.state:8}{feature.name}: {feature.meaning}")
        lines += [f"        {test}" for test in feature.tests]
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tests", action="store_true", help="print every feature with its tests")
    parser.add_argument("--page", action="store_true", help=f"write the scorecard of {PAGE.name}")
    arguments = parser.parse_args()
    all_features = read_features()
    if arguments.page:
        PAGE.write_text(page_with(scorecard_of(all_features)))
    elif arguments.tests:
        print(tests_of(all_features))
    else:
        print(table_of(all_features), unfinished_of(all_features), sep="\n\n")

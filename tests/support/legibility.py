"""Figures of how legible Python code is, for the ratchet in tests/unit/house/test_legibility.py.

`python tests/support/legibility.py FOLDER` prints them, and `python tests/support/legibility.py FILE` the places too:
three seconds for the package.
"""

import ast
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

#: Names that do not say which role a thing plays.
ROLELESS_NAMES = {
    *("again", "asked", "begun", "both", "found", "given", "got", "held", "kept", "known", "left", "left_over", "made"),
    *("mine", "one", "other", "others", "own", "rest", "said", "so", "taken", "theirs", "there", "what", "who"),
}
#: Methods of comparison, whose parameter Python calls `other`.
COMPARISONS = {f"__{name}__" for name in ("eq", "ne", "lt", "le", "gt", "ge")}
#: What Python's grammar has between the nodes that a reader sees.
UNSEEN_NODES = (ast.expr_context, ast.operator, ast.boolop, ast.cmpop, ast.unaryop)
COMPREHENSIONS = (ast.ListComp, ast.GeneratorExp, ast.DictComp, ast.SetComp)
DEFINITIONS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


class Figures(NamedTuple):
    """Figures of some files.

    Attributes:
        roleless_names: names of `ROLELESS_NAMES` in 1,000 names.
        tuple_assignments: statements of several assignments in 1,000 statements.
        conditionals: conditional expressions in 1,000 statements.
        comprehensions: comprehensions in 1,000 statements.
        nested: conditional expressions and comprehensions inside another one, all together.
        nodes_per_line: syntax nodes in a line of code.
    """

    roleless_names: float
    tuple_assignments: float
    conditionals: float
    comprehensions: float
    nested: float
    nodes_per_line: float


def figures_of(paths: list[Path]) -> Figures:
    """Return the figures of files together."""
    counts: Counter[str] = Counter()
    for path in paths:
        file_counts, _ = count(path.read_text())
        counts += file_counts
    n_names = max(1, counts["names"])
    n_statements = max(1, counts["statements"])
    return Figures(
        roleless_names=1000 * counts["roleless"] / n_names,
        tuple_assignments=1000 * counts["tuples"] / n_statements,
        conditionals=1000 * counts["conditionals"] / n_statements,
        comprehensions=1000 * counts["comprehensions"] / n_statements,
        nested=counts["nested"],
        nodes_per_line=counts["nodes"] / max(1, counts["lines"]),
    )


def count(source: str) -> tuple[Counter[str], list[tuple[int, str]]]:
    """Return what is counted in a file, and (line, reason) of the places that are worth a look."""
    tree = ast.parse(source)
    counts: Counter[str] = Counter(lines=n_code_lines(tree, source))
    places: list[tuple[int, str]] = []
    compared = names_of_comparisons(tree)
    for node in ast.walk(tree):
        counts["nodes"] += not isinstance(node, UNSEEN_NODES)
        counts["statements"] += isinstance(node, ast.stmt)
        if isinstance(node, (ast.Name, ast.arg)):
            name = node.id if isinstance(node, ast.Name) else node.arg
            counts["names"] += 1
            if name.strip("_") in ROLELESS_NAMES and id(node) not in compared:
                counts["roleless"] += 1
                places.append((node.lineno, f"the name {name!r} says no role"))
        elif is_tuple_assignment(node):
            counts["tuples"] += 1
            places.append((node.lineno, "several assignments in one statement"))
        elif isinstance(node, ast.IfExp):
            counts["conditionals"] += 1
            if has_inside(node, (ast.IfExp,)):
                counts["nested"] += 1
                places.append((node.lineno, "nested conditional expression"))
        elif isinstance(node, COMPREHENSIONS):
            counts["comprehensions"] += 1
            if len(node.generators) > 1 or has_inside(node, (ast.ListComp, ast.DictComp, ast.SetComp)):
                counts["nested"] += 1
                places.append((node.lineno, "nested comprehension"))
    return counts, sorted(places)


def names_of_comparisons(tree: ast.Module) -> set[int]:
    """Return the ids of the nodes that name the parameter of a comparison `other`."""
    methods = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name in COMPARISONS:
            methods.append(node)
    nodes: set[int] = set()
    for method in methods:
        for node in ast.walk(method):
            if isinstance(node, (ast.Name, ast.arg)) and "other" in (getattr(node, "id", ""), getattr(node, "arg", "")):
                nodes.add(id(node))
    return nodes


def is_tuple_assignment(node: ast.AST) -> bool:
    """Return whether a statement is `a, b = c, d`."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
        return False
    return isinstance(node.targets[0], ast.Tuple)


def has_inside(node: ast.AST, kinds: tuple[type[ast.AST], ...]) -> bool:
    """Return whether a node of these kinds is below another node."""
    return any(isinstance(inner, kinds) for inner in ast.walk(node) if inner is not node)


def n_code_lines(tree: ast.Module, source: str) -> int:
    """Return the number of lines that are no docstring, comment or blank."""
    lines = set()
    for number, line in enumerate(source.splitlines(), 1):
        if line.strip() and not line.strip().startswith("#"):
            lines.add(number)
    for node in ast.walk(tree):
        if isinstance(node, DEFINITIONS) and ast.get_docstring(node):
            docstring = node.body[0]
            lines -= set(range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1))
    return len(lines)


def main(paths: list[Path]) -> None:
    """Print the figures of files and folders; of a single file the places too."""
    for path in paths:
        if path.is_dir():
            files = sorted(path.rglob("*.py"))
        else:
            files = [path]
        print(path, *(f"{name} {value:.2f}" for name, value in figures_of(files)._asdict().items()), sep="  ")
        if path.is_file():
            _, places = count(path.read_text())
            print(*(f"  {path}:{line}: {reason}" for line, reason in places), sep="\n")


if __name__ == "__main__":
    main(list(map(Path, sys.argv[1:])))

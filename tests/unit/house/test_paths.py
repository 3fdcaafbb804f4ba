"""Paths that an object keeps are absolute: the program may change its folder after it has given them."""

import ast
from pathlib import Path

import hpcdist

SOURCE = Path(hpcdist.__file__).parent
#: Made of paths that are absolute, or of names alone.
FROM_ABSOLUTE = (
    "self.folder = Path(manager.directory).parent",
    "self._seen = {(Path(entry['path']).name, int(entry['saved_ns'])) for entry in self.evaluations}",
)


def kept_paths(tree):
    """Yield the assignments of a Path to an attribute, with their line."""
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None:
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        has_attribute = any("self." in ast.unparse(target) for target in targets)
        if has_attribute and "Path(" in ast.unparse(node.value).replace("fsPath(", ""):
            yield node.lineno, ast.unparse(node)


def test_kept_paths_are_absolute():
    relative = []
    for path in SOURCE.rglob("*.py"):
        for line, text in kept_paths(ast.parse(path.read_text())):
            if ".absolute()" not in text and text not in FROM_ABSOLUTE:
                relative.append(f"{path.relative_to(SOURCE)}:{line}: {text}")
    assert relative == []


def test_a_relative_path_would_be_found():
    assert len(list(kept_paths(ast.parse("class A:\n    def f(self, p):\n        self.p, self.q = Path(p), 1")))) == 1

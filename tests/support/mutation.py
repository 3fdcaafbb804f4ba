"""Removes a safety from a copy of the package: see safeties.py."""

import ast
import functools


def mutated(mutant, root):
    """Return the file that a mutant changes, and its new text.

    Raises:
        ValueError: when what it changes is not there, or not once.
    """
    try:
        return _change_named(mutant, root)
    except ValueError as error:
        raise ValueError(f"mutant {mutant.what!r}: {error}") from None


def _only(matches, description):
    if len(matches) != 1:
        raise ValueError(f"expected one {description}, got {len(matches)}")
    return matches[0]


def _change_named(mutant, root):
    module, _, name = mutant.where.rpartition(":")
    paths = [path for path in _definitions(root).get(name, ()) if _is_module(path, module)]
    path = root / _only(paths, f"definition of {mutant.where}")
    tree = ast.parse(path.read_text())
    definition = next(node for qualified_name, node in _named_nodes(tree) if qualified_name == name)
    replacing = _Replacing(mutant.old, mutant.new)
    replacing.generic_visit(definition)
    _only(replacing.found, f"{mutant.old!r} in {mutant.where}")
    return path, ast.unparse(ast.fix_missing_locations(tree))


def _is_module(path, end):
    """Return whether a path of a module has this end; all have the end ""."""
    return not end or f"/{path.with_suffix('')}".endswith(f"/{end}")


@functools.cache
def _definitions(root):
    """Return the files, relative to `root`, in which each qualified name is defined; one for each definition."""
    paths_by_name = {}
    for path in sorted([*(root / "hpcdist").rglob("*.py"), *(root / "slurm").glob("*.py")]):
        if path.is_symlink():
            continue
        for name, _ in _named_nodes(ast.parse(path.read_text())):
            paths_by_name.setdefault(name, []).append(path.relative_to(root))
    return paths_by_name


def _named_nodes(node, prefix=""):
    """Yield (qualified name, node) of functions, classes and constants."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield prefix + child.name, child
            yield from _named_nodes(child, f"{prefix}{child.name}.")
        elif isinstance(child, (ast.Assign, ast.AnnAssign)):
            if isinstance(child, ast.Assign):
                targets = child.targets
            else:
                targets = [child.target]
            yield from ((prefix + target.id, child) for target in targets if isinstance(target, ast.Name))
        elif isinstance(child, ast.stmt):
            yield from _named_nodes(child, prefix)


class _Replacing(ast.NodeTransformer):
    """Puts new code in place of each node that is like the old code.

    Attributes:
        found: the nodes that were replaced.
    """

    def __init__(self, old, new):
        self.found = []
        self._old = ast.parse(old).body[0]
        self._new = ast.parse(new).body
        if isinstance(self._old, ast.Expr) and isinstance(self._new[0], ast.Expr):
            self._old = self._old.value
            self._new = self._new[0].value

    def visit(self, node):
        if not _is_like(node, self._old):
            return self.generic_visit(node)
        self.found.append(node)
        return self._new


def _is_like(candidate, pattern):
    """Return whether two nodes, or two lists or values in them, are the same; `...` in the pattern is any."""
    if _is_any(pattern):
        return isinstance(candidate, ast.AST)
    if isinstance(pattern, list):
        is_open = bool(pattern) and _is_any(pattern[-1])
        required = pattern[:-1] if is_open else pattern
        if is_open:
            has_length = len(candidate) >= len(required)
        else:
            has_length = len(candidate) == len(required)
        return has_length and all(map(_is_like, candidate, required))
    if not isinstance(pattern, ast.AST):
        return candidate == pattern
    fields = set(pattern._fields)
    if isinstance(pattern, ast.Call) and pattern.args and _is_any(pattern.args[-1]):
        fields.remove("keywords")
    return type(candidate) is type(pattern) and all(
        _is_like(getattr(candidate, name), getattr(pattern, name)) for name in fields
    )


def _is_any(pattern):
    if isinstance(pattern, ast.Expr):
        return _is_any(pattern.value)
    return isinstance(pattern, ast.Constant) and pattern.value is ...

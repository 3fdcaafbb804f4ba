"""Writes docs/api.md, the index of public names, from names and docstrings, in less than a second: `make docs`."""

import ast
from pathlib import Path

from hpcdist import public_names

ROOT = Path(__file__).resolve().parents[2]
ROOMS = {
    "strategy": "Strategies",
    "training": "compile and fit",
    "tf_compat": "Variables, metrics and layers",
    "plan": "Parameter servers",
    "data": "Data",
    "diagnostics": "Diagnosis",
    "gradients": "Communication of gradients",
    "saving": "Checkpoints and preemption",
    "stopping": "Checkpoints and preemption",
    "run": "Checkpoints and preemption",
    "checkpoint": "Checkpoints and preemption",
    "collectives": "Collectives",
    "cluster": "Clusters and roles",
    "notebook": "Notebooks",
}


def first_lines(module):
    """Return name -> first line of the docstring, for the classes and functions of a module."""
    tree = ast.parse((ROOT / "hpcdist" / f"{module.replace('.', '/')}.py").read_text())
    definitions = [node for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    return {node.name: (ast.get_docstring(node) or "").split("\n")[0] for node in definitions}


def page():
    """Return the text of docs/api.md."""
    rows = {title: [] for title in ROOMS.values()}
    for name, module in sorted(public_names.NAMES.items(), key=lambda item: item[0].lower()):
        line = first_lines(module).get(name, "another name, or a constant")
        rows[ROOMS[module.split(".")[0]]].append(f"| `{name}` | {line.replace('|', chr(92) + '|')} | `{module}` |")
    parts = [
        "# API index\n",
        "Written by `make docs` from the table of public names; the docstrings have the details.\n",
    ]
    for title, lines in rows.items():
        parts.append("\n".join([f"## {title}\n", "| name | what it is | module |", "|---|---|---|", *lines, ""]))
    whole = ", ".join(f"`hpcdist.{name}`" for name in sorted(public_names.MODULES))
    return "\n".join([*parts, f"Modules that are public as a whole: {whole}.\n"])


if __name__ == "__main__":
    (ROOT / "docs" / "api.md").write_text(page())

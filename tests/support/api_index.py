"""Writes docs/reference/api.md, the index of public names, in less than a second: `make docs`."""

import ast
from pathlib import Path

from hpcdist import public_names

ROOT = Path(__file__).resolve().parents[2]
TITLES = {
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
#: Public modules whose own docstring says what they are; the names of the others have pages.
BY_THEMSELVES = ("compat", "testing", "torch_backend")
INTRODUCTION = """# Every name

Written by `make docs` from the table of public names. On the site each name leads to its docstring.
"""


def names_in(module):
    """Return the names that a public module defines, or imports for its users (`from a import X as X`)."""
    names = []
    for node in ast.parse((ROOT / "hpcdist" / f"{module}.py").read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
            names.append(node.name)
        elif isinstance(node, ast.ImportFrom):
            names += [alias.name for alias in node.names if alias.asname == alias.name]
    return sorted(names, key=str.lower)


def sections():
    """Return title -> names below `hpcdist`."""
    names_of = {title: [] for title in TITLES.values()}
    for name, module in sorted(public_names.NAMES.items(), key=lambda item: item[0].lower()):
        names_of[TITLES[module.split(".")[0]]].append(name)
    for name, module in public_names.MODULES.items():
        if name not in (*BY_THEMSELVES, *public_names.ALIASES) and module == name:
            names_of[f"hpcdist.{name}"] = [f"{name}.{member}" for member in names_in(module)]
    return {**names_of, "Modules": list(BY_THEMSELVES)}


def page():
    """Return the text of the page: from each name in it Sphinx makes a page of the name's docstring."""
    parts = [INTRODUCTION]
    for title, names in sections().items():
        lines = [f"## {title}", "", "```{eval-rst}", ".. currentmodule:: hpcdist", "", ".. autosummary::"]
        lines += ["   :toctree: api", "", *(f"   {name}" for name in names), "```", ""]
        parts.append("\n".join(lines))
    return "\n".join(parts)


if __name__ == "__main__":
    (ROOT / "docs" / "reference" / "api.md").write_text(page())

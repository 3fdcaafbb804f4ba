"""How Sphinx builds the documentation: `make site`.

The source folder is the repository itself, so that links between README, the pages here and the files beside them are
the same on the site as in a clone. A class or function has its page from its docstring, by reference/api.md.
"""

import re
from pathlib import Path
from typing import Any

import hpcdist

HERE = Path(__file__).parent

project = "hpcdist"
author = "The hpcdist authors"
copyright = "the hpcdist authors, Apache-2.0"
version = hpcdist.__version__
release = version

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_click",
    "sphinx_copybutton",
]
root_doc = "docs/index"
include_patterns = ["docs/**", "benchmarks/README.md", "tests/README.md", "*.md"]
exclude_patterns = ["docs/_templates"]
templates_path = [str(HERE / "_templates")]

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
# the notebook of the gallery has its outputs: `make gallery` executes it
nb_execution_mode = "off"
# docstrings write a name in single backticks: a link where there is such a name, else code
default_role = "py:obj"
autosummary_generate = True
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
copybutton_exclude = ".linenos, .gp, .go"
copybutton_prompt_text = "$ "

html_theme = "furo"
html_title = f"hpcdist {version}"
html_copy_source = False
html_show_sourcelink = False


def setup(app: Any) -> None:
    """Let Sphinx read docstrings as they are written here, before napoleon looks for Args, Returns and Raises."""
    app.connect("autodoc-process-docstring", _make_restructured, priority=400)
    for part in ("description", "options", "arguments", "envvars", "epilog"):
        app.connect(f"sphinx-click-process-{part}", _escape_stars)


def _make_restructured(
    _app: Any, kind: str, _name: str, _object: Any, _options: Any, lines: list[str]
) -> None:
    """Replace the lines of a docstring, which is plain text with names in backticks, by reStructuredText."""
    text = "\n".join(lines)
    # a star is never emphasis; at the start of a line napoleon wants the bare name of an argument
    text = text.replace("*", r"\*")
    text = re.sub(
        r"^( *)(?:\\\*)+(?=\w+[:,])",
        lambda match: match[0].replace("\\", ""),
        text,
        flags=re.MULTILINE,
    )
    # a label with its text in the same line, and the rest of it indented
    text = re.sub(
        r"^(Cost|Source): (.*(?:\n +\S.*)*)", _labelled_paragraph, text, flags=re.MULTILINE
    )
    lines[:] = text.split("\n")
    # napoleon takes the first line of an attribute up to a colon for its type: let that be an empty comment
    if kind in ("property", "attribute", "data"):
        lines[:0] = ["..", ""]


def _escape_stars(_app: Any, _context: Any, lines: list[str]) -> None:
    """Escape the stars in texts of the command, such as `worker:*`."""
    lines[:] = [line.replace("*", r"\*") for line in lines]


def _labelled_paragraph(match: re.Match[str]) -> str:
    label, text = match.groups()
    return f"\n**{label}:** {' '.join(text.split())}\n"

"""`hpcdist new`: writes a training script to begin with, which runs at once on handwritten digits."""

import importlib.util
import os
import re
import shlex
import sys
from importlib.machinery import PathFinder
from pathlib import Path

import click

from hpcdist.checkpoint import durable
from hpcdist.checkpoint.durable import Disk
from hpcdist.cli.output import echo
from hpcdist.cli.shipped import shipped_folder
from hpcdist.errors import UsageError

#: Kind of a script -> what it is. Each is a program of jobs/new/.
KINDS = {
    "loop": "a training loop",
    "fit": "compile and fit, as with Keras",
    "ddp": "a script for torch DDP, and what changes in it",
}
#: Names that need no quotes in a shell, a batch script or a docstring.
_NAME = re.compile(r"\w[\w+-]*\.py")


@click.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option(
    "--kind",
    type=click.Choice(list(KINDS)),
    default="loop",
    show_default=True,
    help="; ".join(f"{kind}: {text}" for kind, text in KINDS.items()) + ".",
)
def command(path: Path, kind: str) -> None:
    """Write a training script to begin with: PATH, such as my_job.py.

    It has checkpoints, a learning rate schedule, validation and the best model, and trains a small network on the
    handwritten digits that come with scikit-learn. Put your own data and your own model into it.

    \b
    hpcdist new my_job.py
    hpcdist new my_job.py --kind fit
    """
    _require_name(path)
    template = shipped_folder("jobs/new", f"{kind}.py") / f"{kind}.py"
    text = template.read_text(encoding="utf-8")
    _write_new(path, text.replace(f"python {kind}.py", f"python {path.name}"))
    echo(_next_steps(path, kind))


def _require_name(path: Path) -> None:
    """Raise UsageError for a name that a script cannot have, such as torch.py, which would hide torch from it."""
    if not _NAME.fullmatch(path.name):
        raise UsageError(
            f"hpcdist new: expected a file name of letters, digits, '_', '+' and '-' that ends in .py, got "
            f"{path.name!r}; choose another one, such as my_job.py."
        )
    # the first folder is that of the command, or the one that the user is in
    spec = PathFinder.find_spec(path.stem, sys.path[1:])
    is_installed = spec is not None and spec.origin is not None
    if path.stem == "hpcdist" or path.stem in sys.stdlib_module_names or is_installed:
        raise UsageError(
            f"hpcdist new: expected a name that no module has, got {path.name!r}, which would hide the module "
            f"{path.stem} from the script; choose another one, such as my_job.py."
        )


def _write_new(path: Path, text: str) -> None:
    """Write a file that must not exist yet, whole or not at all."""
    if not path.parent.is_dir():
        raise UsageError(
            f"hpcdist new: expected a folder that exists, got {str(path.parent)!r}; make it, or choose another one."
        )
    if os.path.lexists(path):
        raise UsageError(
            f"hpcdist new: expected a path where nothing is, got {str(path)!r}, which exists; choose another one."
        )
    durable.replace_text(Disk(), path, text)


def _next_steps(path: Path, kind: str) -> str:
    """Return what to do with a new script, as lines of text."""
    script = shlex.quote(str(path))
    lines = [f"wrote {path}: {KINDS[kind]}, on handwritten digits"]
    if importlib.util.find_spec("sklearn") is None:
        lines.append("its data:      pip install scikit-learn")
    lines += [
        f"run it:        hpcdist run -n 2 {script}",
        "stop it:       Ctrl-C; the same command continues there",
        "as a job:      hpcdist submit --nodes 2 --ntasks-per-node 2 --time 1:00:00 "
        f"{script} --run-dir runs/{path.stem}",
    ]
    return "\n".join(lines)

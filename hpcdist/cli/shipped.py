"""Folders of the repository that the package carries: slurm/ for batch scripts, benchmarks/ for `hpcdist bench`."""

from pathlib import Path

import hpcdist
from hpcdist.errors import ConfigurationError


def shipped_folder(name: str, file: str) -> Path:
    """Return a folder of the repository: inside the package, or beside it in a clone.

    Args:
        name: name of the folder.
        file: name of a file in it, by which the folder is recognized.

    Raises:
        ConfigurationError: if the folder is missing.
    """
    package = Path(hpcdist.__file__).parent
    for folder in (package / name, package.parent / name):
        if (folder / file).is_file():
            return folder
    raise ConfigurationError(
        f"expected {name}/{file} in {package} or beside it, got none; install hpcdist again."
    )

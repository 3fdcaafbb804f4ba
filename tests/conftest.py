"""What all tests share: paths, and an environment without a launcher's traces for tests that start programs."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
_LAUNCHER_PREFIXES = ("TF_CONFIG", "SLURM_", "OMPI_COMM_", "PMI", "PMIX_", "HYDI", "MPI_LOCAL", "HPCDIST_")


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def clean_environ() -> dict[str, str]:
    """Return the environment without what a launcher or a scheduler has put there."""
    return {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHER_PREFIXES)}

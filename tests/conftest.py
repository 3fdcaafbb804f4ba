"""What all tests share: paths, and an environment without a launcher's traces for tests that start programs."""

import os
from pathlib import Path

import pytest
from scale import SCALE

ROOT = Path(__file__).resolve().parent.parent
_LAUNCHER_PREFIXES = ("TF_CONFIG", "SLURM_", "OMPI_COMM_", "PMI", "PMIX_", "HYDI", "MPI_LOCAL", "HPCDIST_")


#: Folders whose tests take seconds each: they are slow unless marked `quick`.
_SLOW_FOLDERS = {"fault", "slurm", "hosts"}


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="run every case of the sweeps, not a sample")
    parser.addoption("--transcript", metavar="PATH", help="write the first half hour of a new user there")


def pytest_configure(config):
    SCALE.is_full = config.getoption("--full")


def pytest_collection_modifyitems(items):
    for item in items:
        if _SLOW_FOLDERS & set(item.path.relative_to(ROOT).parts) and not item.get_closest_marker("quick"):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def clean_environ() -> dict[str, str]:
    """Return the environment without what a launcher or a scheduler has put there."""
    return {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHER_PREFIXES)}

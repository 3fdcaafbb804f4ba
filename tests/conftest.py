"""What all tests share: paths, and an environment without a launcher's traces for tests that start programs."""

import collections
import json
import os
import signal
from pathlib import Path

import pytest
from scale import SCALE

ROOT = Path(__file__).resolve().parent.parent
_LAUNCHER_PREFIXES = ("TF_CONFIG", "SLURM_", "OMPI_COMM_", "PMI", "PMIX_", "HYDI", "MPI_LOCAL", "HPCDIST_")


#: Folders whose tests take seconds each: they are slow unless marked `quick`.
_SLOW_FOLDERS = {"fault", "slurm", "hosts"}


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="run every case of the sweeps, not a sample")
    parser.addoption("--tutorial", metavar="PATH", help="write the tutorial of an own script there")


def pytest_configure(config):
    SCALE.is_full = config.getoption("--full")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # a shell starts what runs in the background so, and programs of tests would inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # likewise, under nohup
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    times_path = os.environ.get("TEST_TIMES")
    is_first_rank = all(os.environ.get(name, "0") == "0" for name in ("PMI_RANK", "OMPI_COMM_WORLD_RANK"))
    if times_path and is_first_rank and not hasattr(config, "workerinput"):
        config.pluginmanager.register(TestTimes(Path(times_path)))


class TestTimes:
    """Appends to a file how long each test took, with what was set up for it; tests/support/parts.py makes a table."""

    def __init__(self, path):
        self._path = path
        self._seconds = collections.defaultdict(float)

    def pytest_runtest_logreport(self, report):
        self._seconds[report.nodeid] += report.duration

    def pytest_sessionfinish(self):
        lines = [json.dumps({"test": name, "seconds": seconds}) + "\n" for name, seconds in self._seconds.items()]
        with self._path.open("a") as file:
            file.writelines(lines)


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

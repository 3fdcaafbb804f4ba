"""A pytest plugin, beside pytest-mpi: with --with-mpi, a failure or a hang on one rank is one on all, reported once.

pytest loads this for every run of the environment, so it imports nothing before it knows that MPI is wanted.
"""

from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the time limit of a test."""
    parser.addini(
        "mpi_timeout",
        "seconds after which a test under MPI ends the run; a timeout mark goes first",
        default="60",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Start MPI, and let ranks report together, where pytest-mpi is asked for it."""
    is_mpi_wanted = config.getoption("--with-mpi", default=False)
    if is_mpi_wanted or config.getoption("--only-mpi", default=False):
        from hpcdist.pytest_plugin.ranks import RankReports

        config.pluginmanager.register(RankReports(config), "hpcdist-ranks")


@pytest.fixture(scope="session")
def world() -> Any:
    """Return the ranks of this run: `rank`, `size`, `hosts`, agreements. Collective at first use: all ranks."""
    from hpcdist.runtime.process import make_world

    return make_world()


@pytest.fixture
def strategy(world: Any) -> Any:
    """Return a new MultiWorkerMirroredStrategy over all ranks. Collective over all ranks."""
    from hpcdist.strategy.multi_worker import MultiWorkerMirroredStrategy

    return MultiWorkerMirroredStrategy()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that takes `every_strategy` once with each that runs on CPUs."""
    if "every_strategy" in metafunc.fixturenames:
        from hpcdist.testing import STRATEGIES

        metafunc.parametrize("every_strategy", list(STRATEGIES), indirect=True)


@pytest.fixture
def every_strategy(world: Any, request: pytest.FixtureRequest) -> Any:
    """Return a new strategy, of each kind in turn; see `hpcdist.testing.STRATEGIES`. Collective over all ranks."""
    from hpcdist.testing import STRATEGIES

    return STRATEGIES[request.param]()


@pytest.fixture
def shared_path(world: Any, tmp_path: Any) -> Any:
    """Return rank 0's temporary folder on every rank. Collective over all ranks; they share a file system."""
    path = world.broadcast_text(str(tmp_path), 0, world.comm)
    return type(tmp_path)(path)

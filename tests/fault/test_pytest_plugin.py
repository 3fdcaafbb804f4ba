"""hpcdist's pytest plugin on a folder outside of the repository, as its page says."""

import re
import subprocess

import pytest
from real_jobs import PYTHON

FAILING = """
import time
import pytest
import hpcdist

pytestmark = pytest.mark.mpi

def test_well(strategy, world):
    assert strategy.size == world.size

def test_one_rank_fails(world):
    assert world.rank == 0, "only rank 0 is right"

def test_after_it(world):
    hpcdist.barrier() if hasattr(hpcdist, "barrier") else world.comm.Barrier()

def test_one_rank_skips(world):
    if world.rank == 1:
        pytest.skip("not here")

@pytest.mark.mpi(min_size=3)
def test_for_three(world):
    assert world.size >= 3

def test_folders(shared_path, world, tmp_path):
    assert len(set(world.comm.allgather(str(shared_path)))) == 1
    assert len(set(world.comm.allgather(str(tmp_path)))) == world.size
"""
HANGING = """
import time
import pytest

@pytest.mark.mpi
def test_fails_first(world):
    assert world.rank == 0, "only rank 0 is right"

@pytest.mark.mpi
@pytest.mark.timeout(2)
def test_hangs(world):
    if world.rank == 0:
        world.comm.Barrier()
    time.sleep(100)
"""


@pytest.fixture
def run(start, tmp_path):
    """Return run(text, *options, n_ranks): the outcome of pytest on a file with this text, in a folder of its own."""
    folder = tmp_path / "mine"
    folder.mkdir()

    def run(text, *options, n_ranks=2):
        (folder / "test_mine.py").write_text(text)
        arguments = ("-m", "pytest", "--rootdir", folder, "-p", "no:cacheprovider", *options, folder / "test_mine.py")
        return start(n_ranks, *arguments).wait(90)

    return run


@pytest.mark.feature("debugging.pytest-plugin")
def test_failures_are_those_of_all_ranks_and_reported_once(run):
    outcome = run(FAILING, "--with-mpi")
    assert outcome.code != 0
    assert "failed on rank 1 of 2; report of rank 1" in outcome.output
    assert "ranks disagree: ['passed', 'skipped']" in outcome.output
    assert re.search(r"2 failed, 3 passed, 1 skipped", outcome.output), outcome.output
    assert outcome.output.count(" passed") == 1


@pytest.mark.feature("debugging.pytest-plugin")
@pytest.mark.parametrize(
    ("options", "is_marked"),
    [([], True), (["-p", "no:timeout"], True), (["-o", "mpi_timeout=2"], False)],
    ids=["pytest-timeout", "without it", "no limit of pytest-timeout"],
)
def test_a_hang_ends_the_run_and_says_where_each_rank_is(run, nothing_left, options, is_marked):
    if is_marked:
        text = HANGING
    else:
        text = HANGING.replace("@pytest.mark.timeout(2)\n", "")
    outcome = run(text, "--with-mpi", "-W", "ignore::pytest.PytestUnknownMarkWarning", *options)
    assert outcome.code != 0
    assert outcome.seconds < 40
    for rank, line in ((0, "world.comm.Barrier()"), (1, "time.sleep(100)")):
        place = outcome.output.split(f"test_hangs: more than 2 s on rank {rank}, which is here:")[1]
        assert line in place[:600]
    assert outcome.output.count("test_fails_first failed before:") == 1


def test_the_page(run, root):
    text = re.search(r"```python\n(.*?)```", (root / "docs" / "how-to" / "testing.md").read_text(), re.DOTALL)[1]
    for n_ranks, passed in ((2, 7), (1, 6)):
        outcome = run(text, "--with-mpi", n_ranks=n_ranks)
        assert outcome.code == 0, outcome.output
        assert f"{passed} passed" in outcome.output


def test_without_mpi_nothing_is_imported(tmp_path, clean_environ):
    (tmp_path / "test_plain.py").write_text(
        "import sys\ndef test_plain():\n    assert not {'mpi4py', 'torch'} & set(sys.modules)\n"
    )
    command = [PYTHON, "-m", "pytest", "-q", "--rootdir", tmp_path, "-p", "no:cacheprovider", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, env=clean_environ, timeout=60)
    assert done.returncode == 0, done.stdout

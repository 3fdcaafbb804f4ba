"""What tests/mpi/conftest.py promises: one failing rank fails all and is reported once; a test that hangs is named."""

import shutil

TESTS = """
import time
import pytest

pytestmark = pytest.mark.mpi

def test_fails_on_one_rank(comm):
    assert comm.rank != 1, "on purpose"

def test_is_right(comm):
    assert comm.size == 2

@pytest.mark.timeout(2)
def test_hangs(comm):
    if comm.rank == 0:
        comm.recv(source=1)
"""


def run(start, root, tmp_path, *options):
    folder = tmp_path / "suite"
    folder.mkdir()
    for path in ("mpi/conftest.py", "support/made_up_hosts.py"):
        shutil.copy(root / "tests" / path, folder)
    (folder / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\nmarkers = mpi\n")
    (folder / "test_suite.py").write_text(TESTS)
    return start(2, "-m", "pytest", "-q", "-rN", "--with-mpi", folder, *options).wait(50)


def test_a_failure_on_one_rank_is_one_failure_on_all_and_reported_once(start, root, tmp_path):
    outcome = run(start, root, tmp_path, "-k", "not hangs")
    assert outcome.code == 1
    assert outcome.output.count("failed on rank 1 of 2; report of rank 1") == 1
    assert outcome.output.count("AssertionError: on purpose") == 1
    assert outcome.output.count("1 failed, 1 passed, 1 deselected") == 1


def test_a_test_that_hangs_ends_the_run_and_is_named(start, root, tmp_path):
    outcome = run(start, root, tmp_path)
    assert outcome.code != 0
    assert "test_suite.py::test_hangs: more than 2.0 s on rank 0" in outcome.output
    assert "in test_hangs" in outcome.output

"""log_to: a log file for each rank, the chief's records on the screen."""

import logging

import pytest

import hpcdist
from hpcdist.errors import CheckpointError

pytestmark = pytest.mark.mpi


@pytest.fixture
def root_logger():
    """Return the root logger, and give it its handlers and level back."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers = []
    yield root
    for handler in root.handlers:
        handler.close()
    root.handlers, root.level = handlers, level


def test_each_rank_has_a_file_and_the_chief_the_screen(comm, shared_path, root_logger, capfd):
    path = hpcdist.log_to(shared_path / "logs")
    capfd.readouterr()
    logging.getLogger("mine").info("100 %% of rank %d", comm.rank)
    logging.getLogger("mine").debug("not written")
    screen = capfd.readouterr().err
    assert path == shared_path / "logs" / f"rank-{comm.rank:05d}.log"
    [line] = path.read_text().splitlines()
    assert line.endswith(f" INFO rank {comm.rank} (worker {comm.rank}) mine: 100 % of rank {comm.rank}")
    assert screen == (line + "\n" if comm.rank == 0 else "")
    comm.Barrier()
    assert len(list((shared_path / "logs").iterdir())) == comm.size


def test_a_folder_that_cannot_be_made_is_an_error_on_all_ranks(comm, shared_path, root_logger):
    (shared_path / "logs").write_text("")
    with pytest.raises(CheckpointError, match=r"log_to: expected to write .*rank-0000\d\.log, got"):
        hpcdist.log_to(shared_path / "logs")

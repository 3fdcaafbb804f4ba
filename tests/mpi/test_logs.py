"""log_to: a log file for each rank, the chief's records on the screen."""

import json
import logging
import re

import pytest
from mpi4py import MPI

import hpcdist
from hpcdist.errors import CheckpointError, ConfigurationError
from hpcdist.runtime.process import make_world

pytestmark = pytest.mark.mpi


@pytest.fixture
def root_logger():
    """Return the root logger, and give it its handlers and level back."""
    root = logging.getLogger()
    handlers = root.handlers[:]
    level = root.level
    root.handlers = []
    yield root
    for handler in root.handlers:
        handler.close()
    root.handlers = handlers
    root.level = level


@pytest.mark.feature("observability.logs-by-rank")
def test_each_rank_has_a_file_and_the_chief_the_screen(comm, shared_path, root_logger, capfd, monkeypatch):
    monkeypatch.setattr(make_world(), "step", None)  # that of another test
    path = hpcdist.log_to(shared_path / "logs")
    capfd.readouterr()
    logging.getLogger("mine").info("100 %% of rank %d", comm.rank)
    logging.getLogger("mine").debug("not written")
    screen = capfd.readouterr().err
    assert path == shared_path / "logs" / f"rank-{comm.rank:05d}.log"
    [line] = path.read_text().splitlines()
    host = MPI.Get_processor_name()
    rank_label = f"worker:{comm.rank} r{comm.rank}/{comm.size} {host}"
    assert re.fullmatch(
        rf"\d{{4}}-\d\d-\d\dT[\d:.]{{12}} INFO \[{rank_label}\] mine: 100 % of rank {comm.rank}", line
    ), line
    if comm.rank == 0:
        expected = line + "\n"
    else:
        expected = ""
    assert screen == expected
    comm.Barrier()
    assert len(list((shared_path / "logs").iterdir())) == comm.size


def test_a_folder_that_cannot_be_made_is_an_error_on_all_ranks(comm, shared_path, root_logger):
    (shared_path / "logs").write_text("")
    with pytest.raises(CheckpointError, match=r"log_to: expected to write .*rank-0000\d\.log, got"):
        hpcdist.log_to(shared_path / "logs")


def test_lines_of_json_have_the_step_and_the_traceback(comm, shared_path, root_logger, monkeypatch):
    monkeypatch.setenv("HPCDIST_LOG", "json")
    path = hpcdist.log_to(shared_path / "logs")
    monkeypatch.setattr(make_world(), "step", 40)
    try:
        raise ValueError("wrong")
    except ValueError:
        logging.getLogger("mine").exception("it\nfailed")
    [line] = path.read_text().splitlines()
    log_record = json.loads(line)
    assert (log_record["level"], log_record["role"], log_record["rank"], log_record["size"]) == (
        "ERROR",
        f"worker:{comm.rank}",
        comm.rank,
        comm.size,
    )
    assert (log_record["step"], log_record["name"]) == (40, "mine")
    assert log_record["message"].startswith("it\nfailed\nTraceback")
    assert log_record["message"].endswith("ValueError: wrong")


def test_another_kind_of_log_is_an_error(comm, shared_path, root_logger, monkeypatch):
    monkeypatch.setenv("HPCDIST_LOG", "xml")
    with pytest.raises(ConfigurationError, match="HPCDIST_LOG.*'xml'"):
        hpcdist.log_to(shared_path / "logs")

"""Tests under mpirun: a failure on one rank is a failure on all, reported once; a test that hangs ends the run."""

import faulthandler
import gc
import importlib
import os
import shutil
import sys
import tempfile
import threading

import pytest
import torch
from made_up_hosts import group_on
from mpi4py import MPI

from hpcdist.collectives.group import group_of
from hpcdist.runtime.process import make_world
from hpcdist.strategy import multi_worker

_COMM = MPI.COMM_WORLD.Dup()


def pytest_report_header():
    return f"{MPI.Get_library_version().splitlines()[0].strip()}, rank {_COMM.rank} of {_COMM.size}"


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    """Give every rank temporary folders of its own: pytest's shared ones are cleaned by whoever comes first."""
    config.option.basetemp = config.hpcdist_folder = tempfile.mkdtemp(prefix="hpcdist-tests-")


def pytest_sessionstart(session):
    """Let rank 0 alone report."""
    if _COMM.rank > 0:
        session.config.hpcdist_silence = open(os.devnull, "w")
        session.config.get_terminal_writer()._file = session.config.hpcdist_silence


def pytest_collection_finish():
    """Leave modules out of what the garbage collector looks through: each plan of a model runs it, for 0.3 s here."""
    importlib.import_module("torch._dynamo")  # which torch imports at the first plan otherwise
    gc.collect()
    gc.freeze()


def pytest_unconfigure(config):
    _COMM.Barrier()
    shutil.rmtree(config.hpcdist_folder)
    if _COMM.rank > 0:
        config.hpcdist_silence.close()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item, call):
    """Give every rank the same outcome of every phase, so that all run, or all leave out, the next one."""
    report = yield
    outcomes = _COMM.allgather((report.outcome, report.longreprtext if report.failed else ""))
    failed = [(rank, text) for rank, (outcome, text) in enumerate(outcomes) if outcome == "failed"]
    if failed:
        ranks = ", ".join(str(rank) for rank, _ in failed)
        report.outcome = "failed"
        report.longrepr = f"failed on rank {ranks} of {_COMM.size}; report of rank {failed[0][0]}:\n{failed[0][1]}"
    elif len({outcome for outcome, _ in outcomes}) > 1:
        report.outcome = "failed"
        report.longrepr = f"ranks disagree: {[outcome for outcome, _ in outcomes]}"
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item, settings):
    """End the whole run when a test takes too long: ranks that wait for each other cannot be interrupted."""

    def end():
        capture = item.config.pluginmanager.getplugin("capturemanager")
        capture.suspend_global_capture()
        sys.stderr.write(f"\n{item.nodeid}: more than {settings.timeout} s on rank {_COMM.rank}\n")
        faulthandler.dump_traceback(sys.stderr)
        sys.stderr.flush()
        os._exit(124)

    item.hpcdist_timer = threading.Timer(settings.timeout, end)
    item.hpcdist_timer.daemon = True
    item.hpcdist_timer.start()
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_cancel_timer(item):
    if hasattr(item, "hpcdist_timer"):  # not when collecting fails
        item.hpcdist_timer.cancel()
    return True


@pytest.fixture(scope="session")
def comm():
    """Return all ranks, private to the tests. The process's own world is there then, whichever test comes first."""
    make_world()
    return _COMM


@pytest.fixture
def shared_path(comm, tmp_path):
    """Return rank 0's temporary folder on every rank."""
    return comm.bcast(tmp_path, 0)


@pytest.fixture
def make_linear():
    """Return make(strategy, n_inputs, lr): a layer with one output, made in the scope, and its SGD."""

    def make(strategy, n_inputs, lr):
        with strategy.scope():
            model = torch.nn.Linear(n_inputs, 1)
            return model, torch.optim.SGD(model.parameters(), lr=lr)

    return make


@pytest.fixture
def make_group(comm):
    """Return what makes groups on made-up hosts: of a name in HOSTS, of so many ranks each, or, by default, on one."""
    groups = []

    def make(hosts=None):
        groups.append(group_on(hosts or comm.size, comm, make_world()))
        return groups[-1]

    yield make
    for group in groups:
        group.free()


@pytest.fixture
def over_hosts(comm, monkeypatch):
    """Return over(hosts): strategies made from then on believe to be on these hosts; None: on the real one."""
    groups = []

    def over(hosts):
        def make(role_comm, timeout_s=None, world=None):
            groups.append(group_on(hosts, role_comm, world or make_world(), timeout_s=timeout_s))
            return groups[-1]

        monkeypatch.setattr(multi_worker, "group_of", group_of if hosts is None else make)

    yield over
    for group in groups:
        group.free()

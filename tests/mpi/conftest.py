"""Fixtures of tests under mpirun, which hpcdist's own pytest plugin lets fail, and hang, on all ranks alike."""

import gc

import pytest
import torch
from made_up_hosts import group_on
from mpi4py import MPI

from hpcdist.collectives.group import group_of
from hpcdist.runtime.process import call_when_done, make_world
from hpcdist.stopping.preemption import PreemptionCheckpointHandler
from hpcdist.strategy import multi_worker
from hpcdist.training import backup

_COMM = MPI.COMM_WORLD.Dup()


@pytest.fixture(scope="session")
def comm():
    """Return all ranks, private to the tests. The process's own world is there then, whichever test comes first."""
    make_world()
    return _COMM


@pytest.fixture
def no_handler_left():
    """Close the handlers that a test leaves, also those of worlds with parameter servers, and forget its fits.

    A handler acts on requests in later tests, and keeps its strategy alive.
    """
    yield
    close_handlers()
    backup._ended.clear()
    backup._used.clear()
    gc.collect()


@pytest.fixture(autouse=True, scope="module")
def handlers_end_with_their_file():
    """Close the handlers that a file leaves: they would refuse loops of other tests, which nothing can save."""
    yield
    close_handlers()


def close_handlers():
    """Close all handlers. Whoever collects garbage afterwards must not hold one: what is left then is frozen."""
    for candidate in gc.get_objects():
        if type(candidate) is PreemptionCheckpointHandler:
            candidate.close()
    call_when_done(None)  # the exit hooks keep the last one


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

        if hosts is None:
            make_group = group_of
        else:
            make_group = make
        monkeypatch.setattr(multi_worker, "group_of", make_group)

    yield over
    for group in groups:
        group.free()

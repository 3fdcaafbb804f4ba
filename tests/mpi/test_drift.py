"""Ranks that drift apart are found in programs that never save, too."""

import copy
import logging

import pytest
import torch
from torch import nn

import hpcdist
from hpcdist.errors import DesyncError
from hpcdist.program.drift import SUMS_PER_SETTINGS, SUMS_PER_SLICE
from hpcdist.program.end_of_program import _Comparison

pytestmark = pytest.mark.mpi


@pytest.fixture(autouse=True)
def several_ranks(comm):
    if comm.size == 1:
        pytest.skip("one rank cannot differ")


class Program:
    def __init__(self, **settings):
        self.strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op="sum", **settings)
        with self.strategy.scope():
            self.model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.5)

    def step(self):
        self.optimizer.zero_grad()
        self.model(torch.ones(2, 3)).sum().backward()
        self.optimizer.step()

    def steps_until_found(self, limit):
        for number in range(1, limit + 1):
            try:
                self.step()
            except DesyncError as error:
                return number, str(error)
        return None, ""


def change_rate(program, rank):
    program.optimizer.param_groups[0]["lr"] = 0.01 * rank


def load_others(program, rank):
    if rank == 1:
        program.model.load_state_dict({key: value + 1 for key, value in program.model.state_dict().items()})


def local_schedule(program, rank):
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(program.optimizer, patience=0, factor=0.5)
    for epoch in range(3):
        if rank == 1:
            metric = epoch
        else:
            metric = -epoch
        schedule.step(metric)


@pytest.mark.feature("semantics.ranks-that-drift")
@pytest.mark.parametrize(
    ("change", "limit"),
    [(change_rate, SUMS_PER_SETTINGS), (local_schedule, SUMS_PER_SETTINGS), (load_others, SUMS_PER_SLICE)],
)
def test_ranks_that_drift_are_found_on_all_ranks(comm, change, limit):
    program = Program()
    for _ in range(3):
        program.step()
    change(program, comm.rank)
    number, text = program.steps_until_found(limit + 1)
    assert number is not None
    assert "on rank" in text
    assert len(set(comm.allgather((number, text)))) == 1


def test_what_is_equal_is_no_drift(comm):
    program = Program()
    schedule = torch.optim.lr_scheduler.StepLR(program.optimizer, 3, 0.9)
    for _ in range(3 * SUMS_PER_SLICE):
        program.step()
        schedule.step()


def test_local_steps_may_differ(comm):
    options = hpcdist.CommunicationOptions(local_steps=4)
    program = Program(communication_options=options)
    for _ in range(2 * SUMS_PER_SLICE):
        program.optimizer.zero_grad()
        program.model(torch.ones(2, 3) * (comm.rank + 1)).sum().backward()
        program.optimizer.step()


def test_a_copy_that_is_trained_outside_the_scope_is_warned_of_once(comm, caplog):
    program = Program()
    program.step()
    model_copy = copy.deepcopy(program.model)
    optimizer = torch.optim.SGD(model_copy.parameters(), lr=0.01)
    with caplog.at_level(logging.WARNING, "hpcdist"):
        for _ in range(3 * SUMS_PER_SLICE):
            program.step()
            optimizer.zero_grad()
            model_copy(torch.ones(2, 3) * (comm.rank + 1)).sum().backward()
            optimizer.step()
    n_lines = sum("copies of the model" in message for message in caplog.messages)
    assert n_lines == (comm.rank == 0)


@pytest.mark.parametrize("is_loaded", [False, True])
def test_the_end_of_a_program_compares_once_more(comm, caplog, is_loaded):
    program = Program()
    program.step()
    with torch.no_grad():  # torch counts no change of data
        program.model[1].weight.data += comm.rank
    if is_loaded:  # as the best weights, by one rank, for a last evaluation
        load_others(program, comm.rank)
    with caplog.at_level(logging.WARNING, "hpcdist"):
        _Comparison(program.strategy.world)()
    lines = [message for message in caplog.messages if "end of the program" in message]
    assert len(lines) == (comm.rank == 0 and not is_loaded)


def steps(model, optimizer, inputs, number):
    for _ in range(number):
        optimizer.zero_grad()
        model(inputs).sum().backward()
        optimizer.step()


@pytest.mark.feature("semantics.ranks-that-drift")
@pytest.mark.parametrize("local_steps", [1, 4])
def test_an_old_optimizer_that_one_rank_still_has_is_no_drift(comm, caplog, local_steps):
    """When it is freed is up to the garbage collector, which runs on each rank when it likes."""
    program = Program(communication_options=hpcdist.CommunicationOptions(local_steps=local_steps))
    inputs = torch.ones(2, 3) * (comm.rank + 1)
    live_optimizers = []
    with caplog.at_level(logging.WARNING, "hpcdist"):
        for rate in (0.01, 0.02, 0.03):
            with program.strategy.scope():
                optimizer = torch.optim.SGD(program.model.parameters(), lr=rate, momentum=rate)
            steps(program.model, optimizer, inputs, SUMS_PER_SLICE)
            if comm.rank == 0:
                live_optimizers.append(optimizer)
        del optimizer
        _Comparison(program.strategy.world)()
    assert not [message for message in caplog.messages if "equal on all" in message]


@pytest.mark.feature("semantics.ranks-that-drift")
def test_a_rank_that_makes_no_more_steps_is_found(comm):
    """Others still compare settings; what tells are the parameters."""
    program = Program()
    for _ in range(3):
        program.step()
    step = program.optimizer.step
    if comm.rank == 1:
        program.optimizer.step = lambda: None
    else:
        program.optimizer.step = step
    number, text = program.steps_until_found(2 * SUMS_PER_SLICE)
    assert number is not None
    assert "the parameters" in text


@pytest.mark.parametrize("n_steps_before", [0, 2 * SUMS_PER_SETTINGS], ids=["it has just stepped", "only its slice"])
def test_a_model_that_one_rank_still_has_is_no_drift_and_the_other_is_compared(comm, caplog, n_steps_before):
    program = Program()
    with program.strategy.scope():
        second_model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(second_model.parameters(), lr=0.01)
    if comm.rank == 0:
        live_objects = [second_model, optimizer]
    else:
        live_objects = []
    program.step()
    steps(second_model, optimizer, torch.ones(2, 3), SUMS_PER_SLICE)
    for _ in range(n_steps_before):
        program.step()
    del second_model, optimizer
    with caplog.at_level(logging.WARNING, "hpcdist"):
        for _ in range(3 * SUMS_PER_SLICE):
            program.step()
        _Comparison(program.strategy.world)()
    assert not [message for message in caplog.messages if "equal on all" in message]
    live_objects.clear()
    load_others(program, comm.rank)
    assert program.steps_until_found(2 * SUMS_PER_SLICE)[0] is not None

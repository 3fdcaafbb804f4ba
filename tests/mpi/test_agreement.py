"""What one rank wants, all learn at the same poll: with every sum of gradients, and by messages where there is none."""

import contextlib
import time

import pytest
import torch
from torch import nn

import hpcdist
from hpcdist.runtime.process import make_world
from hpcdist.runtime.step_flags import Request
from hpcdist.stopping.agreement import MAX_POLLS, Agreement

pytestmark = pytest.mark.mpi
ROWS = 96
BATCH = 12


class Watcher:
    """Wants what it is told to, and notes at which poll it learnt of what."""

    def __init__(self, world, clock=time.monotonic):
        self.want = Request.NONE
        self.n_polls = 0
        self.learnt = []
        self.agreement = Agreement(world, self.requested, clock)
        self.world = world

    def requested(self):
        return self.want

    def note_unsafe_point(self):
        """Nothing waits here."""

    def poll_after_pass(self):
        """A validation is no point between two iterations."""

    def poll_between_batches(self):
        self.n_polls += 1
        if heard := self.agreement.poll():
            self.learnt.append((self.n_polls, heard))


@pytest.fixture
def watcher():
    world = make_world()
    watcher = Watcher(world)
    world.step_flags.attach(watcher)
    yield watcher
    world.step_flags.detach(world.step_flags.requester)


def build(make_strategy=hpcdist.MultiWorkerMirroredStrategy, **options):
    strategy = make_strategy(**options)
    with strategy.scope():
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(1))
    batches = strategy.experimental_distribute_dataset(hpcdist.Dataset.from_tensor_slices(rows).batch(BATCH))

    def step(x):
        optimizer.zero_grad()
        hpcdist.compute_average_loss(model(x).square().sum(1), global_batch_size=BATCH).backward()
        optimizer.step()

    return strategy, model, batches, step


def same_everywhere(comm, value):
    values = comm.allgather(value)
    assert len(set(map(repr, values))) == 1, values
    return value


@pytest.mark.feature(
    "strategies.strategy-combinations", "checkpoints.one-rank-s-signal-suffices", "semantics.handler-agrees-on-a-step"
)
@pytest.mark.parametrize(
    ("make_strategy", "more_replicas"),
    [
        (hpcdist.MultiWorkerMirroredStrategy, None),
        (hpcdist.MultiWorkerMirroredStrategy, 3),
        (hpcdist.CentralStorageStrategy, None),
        (hpcdist.CentralStorageStrategy, 1),
    ],
)
def test_it_rides_with_the_gradients(comm, watcher, make_strategy, more_replicas):
    """The last rank wants to stop after its 4th batch: all know after that step, and no message was sent."""
    if more_replicas is None:
        options = {}
    else:
        options = {"num_replicas": comm.size + more_replicas}
    strategy, _, batches, step = build(make_strategy, **options)
    for number, x in enumerate(batches, 1):
        if number == 4 and comm.rank == comm.size - 1:
            watcher.want = Request.STOP
        strategy.run(step, args=(x,))
        if number == 6:
            watcher.want = Request.NONE
    same_everywhere(comm, watcher.learnt)
    # poll n comes before batch n: after the 4th step is the 5th; one rank alone need not be told by a sum
    if comm.size == 1:
        numbers = (5, 6)
    else:
        numbers = (5, 6, 7)
    expected = [(number, Request.STOP) for number in numbers]
    assert watcher.learnt == expected
    assert watcher.agreement.n_messages == 0


def test_stop_and_save_by_different_ranks_ride_together(comm, watcher):
    strategy, _, batches, step = build()
    if comm.rank == 0:
        chief_request = Request.SAVE
    else:
        chief_request = Request.NONE
    if comm.rank == comm.size - 1:
        last_rank_request = Request.STOP
    else:
        last_rank_request = Request.NONE
    watcher.want = chief_request | last_rank_request
    for x in batches:
        strategy.run(step, args=(x,))
        watcher.want = Request.NONE
        break
    watcher.poll_between_batches()
    same_everywhere(comm, watcher.learnt)
    if comm.size > 1:
        number = 2
    else:
        number = 1
    assert watcher.learnt[-1:] == [(number, Request.STOP | Request.SAVE)]


def test_a_stop_by_one_rank_is_heard_beside_a_save_by_another(comm, watcher):
    """By messages too, of which one number has to tell all."""
    if comm.rank == comm.size - 1:
        watcher.want = Request.STOP
    else:
        watcher.want = Request.SAVE
    for _ in range(2 * MAX_POLLS):
        watcher.poll_between_batches()
    heard = same_everywhere(comm, watcher.learnt)
    assert heard
    assert all(Request.STOP in want for _, want in heard)


@pytest.mark.feature("checkpoints.one-rank-s-signal-suffices")
@pytest.mark.parametrize("is_fast", [True, False])
def test_a_loop_without_gradients_agrees_by_messages(comm, watcher, is_fast):
    _, model, batches, _ = build()
    elapsed = [0.0]
    watcher = Watcher(watcher.world, lambda: elapsed[0])
    watcher.world.step_flags.attach(watcher)
    n_passes = 20
    with torch.no_grad():
        for number in range(n_passes):
            for x in batches:
                elapsed[0] += 1e-5 if is_fast else 0.5
                model(x)
                if number == 5 and comm.rank == comm.size // 2:
                    watcher.want = Request.STOP
    same_everywhere(comm, watcher.learnt)
    polls_before_request = 5 * (ROWS // BATCH + 1)
    n_polls = n_passes * (ROWS // BATCH + 1)
    assert watcher.n_polls == n_polls
    if comm.size == 1:
        assert watcher.agreement.n_messages == 0
    elif is_fast:
        assert polls_before_request < watcher.learnt[0][0] <= polls_before_request + MAX_POLLS + 2
        assert watcher.agreement.n_messages <= n_polls / MAX_POLLS + 5
    else:
        assert polls_before_request < watcher.learnt[0][0] <= polls_before_request + 3
        assert watcher.agreement.n_messages > 0.85 * n_polls


def test_micro_batches_under_no_sync(comm, watcher):
    """While gradients are accumulated nobody is asked: the sum carries the request, and the step lets it be heard."""
    strategy, model, batches, _ = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rank_wants = comm.rank == comm.size - 1
    for number, x in enumerate(batches, 1):
        if number == 2 and rank_wants:
            watcher.want = Request.STOP
        is_last = number % 4 == 0
        with strategy.scope(), contextlib.nullcontext() if is_last else strategy.no_sync():
            hpcdist.compute_average_loss(model(x).square().sum(1), global_batch_size=BATCH).backward()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
    same_everywhere(comm, watcher.learnt)
    # polls: before the first batch, after the 4th and the 8th, and one at the end that finds no more batches
    assert watcher.learnt[0] == (2, Request.STOP)
    assert watcher.n_polls == 3
    assert watcher.agreement.n_messages == 0


@pytest.mark.feature("complaints.flag-seen-in-time")
def test_datasets_from_a_function_and_optionals_poll(comm, watcher):
    strategy, _, _, _ = build()
    rows = torch.zeros(3 + comm.rank, 3)
    batches = strategy.distribute_datasets_from_function(
        lambda context: hpcdist.Dataset.from_tensor_slices(rows).batch(1)
    )
    with torch.no_grad():
        iterator = iter(batches)
        while iterator.get_next_as_optional().has_value():
            continue
    assert watcher.n_polls == 3 + comm.size - 1 + 1


def test_strategies_of_one_replica_poll_in_a_job_of_one_rank(comm, watcher):
    batches = hpcdist.OneDeviceStrategy("cpu").experimental_distribute_dataset(
        hpcdist.Dataset.from_tensor_slices(torch.zeros(4, 3)).batch(2)
    )
    assert len(list(batches)) == 2
    if comm.size == 1:
        n_polls = 3
    else:
        n_polls = 0
    assert watcher.n_polls == n_polls

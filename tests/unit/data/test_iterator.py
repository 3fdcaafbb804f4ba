"""A dataset polls when a batch is asked for, and then the cursor counts the batches used, whatever was read ahead."""

import numpy as np
import pytest
import torch

from hpcdist.data.dataset import Dataset
from hpcdist.data.distributed import DistributedDataset
from hpcdist.data.from_function import DistributedFromFunction
from hpcdist.data.iterator import Delivery
from hpcdist.data.options import InputOptions
from hpcdist.runtime.step_flags import StepFlags

META = torch.device("meta")


class Polled:
    """Calls a function when requests are looked for."""

    def __init__(self, poll):
        self.poll_between_batches = poll


def flags_polled_by(poll):
    flags = StepFlags()
    flags.attach(Polled(poll))
    return flags


def rows(n_rows=10):
    return Dataset.from_tensor_slices((torch.arange(n_rows).reshape(-1, 1), np.arange(n_rows) * 2.0)).batch(4)


@pytest.mark.parametrize("device", [None, META])
@pytest.mark.parametrize("n_ahead", [0, 2])
def test_it_polls_between_two_batches(device, n_ahead):
    positions = []
    used = []

    def poll():
        positions.append((batches.position, sum(used)))

    batches = DistributedDataset(rows().prefetch(n_ahead), range(1), 1, Delivery(flags_polled_by(poll), device=device))
    iterator = iter(batches)
    assert positions == []
    for x, _ in iterator:
        used.append(len(x))
    assert positions == [(0, 0), (4, 4), (8, 8), (10, 10)]


def test_a_poll_that_raises_ends_the_pass_before_a_batch_is_read():
    def poll():
        if len(used) == 1:
            raise KeyboardInterrupt

    used = []
    batches = DistributedDataset(rows(), range(1), 1, Delivery(flags_polled_by(poll)))
    iterator = iter(batches)
    used.append(next(iterator))
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    assert batches.position == 4


@pytest.mark.feature("tf.onedevicestrategy-device-inputs", "strategies.one-device-strategy", "input.prefetch-to-device")
def test_batches_are_moved_and_the_cursor_counts_those_yielded():
    read = []
    dataset = rows().map(lambda x, y: read.append(len(x)) or (x, y))
    moved = DistributedDataset(dataset, range(1), 1, Delivery(device=META))
    observations = []
    for x, y in moved:
        observations.append((x.device.type, y.device.type, x.shape[0], moved.position, sum(read)))
    assert observations == [("meta", "meta", 4, 4, 8), ("meta", "meta", 4, 8, 10), ("meta", "meta", 2, 10, 10)]
    assert (moved.position, moved.epoch) == (10, 1)


@pytest.mark.feature("input.prefetch-to-device")
def test_a_cursor_taken_while_a_batch_is_ahead_resumes_with_that_batch():
    def make():
        return DistributedDataset(rows(), range(1), 1, Delivery(device=META))

    whole = make()
    batches = iter(whole)
    next(batches)
    resumed = make()
    resumed.load_state_dict(whole.state_dict())
    assert [x.shape[0] for x, _ in resumed] == [x.shape[0] for x, _ in batches] == [4, 2]


@pytest.mark.feature("input.input-options")
@pytest.mark.parametrize(
    ("device", "fetch", "kind"),
    [(META, None, "meta"), (META, True, "meta"), (META, False, "cpu"), (torch.device("cpu"), None, "cpu")],
)
def test_where_parts_go(device, fetch, kind):
    options = InputOptions(experimental_fetch_to_device=fetch)
    delivery = Delivery(device=device)
    for batches in (
        DistributedDataset(rows(), range(1), 1, delivery, options),
        DistributedFromFunction([rows()], range(1), 1, delivery, options),
    ):
        x, y = next(iter(batches))
        assert x.device.type == kind
        assert isinstance(y, np.ndarray) == (kind == "cpu")


def test_an_empty_part_is_moved_too():
    answers = iter([False, False, True])
    delivery = Delivery(device=META, agree_end=lambda is_out, ends_with_first: next(answers))
    parts = list(DistributedFromFunction([rows(3)], range(1), 2, delivery))
    assert [(x.device.type, len(x)) for x, _ in parts] == [("meta", 3), ("meta", 0)]

"""A dataset that reads one batch ahead polls when the batch before was used: a save there skips no sample."""

import numpy as np
import torch

from hpcdist.data.dataset import Dataset
from hpcdist.data.distributed import DistributedDataset
from hpcdist.strategy.device_dataset import DeviceDataset


def test_it_polls_between_two_batches():
    inner = DistributedDataset(Dataset.from_tensor_slices(np.arange(10.0)).batch(4), range(1), 1)
    positions, used = [], []
    inner.poll = lambda: positions.append((batches.position, sum(used)))
    batches = DeviceDataset(inner, torch.device("cpu"))
    for batch in batches:
        used.append(len(batch))
    assert positions == [(4, 4), (8, 8), (10, 10)]

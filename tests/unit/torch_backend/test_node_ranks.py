"""The ranks of torchrun, as two threads of one process that share a store."""

import threading
import time

import numpy as np
import pytest
import torch.distributed as dist

from hpcdist.torch_backend.node_ranks import SLOT_BYTES, NodeRanks


@pytest.fixture
def pair():
    """Return two ranks."""
    store = dist.HashStore()
    node_ranks = [None, None]

    def make(rank):
        node_ranks[rank] = NodeRanks(store, rank, ["rank 0", "rank 1"], 20.0, is_crowded=True)

    in_both(make)
    return node_ranks


def in_both(act):
    """Call act(rank) in a thread for each of two ranks, and wait for both."""
    threads = [threading.Thread(target=act, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()


class Slow:
    """An array that takes its time to be written to."""

    def __init__(self, size):
        self.values = np.zeros(size, np.uint8)
        self.size = size

    def __setitem__(self, part, values):
        time.sleep(0.2)
        self.values[part] = values


def test_no_slot_is_written_before_all_have_read_it(pair):
    """Rank 0 is a slot ahead of a slow reader: never two."""
    sent = (np.arange(4 * SLOT_BYTES) % 251).astype(np.uint8)
    target = Slow(4 * SLOT_BYTES)

    def exchange(rank):
        if rank == 0:
            pair[0]._exchange(sent, [])
        else:
            pair[1]._exchange(sent[:0], [(0, 0, target)])

    in_both(exchange)
    assert np.array_equal(target.values, sent)

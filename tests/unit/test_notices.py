"""Wishes as numbers that are summed over replicas, in float32."""

import itertools

import numpy as np
import pytest

from hpcdist.notices import Notices, Want, decode, encode

ALL = [Want.NOTHING, Want.STOP, Want.SAVE, Want.STOP | Want.SAVE]


@pytest.mark.parametrize("wants", list(itertools.product(ALL, repeat=3)))
def test_a_sum_says_what_any_replica_wants(wants):
    total = sum(np.float32(encode(want)) for want in wants)
    assert decode(float(total)) == wants[0] | wants[1] | wants[2]


@pytest.mark.parametrize("n_replicas", [1, 100, (1 << 14) - 1])
@pytest.mark.parametrize("n_saves", [0, 1, 1000])
def test_many_replicas_in_float32(n_replicas, n_saves):
    """All want to stop; all replicas of the chief's rank want a save."""
    total = np.float32(0)
    for part in (n_replicas * encode(Want.STOP), n_saves * encode(Want.SAVE)):
        total += np.float32(part)
    assert decode(float(total)) == (Want.STOP | Want.SAVE if n_saves else Want.STOP)


def test_without_a_watcher_nothing_is_sent_and_polls_do_nothing():
    notices = Notices()
    notices.poll()
    assert notices.send() == 0.0


def test_what_was_heard_is_taken_once():
    notices = Notices()
    notices.receive(encode(Want.SAVE))
    notices.receive(3 * encode(Want.STOP))
    notices.receive(0.0)
    assert notices.n_carried == 3
    assert notices.take() == Want.STOP | Want.SAVE
    assert notices.take() == Want.NOTHING

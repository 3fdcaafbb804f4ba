"""Wishes as numbers that are summed over replicas, in float32."""

import itertools

import numpy as np
import pytest

from hpcdist.notices import Notices, Want, decode, encode

ALL = [Want.NOTHING, Want.STOP, Want.SAVE, Want.STOP | Want.SAVE]


@pytest.mark.parametrize("wants", list(itertools.product(ALL, repeat=3)))
def test_a_sum_says_what_any_replica_wants(wants):
    totals = sum(np.array(encode(want), np.float32) for want in wants)
    assert decode(totals.tolist()) == wants[0] | wants[1] | wants[2]


@pytest.mark.parametrize("n_replicas", [1, 100, 1 << 14, 1 << 24])
@pytest.mark.parametrize("many", [Want.STOP, Want.SAVE, Want.STOP | Want.SAVE, Want.NOTHING])
@pytest.mark.parametrize("lone", ALL)
def test_one_of_many_replicas_is_heard_in_float32(n_replicas, many, lone):
    totals = np.float32(n_replicas - 1) * np.array(encode(many), np.float32)  # exact
    totals += np.array(encode(lone), np.float32)
    assert decode(totals.tolist()) == (lone | many if n_replicas > 1 else lone)
    if lone & many:
        assert totals.max() == n_replicas


def test_without_a_watcher_nothing_is_sent_and_polls_do_nothing():
    notices = Notices()
    notices.poll()
    assert notices.send() == (0.0, 0.0)


def test_what_was_heard_is_taken_once():
    notices = Notices()
    notices.receive(encode(Want.SAVE))
    notices.receive([3 * one for one in encode(Want.STOP)])
    notices.receive((0.0, 0.0))
    assert notices.n_carried == 3
    assert notices.take() == Want.STOP | Want.SAVE
    assert notices.take() == Want.NOTHING

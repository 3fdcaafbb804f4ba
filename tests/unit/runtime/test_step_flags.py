"""Requests as numbers that are summed over replicas, in float32."""

import itertools

import numpy as np
import pytest

from hpcdist.runtime.step_flags import Request, StepFlags, decode, encode

ALL = [Request.NONE, Request.STOP, Request.SAVE, Request.STOP | Request.SAVE]


@pytest.mark.parametrize("requests", list(itertools.product(ALL, repeat=3)))
def test_a_sum_has_what_any_replica_requests(requests):
    totals = sum(np.array(encode(want), np.float32) for want in requests)
    assert decode(totals.tolist()) == requests[0] | requests[1] | requests[2]


@pytest.mark.parametrize("n_replicas", [1, 100, 1 << 14, 1 << 24])
@pytest.mark.parametrize("many", [Request.STOP, Request.SAVE, Request.STOP | Request.SAVE, Request.NONE])
@pytest.mark.parametrize("lone", ALL)
def test_one_of_many_replicas_is_heard_in_float32(n_replicas, many, lone):
    totals = np.float32(n_replicas - 1) * np.array(encode(many), np.float32)  # exact
    totals += np.array(encode(lone), np.float32)
    assert decode(totals.tolist()) == (lone | many if n_replicas > 1 else lone)
    if lone & many:
        assert totals.max() == n_replicas


def test_without_a_requester_nothing_is_sent_and_polls_do_nothing():
    flags = StepFlags()
    flags.poll()
    assert flags.request_numbers() == (0.0, 0.0)


def test_what_was_received_is_taken_once():
    flags = StepFlags()
    flags.record_requests(encode(Request.SAVE))
    flags.record_requests([3 * component for component in encode(Request.STOP)])
    flags.record_requests((0.0, 0.0))
    assert flags.n_sums == 3
    assert flags.take() == Request.STOP | Request.SAVE
    assert flags.take() == Request.NONE

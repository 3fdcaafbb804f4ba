"""A stop request on its way between ranks, and what people read of it."""

import pytest

from hpcdist.run.stop_request import StopRequest


@pytest.mark.parametrize("is_for_good", [False, True])
def test_other_ranks_get_the_source_and_whether_it_is_for_good(is_for_good):
    request = StopRequest('stop file "a\n', is_for_good, asked_at=1.0)
    assert StopRequest.from_text(request.to_text()) == StopRequest('stop file "a\n', is_for_good)


def test_the_reason_says_that_it_is_for_good():
    assert StopRequest("deadline").reason == "deadline"
    assert StopRequest("SIGTERM on rank 1", is_for_good=True).reason == "SIGTERM on rank 1, for good"


@pytest.mark.parametrize(
    ("source", "may_be_preemption"), [("SIGTERM on rank 0", True), ("SIGTERMS", False), ("", False)]
)
def test_only_sigterm_may_come_from_the_batch_system(source, may_be_preemption):
    assert StopRequest(source).may_be_preemption is may_be_preemption

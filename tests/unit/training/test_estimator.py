"""Calls of `Estimator.train` without ranks; tests/mpi/test_estimator.py trains."""

import pytest

from hpcdist.training.estimator import _TrainCall


class Batches:
    def load_state_dict(self, state):
        self.state = state

    def state_dict(self):
        return {"batch": 3}


@pytest.mark.parametrize(
    ("limits", "expected_end"),
    [((None, 2000), 2000), ((None, 800), 800), ((300, None), 1000)],
    ids=["more steps", "fewer steps", "steps of the call"],
)
def test_a_resumed_call_obeys_a_new_max_steps_and_keeps_its_own_steps(limits, expected_end):
    stopped = _TrainCall()
    assert stopped.begin(1, Batches(), 1000, None)
    stopped.global_step = 500
    resumed = _TrainCall()
    resumed.load_state_dict(stopped.state_dict())
    batches = Batches()
    assert not resumed.begin(1, batches, *limits)
    assert resumed.end == expected_end
    assert batches.state == {"batch": 3}

"""Which evaluation is the best one, beside records that a file may hold."""

import math
from types import SimpleNamespace

import pytest

from hpcdist.training.sidecar import SidecarEvaluator


@pytest.mark.parametrize(
    ("earlier", "loss", "is_best"),
    [
        ([], 1.0, True),
        ([2.0, 1.5], 1.0, True),
        ([2.0, 0.5], 1.0, False),
        ([1.0], 1.0, False),
        ([None, "low", math.nan, 2.0], 1.0, True),
        ([None], math.nan, False),
    ],
)
def test_the_best_is_finite_and_below_all_earlier_ones(earlier, loss, is_best):
    records = [{"loss": earlier_loss} for earlier_loss in earlier]
    evaluator = SimpleNamespace(evaluations=[{}, *records])
    assert SidecarEvaluator._is_best(evaluator, loss) is is_best

"""The tests of torch.distributed that come with torch, over the backend `hpcdist`."""

import json

import pytest

pytestmark = pytest.mark.timeout(240)


def test_torch_s_own_tests_of_collectives_pass(start, root, tmp_path):
    job = start(3, root / "tests" / "support" / "torch_own_tests.py", tmp_path)
    outcome = job.wait(200)
    assert outcome.code == 0, outcome.output
    (line,) = (line for line in outcome.output.splitlines() if line.startswith('{"ok"'))
    report = json.loads(line)
    assert report["failures"] == {}
    assert report["ok"] > 80
    assert {"test_all_gather_coalesced_with_empty", "test_all_to_all_single_unequal_split"} <= set(report["passed"])

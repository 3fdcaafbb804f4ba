"""What a handler leaves in the run folder of one rank: whose config.json it replaces, and what counts as a step."""

import json
import time

import numpy as np
import pytest

from hpcdist import Checkpoint, CheckpointManager, PreemptionCheckpointHandler, TerminationConfig
from hpcdist.stopping.preemption import _save_fn_of


@pytest.fixture
def make_handler(tmp_path):
    """Return make_handler(): a handler of a run in `tmp_path`; it is closed with the test."""
    handlers = []

    def make():
        manager = CheckpointManager(Checkpoint(values=np.arange(4.0)), tmp_path / "checkpoints")
        handlers.append(PreemptionCheckpointHandler(None, manager))
        return handlers[-1]

    yield make
    for handler in handlers:
        handler.close()


def test_an_evaluator_does_not_call_the_function_that_saves():
    config = TerminationConfig(save_fn=lambda: pytest.fail("an evaluator saves nothing"))
    assert _save_fn_of(config, "worker") is config.save_fn
    _save_fn_of(config, "evaluator")()


@pytest.mark.parametrize("text", ['{"hidden": 64}', "hidden: 64", '{"settings": {}}', "[1]"])
def test_a_config_of_the_program_is_left_as_it_is(make_handler, tmp_path, capfd, text):
    """Checkpoints may lie in the folder of the program, beside a file of that name."""
    (tmp_path / "config.json").write_text(text)
    make_handler()
    assert (tmp_path / "config.json").read_text() == text
    assert "got another file; it is left as it is" in capfd.readouterr().err


def test_a_config_of_an_earlier_attempt_is_replaced(make_handler, tmp_path):
    for attempt in (1, 2):
        make_handler().close()
        assert json.loads((tmp_path / "config.json").read_text())["attempt"] == attempt


def test_an_evaluation_in_the_middle_of_an_epoch_is_no_part_of_a_step(make_handler, tmp_path):
    """The step before it ends where it begins."""
    handler = make_handler()
    handler.poll()  # as a dataset does, when it is asked for a batch
    handler._world.step_flags.count_step()
    handler.evaluate(time.sleep, 0.5)
    handler.poll()
    handler.close()
    lines = (tmp_path / "trace" / "0001" / "rank-00000.jsonl").read_text().splitlines()
    windows = [record for record in map(json.loads, lines) if "window" in record]
    total = {}
    for key in ("n_steps", "step_s", "between_s"):
        total[key] = sum(window[key] for window in windows)
    assert total["n_steps"] == 1
    assert total["step_s"] < 0.4
    assert total["between_s"] >= 0.5

"""What a job's launcher is told: every case of the rules, and the file."""

import itertools
import json

import pytest

from hpcdist.errors import CheckpointError, ExitCode
from hpcdist.resilience.decision import Decision, DecisionFile, Verdict, at_end, at_first_commit, at_start, at_stop


@pytest.mark.parametrize(("n_fruitless", "has_earlier"), list(itertools.product(range(1, 9), (False, True))))
def test_the_third_attempt_is_the_last_and_a_fourth_does_not_start(n_fruitless, has_earlier):
    decision = at_start(n_fruitless, has_earlier)
    assert decision.verdict is (Verdict.REQUEUE if n_fruitless <= 2 else Verdict.STOP)
    is_refused = n_fruitless > 3 and has_earlier
    assert decision.exit_code is (ExitCode.DO_NOT_REQUEUE if is_refused else None)
    assert decision.reason


@pytest.mark.parametrize("n_idle", range(7))
def test_stops_without_a_newer_checkpoint_end_the_chain(n_idle):
    decision = at_stop("SIGTERM on rank 3", n_idle)
    assert "SIGTERM on rank 3" in decision.reason
    if n_idle < 3:
        assert decision == Decision(Verdict.REQUEUE, "SIGTERM on rank 3", ExitCode.RUN_AGAIN)
    else:
        assert (decision.verdict, decision.exit_code) == (Verdict.STOP, ExitCode.DO_NOT_REQUEUE)
        assert decision.reason.startswith(f"{n_idle} attempts in a row")


def test_a_commit_and_the_end():
    assert at_first_commit().verdict is Verdict.REQUEUE
    assert at_first_commit().exit_code is None
    assert (at_end().verdict, at_end().exit_code) == (Verdict.FINISHED, ExitCode.DONE)


def test_the_words_are_stable():
    assert [verdict.value for verdict in Verdict] == ["finished", "requeue", "stop"]


def test_the_file_is_replaced(tmp_path):
    file = DecisionFile(tmp_path)
    assert file.read() is None
    file.write(at_start(1, False), None, attempt=1)
    file.write(at_stop("stop file", 0), 12, attempt=1, idle_stops=0)
    content = json.loads((tmp_path / "decision.json").read_text())
    assert content.pop("time").endswith("Z")
    assert content == {"decision": "requeue", "reason": "stop file", "step": 12, "attempt": 1, "idle_stops": 0}
    assert file.read()["step"] == 12
    assert [path.name for path in tmp_path.iterdir()] == ["decision.json"]


@pytest.mark.parametrize(
    "text", ["", "{", "[1]", "\xff", "[" * 100_000, '{"idle_stops": null}', '{"idle_stops": [1]}', '{"step": "x"}']
)
def test_a_file_that_cannot_be_understood_counts_as_none(tmp_path, text):
    (tmp_path / "decision.json").write_bytes(text.encode("latin-1"))
    assert DecisionFile(tmp_path).read() is None


def test_a_folder_that_is_gone(tmp_path):
    with pytest.raises(CheckpointError, match=r"decision: expected to write .*decision.json, got No such file"):
        DecisionFile(tmp_path / "gone").write(at_end(), 1)


def test_what_a_killed_writer_left_is_swept(tmp_path):
    (tmp_path / "decision.json.tmp-123").write_text("half")
    (tmp_path / "mine.tmp-123").write_text("another's")
    DecisionFile(tmp_path).write(at_end(), 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["decision.json", "mine.tmp-123"]

"""The one rule of restarts: what the ledger of a run tells the launcher, and the file."""

import json
import os
import re
from pathlib import Path

import pytest

import hpcdist.run.decision as decision_module
from hpcdist.errors import CheckpointError, ExitCode
from hpcdist.run.decision import Decision, DecisionFile, Verdict, decide, suspects, without_progress
from hpcdist.run.ledger import Attempt


def run(*attempts, **first):
    """Return attempts of one run, numbered, each with the base that those before it give it."""
    numbered_attempts = []
    base = -1
    for number, facts in enumerate(attempts, 1):
        attempt_facts = {"job": "7", "nodes": ("n1",), "program": "p", "base_step": base, **facts}
        numbered_attempts.append(Attempt(number, has_begun=True, **attempt_facts))
        base = numbered_attempts[-1].reached_step
    return numbered_attempts


def from_step(step, **facts):
    return {"restored_step": step, "resumed_step": step, **facts}


DIES = {}
PREEMPTED = {"end": "stopped", "reason": "SIGTERM on rank 3", "is_excused": True}
STOPPED = {"end": "stopped", "reason": "deadline"}


@pytest.mark.parametrize(
    ("attempts", "verdict", "code"),
    [
        ([DIES], "requeue", None),
        ([DIES, DIES], "requeue", None),
        ([DIES, DIES, DIES], "stop", None),
        ([DIES, DIES, DIES, DIES], "stop", 76),
        ([DIES, DIES, {"committed_step": 5}], "requeue", None),
        ([STOPPED], "requeue", 75),
        ([STOPPED, DIES, STOPPED], "stop", 76),
        (
            [{"end": "stopped", "reason": "stop file /r/stop, for good", "is_for_good": True, "committed_step": 1}],
            "stop",
            76,
        ),
        (
            [{"end": "stopped", "reason": "stop file /r/stop, for good", "is_for_good": True}, {"committed_step": 1}],
            "requeue",
            None,
        ),
        ([STOPPED, STOPPED, {**STOPPED, "committed_step": 1}], "requeue", 75),
        ([{"end": "finished", "reason": "done"}], "finished", 0),
        ([DIES, DIES, {"end": "finished", "reason": "done"}, DIES, DIES], "requeue", None),
        ([{"end": "diverged", "reason": "rank 1"}], "stop", 76),
        ([{"end": "refused", "reason": "another model"}], "stop", 78),
        ([{"end": "failed", "reason": "cannot be read"}], "requeue", None),
        ([{"end": "failed", "reason": "cannot be read"}] * 3, "stop", None),
        ([{"end": "refused", "reason": "another model"}] * 4 + [DIES], "requeue", None),
    ],
)
def test_what_follows_in_a_batch_job(attempts, verdict, code):
    decision = decide(run(*attempts), is_counted=True)
    assert (decision.verdict, decision.exit_code) == (verdict, code)
    assert decision.reason


def test_a_program_that_dies_at_the_same_step_makes_no_progress_by_reaching_a_checkpoint_again():
    """It dies in step 26 and saves every 10: two deaths on step 20 go back to 10, from where it saves 20 again."""
    first = from_step(-1, committed_step=20)
    on_20 = from_step(20)
    back = from_step(10, committed_step=20)
    attempts = run(first, on_20, on_20, back)
    assert [attempt.number for attempt in without_progress(attempts)] == [4, 3, 2]
    assert decide(attempts, is_counted=True).verdict is Verdict.STOP
    assert decide(run(first, on_20, on_20, {**back, "committed_step": 30}), True).verdict is Verdict.REQUEUE


@pytest.mark.parametrize("n", [3, 10])
def test_what_slurm_vouches_for_does_not_count(n):
    """Preempted before the first new step, again and again: asked to stop, or killed and restarted by Slurm."""
    assert decide(run(*[PREEMPTED] * n), is_counted=True) == Decision(
        Verdict.REQUEUE, "SIGTERM on rank 3", ExitCode.RUN_AGAIN
    )
    killed = run(DIES, *[{"is_vouched": True}] * n)
    assert [attempt.number for attempt in without_progress(killed)] == [n + 1]
    assert len(without_progress(run(DIES, PREEMPTED, DIES, PREEMPTED, DIES))) == 3


def test_attempts_outside_of_a_batch_job_never_end_a_run():
    assert decide(run(*[DIES] * 9), is_counted=False).verdict is Verdict.REQUEUE
    assert decide(run(*[STOPPED] * 9), is_counted=False).exit_code is ExitCode.RUN_AGAIN


def test_a_changed_program_or_a_person_who_tries_again_starts_a_new_row():
    assert len(without_progress(run(DIES, DIES, DIES, {"program": "corrected"}))) == 1
    assert len(without_progress(run(DIES, DIES, DIES, {"is_new_try": True}))) == 1
    assert len(without_progress(run(DIES, {"is_new_try": True}, DIES))) == 2


def test_a_copy_in_memory_that_the_next_one_went_on_from_was_progress():
    attempts = run(from_step(5), from_step(7), from_step(9))
    assert [attempt.number for attempt in without_progress(attempts)] == [3]
    second_run = run(DIES, from_step(7, committed_step=7), from_step(7))  # the second one wrote the copy to the disk
    assert [attempt.number for attempt in without_progress(second_run)] == [3, 2]


def test_a_step_that_a_person_chose_is_the_new_base():
    attempts = run({"committed_step": 50}, from_step(10, base_step=10), from_step(10, base_step=10, committed_step=20))
    assert decide(attempts, True).reason.endswith("after a newer checkpoint")


def test_an_attempt_without_a_first_event_is_none():
    assert without_progress([*run(DIES), Attempt(2)]) == run(DIES)
    assert without_progress([Attempt(1)]) == []


ON_5 = from_step(5)


@pytest.mark.feature("checkpoints.suspect-checkpoints")
@pytest.mark.parametrize(
    ("deaths", "is_suspect"),
    [
        ([ON_5], False),
        ([ON_5, ON_5], False),
        ([ON_5, {**ON_5, "job": "8"}], True),
        ([ON_5, {**ON_5, "nodes": ("n2",)}], True),
        ([ON_5, {**ON_5, "nodes": ("n1", "n2")}], False),
        ([ON_5, {**ON_5, "job": "8", "has_saved": True}], False),
        ([ON_5, {**ON_5, "job": "8", **STOPPED}], False),
        ([ON_5, {**ON_5, "job": "8", "end": "failed"}], False),
        ([{**ON_5, "job": None}, {**ON_5, "job": None}], False),
        ([ON_5, {**ON_5, "job": "8"}, {"is_new_try": True}], False),
        ([ON_5, {**ON_5, "job": "8"}, {"is_vouched": True}], False),
        ([{"restored_step": 5}, {"restored_step": 5, "job": "8"}], True),
        ([from_step(-1), from_step(-1, job="8")], False),
    ],
)
def test_a_checkpoint_is_suspect_once_attempts_died_on_it_under_different_conditions(deaths, is_suspect):
    """Not before: a sick node, a full memory or a preemption is no fault of a checkpoint."""
    suspect_steps = suspects(run({"committed_step": 5}, *deaths))
    if is_suspect:
        expected = [5]
    else:
        expected = []
    assert list(suspect_steps) == expected


def test_the_table_in_the_docs_is_that_of_the_rule():
    table = re.findall(r"^\|.*\|$", decision_module.__doc__, re.MULTILINE)
    docs = Path(__file__).parents[3] / "docs" / "concepts" / "stopping.md"
    assert "\n".join(table) in docs.read_text()


def test_the_words_are_stable():
    assert [verdict.value for verdict in Verdict] == ["finished", "requeue", "stop"]


def test_the_file_is_replaced(tmp_path):
    file = DecisionFile(tmp_path)
    file.write(decide(run(DIES), True), None, attempt=1)
    file.write(decide(run(STOPPED), True), 12, attempt=1)
    content = json.loads((tmp_path / "decision.json").read_text())
    assert content.pop("time").endswith("Z")
    assert content == {"decision": "requeue", "reason": "deadline", "step": 12, "attempt": 1}
    assert os.listdir(tmp_path) == ["decision.json"]


def test_a_folder_that_is_gone(tmp_path):
    with pytest.raises(CheckpointError, match=r"decision.*decision.json.*No"):
        DecisionFile(tmp_path / "gone").write(decide(run(DIES), True), 1)


def test_what_a_killed_writer_left_is_swept(tmp_path):
    (tmp_path / ".decision.json.tmp-00000000-0123456789abcdef").write_text("half")
    (tmp_path / ".mine.tmp-00000000-0123456789abcdef").write_text("another's")
    DecisionFile(tmp_path).write(decide(run(DIES), True), 3)
    assert sorted(os.listdir(tmp_path)) == [
        ".mine.tmp-00000000-0123456789abcdef",
        "decision.json",
    ]

"""The ledger: what is written comes back, whatever a crash left of it."""

import dataclasses
import itertools
import json

import pytest

from hpcdist.checkpoint.store import Store
from hpcdist.errors import AttemptReplaced
from hpcdist.run.ledger import Attempt, Launch, Ledger, parse_attempt

LAUNCH = Launch("7", ("n1", "n2"), "digest", is_vouched=False)


@pytest.fixture
def begin(tmp_path):
    def make(launch=LAUNCH, **more):
        ledger = Ledger(Store(tmp_path))
        ledger.begin(launch, **more)
        return ledger

    return make


def test_an_attempt_and_the_next_one(begin):
    first = begin()
    first.restore(-1)
    first.resume(-1)
    first._store.note("save")
    first._store.note("commit", step=10)
    first.end("stopped", "deadline", is_excused=True)
    expected = Attempt(1, **vars(LAUNCH), has_begun=True, resumed_step=-1, has_saved=True, committed_step=10)
    expected = dataclasses.replace(expected, end="stopped", reason="deadline", is_excused=True)
    assert first.attempts() == [expected]
    second = begin(is_new_try=True)
    assert second.attempts() == [expected, LAUNCH.attempt(2, base_step=10, is_new_try=True)]


def test_the_base_is_the_highest_step_that_any_attempt_has_reached(begin):
    begin()._store.note("commit", step=30)
    begin().resume(20)
    begin().resume(31)  # from memory
    begin().resume(5)
    assert [attempt.base_step for attempt in begin().attempts()] == [-1, 30, 30, 31, 31]
    begin().resume(5, is_base=True)
    assert [attempt.base_step for attempt in begin().attempts()][-2:] == [5, 5]


def test_a_person_may_try_again_after_an_attempt_has_begun(begin):
    ledger = begin()
    assert not ledger.attempts()[-1].is_new_try
    ledger.try_again()
    assert ledger.attempts()[-1].is_new_try


def test_only_the_latest_attempts_are_read(begin):
    begin()._store.note("commit", step=30)
    for _ in range(20):
        ledger = begin()
    assert [attempt.number for attempt in ledger.attempts()] == list(range(6, 22))
    assert ledger.attempts()[-1].base_step == 30


def test_a_replaced_attempt_notes_nothing(begin):
    first = begin()
    begin()
    with pytest.raises(AttemptReplaced):
        first.end("finished")


def test_torn_and_foreign_lines_are_ignored(begin):
    ledger = begin()
    ledger.resume(5)
    path = ledger._store.path / "attempts" / "0001.jsonl"
    before = ledger.attempts()
    for line in ('{"event": "commit", "st', "null", "[" * 100_000, '{"event": "commit", "step": "9"}', '{"event": 7}'):
        with path.open("a") as file:
            file.write(f"{line}\n")
        assert ledger.attempts() == before
    ledger.end("finished")
    assert ledger.attempts()[0].end == "finished"


@pytest.mark.parametrize("content", [b"", b"\xff", b"\0" * 100])
def test_a_file_that_tells_of_nothing_is_an_attempt_that_did_nothing(begin, content):
    ledger = begin()
    (ledger._store.path / "attempts" / "0002.jsonl").write_bytes(content)
    assert ledger.attempts()[1] == Attempt(2)
    assert begin().attempts()[-1].number == 3


def test_a_repeated_line_changes_nothing():
    lines = [
        json.dumps({"event": "begin", "base": 3, "is_new_try": False, **vars(LAUNCH)}),
        *(json.dumps({"event": event, "step": 5}) for event in ("restore", "resume", "commit")),
    ]
    once = parse_attempt(1, lines)
    assert once == parse_attempt(1, list(itertools.chain.from_iterable(zip(lines, lines, strict=True))))
    assert (once.base_step, once.resumed_step, once.committed_step) == (3, 5, 5)


def test_the_program_is_told_by_its_file(tmp_path, monkeypatch):
    program = tmp_path / "train.py"
    program.write_text("1")
    monkeypatch.setattr("sys.argv", [str(program)])
    before = Launch.of_this_process()
    assert before == Launch.of_this_process()
    program.write_text("2")
    assert Launch.of_this_process().program != before.program
    monkeypatch.setattr("sys.argv", [""])
    assert Launch.of_this_process().program is None


def test_the_batch_job_is_told_by_its_variables(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setenv("SLURM_STEP_NODELIST", "n[1-2]")
    monkeypatch.setenv("HPCDIST_PREEMPTED", "1")
    launch = Launch.of_this_process()
    assert (launch.job, launch.nodes, launch.is_vouched) == ("12", ("n1", "n2"), True)

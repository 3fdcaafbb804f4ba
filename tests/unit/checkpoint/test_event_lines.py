"""Ledgers that grow: reading one again costs what was appended, none gets too long, and none counts as empty."""

import errno
import json
import os
import time

import pytest

from hpcdist.checkpoint import durable, store
from hpcdist.checkpoint.event_lines import LIMIT_BYTES, N_LATEST, FollowedFile, thinned, with_last_commit
from hpcdist.checkpoint.store import Store
from hpcdist.errors import AttemptReplaced, CheckpointError
from hpcdist.run.ledger import Launch, Ledger, parse_attempt

LAUNCH = Launch("7", ("n1",), "digest", is_vouched=False)


def commit_line(step):
    return json.dumps({"event": "commit", "step": step, "nbytes": 10**9, "took_s": 0.123456, "time_s": time.time()})


def begun(folder):
    ledger = Ledger(Store(folder))
    ledger.begin(LAUNCH)
    return ledger


def test_only_what_was_appended_is_read_again(tmp_path):
    path = tmp_path / "0001.jsonl"
    followed = FollowedFile(path)
    assert list(followed.new_lines()[1]) == []
    path.write_text("a\nb\n")
    is_other, lines = followed.new_lines()
    assert (is_other, list(lines)) == (True, ["a", "b"])
    with path.open("a") as file:
        file.write("c\nhal")
    is_other, lines = followed.new_lines()
    assert (is_other, list(lines)) == (False, ["c", "hal"])
    with path.open("a") as file:
        file.write("f\n")
    assert list(followed.new_lines()[1]) == ["half"]
    replacement = tmp_path / "other"
    replacement.write_text("d\n")
    replacement.rename(path)
    is_other, lines = followed.new_lines()
    assert (is_other, list(lines)) == (True, ["d"])


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_what_is_no_file_has_no_lines(tmp_path, make):
    make(tmp_path / "0001.jsonl")
    assert list(FollowedFile(tmp_path / "0001.jsonl").new_lines()[1]) == []


@pytest.mark.parametrize("nbytes", [1 << 20, 20 << 20])
def test_no_size_is_empty(tmp_path, nbytes):
    """Beyond 16 MiB a ledger counted as one without events: the run began to count its attempts anew."""
    ledger = begun(tmp_path)
    path = tmp_path / "attempts" / "0001.jsonl"
    with path.open("a") as file:
        for step in range(nbytes // len(commit_line(0))):
            file.write(commit_line(step) + "\n")
        file.write("x" * (5 << 20) + "\n")
        file.write(commit_line(10**9) + "\n")
    (attempt,) = Ledger(Store(tmp_path)).attempts()
    assert (attempt.job, attempt.committed_step) == ("7", 10**9)
    assert ledger.attempts() == [attempt]


def test_a_thinned_ledger_has_the_same_facts():
    lines = [json.dumps({"event": "begin", "base": 3, "is_new_try": False, **vars(LAUNCH)})]
    lines += [json.dumps({"event": "resume", "step": 3}), json.dumps({"event": "save"}), "torn"]
    lines += list(map(commit_line, range(4, 3000)))
    lines.append(json.dumps({"event": "end", "how": "stopped", "reason": "x"}))
    expected = parse_attempt(1, lines)
    for _ in range(5):
        shorter = thinned(lines)
        assert N_LATEST < len(shorter) < len(lines)
        assert shorter[-N_LATEST:] == lines[-N_LATEST:]
        assert parse_attempt(1, shorter) == expected
        lines = shorter
    assert len(with_last_commit(lines)) == 6
    assert parse_attempt(1, with_last_commit(lines)) == expected


def test_a_ledger_stays_below_its_limit_and_a_commit_costs_the_same(tmp_path, monkeypatch):
    """The bytes that are read by a look after a commit do not grow with the age of a run."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    ledger = begun(tmp_path)
    read = []
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda *arguments: read.append(pread(*arguments)) or read[-1])
    n_read = {"young": [], "old": []}
    for step in range(6000):
        ledger._store.note("commit", step=step, nbytes=10**9, took_s=0.123456, time_s=time.time())
        read.clear()
        assert ledger.attempts()[-1].committed_step == step
        if step < 2000:
            age = "young"
        else:
            age = "old"
        n_read[age].append(sum(map(len, read)))
        assert (tmp_path / "attempts" / "0001.jsonl").stat().st_size <= LIMIT_BYTES + 200
    for age in n_read:
        assert sum(n_read[age]) / len(n_read[age]) < 500, "on average: where the file was replaced, it is read whole"
        assert sorted(n_read[age])[-50] < 200
    assert Ledger(Store(tmp_path)).attempts() == ledger.attempts()


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "disk full"),
        # to make a ledger shorter looks for later attempts, which lists the folder
        CheckpointError("attempts: expected to list the folder, got Stale file handle; mount it again."),
    ],
    ids=["disk full", "folder not listed"],
)
def test_a_ledger_that_cannot_be_made_shorter_fails_no_save(tmp_path, monkeypatch, caplog, error):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    ledger = begun(tmp_path)
    n_calls = [0]

    def fail(*arguments, **options):
        n_calls[0] += 1
        raise error

    monkeypatch.setattr(durable, "replace_file", fail)
    monkeypatch.setattr(store, "LIMIT_BYTES", 1000)
    for step in range(50):
        ledger._store.note("commit", step=step, nbytes=10**9, took_s=0.123456, time_s=time.time())
    assert ledger.attempts()[-1].committed_step == 49
    assert str(error) in caplog.text
    assert 0 < n_calls[0] < 20, "it is tried again once the ledger has grown by a quarter"


def test_an_attempt_that_was_replaced_does_not_make_its_ledger_shorter(tmp_path, monkeypatch):
    ledger = begun(tmp_path)

    def fail(*arguments, **options):
        raise AttemptReplaced("attempt 1: expected no later attempt, got 2; end this one.")

    monkeypatch.setattr(durable, "replace_file", fail)
    monkeypatch.setattr(store, "LIMIT_BYTES", 10)
    with pytest.raises(AttemptReplaced):
        ledger._store.note("commit", step=1, nbytes=10**9, took_s=0.123456, time_s=time.time())


def test_ledgers_of_old_attempts_lose_their_commits_but_the_last(tmp_path):
    first = begun(tmp_path)
    for step in range(300):
        first._store.note("commit", step=step, nbytes=1, took_s=0.1, time_s=1.0)
    before = first.attempts()[0]
    path = tmp_path / "attempts" / "0001.jsonl"
    for _ in range(15):
        begun(tmp_path)
    assert len(path.read_text().splitlines()) == 301, "among the latest"
    begun(tmp_path)
    assert len(path.read_text().splitlines()) == 2
    assert parse_attempt(1, path.read_text().splitlines()) == before


def test_a_read_that_fails_in_the_middle_loses_no_event(tmp_path, monkeypatch):
    ledger = begun(tmp_path)
    for step in range(3):
        ledger._store.note("commit", step=step)
    pread = os.pread
    n_calls = [0]

    def fail_once(*arguments):
        n_calls[0] += 1
        if n_calls[0] == 2:
            raise OSError(5, "Input/output error")
        return pread(*arguments)

    monkeypatch.setattr(os, "pread", fail_once)
    assert Ledger(Store(tmp_path)).attempts()[0].committed_step == 2
    assert n_calls[0] > 2

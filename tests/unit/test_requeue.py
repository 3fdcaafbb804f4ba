"""What the recipes do after a launch: every case of exit code and decision, with a stand-in for scontrol."""

import json
import os
import subprocess
import time

import pytest

from hpcdist.resilience.decision import DecisionFile, at_end, at_first_commit, at_start, at_stop

pytestmark = pytest.mark.timeout(60)
SCRIPT = """
source slurm/requeue.sh
program() { if [[ -n $WRITES ]]; then cp "$WRITES" "$RUN_DIR/decision.json"; fi; return "$CODE"; }
launch program
if has_died; then echo has died; fi
leave
"""
SCONTROL = """#!/usr/bin/env bash
if [[ $1 == requeue ]]; then echo "requeued $2"; exit "$REQUEUE_CODE"; fi
echo "JobId=7 JobState=$STATE Reason=None PreemptTime=$PREEMPTED"
"""


@pytest.fixture
def leave(root, tmp_path, clean_environ):
    """Return leave(): launch a program with an exit code and a decision; the script's exit code and output."""
    (tmp_path / "run").mkdir()
    (tmp_path / "bin").mkdir()

    def leave(code, decision=None, before=None, scontrol=True, job="7", **environ):
        file = DecisionFile(tmp_path / "run")
        if before is not None:
            file.write(before, 3, attempt=1, job="7")
        written = DecisionFile(tmp_path)
        if decision is not None:
            written.write(decision, 5, attempt=2, job=job)
        if scontrol:
            (tmp_path / "bin" / "scontrol").write_text(SCONTROL)
            (tmp_path / "bin" / "scontrol").chmod(0o755)
        own = {
            "PATH": f"{tmp_path / 'bin'}:{clean_environ['PATH']}" if scontrol else without_scontrol(tmp_path),
            "RUN_DIR": str(tmp_path / "run"),
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NAME": "job",
            "WRITES": "" if decision is None else str(written.path),
            "CODE": str(code),
            "STATE": "RUNNING",
            "PREEMPTED": "None",
            "REQUEUE_CODE": "0",
        }
        done = subprocess.run(
            ["bash", "-c", SCRIPT], env={**own, **environ}, cwd=root, capture_output=True, text=True, timeout=20
        )
        return done.returncode, done.stdout + done.stderr

    return leave


def without_scontrol(folder):
    programs = folder / "few"
    programs.mkdir()
    for name in ("bash", "cp", "date", "rm", "sed"):
        (programs / name).symlink_to(next(f"{place}/{name}" for place in ("/bin", "/usr/bin") if os.path.exists(place)))
    return str(programs)


DIED, SAVED, STOPPED, FINISHED = (
    at_start(1, False),
    at_first_commit(),
    at_stop('he said "stop", on rank 0', 0),
    at_end(),
)
STOP = at_start(3, True)


@pytest.mark.parametrize("code", [0, 1, 74, 75, 137, 143])
@pytest.mark.parametrize("decision", [DIED, SAVED, STOPPED], ids=["died", "saved", "stopped"])
def test_requeue(leave, code, decision):
    got, output = leave(code, decision)
    assert got == 75
    assert "requeued 7" in output
    assert f"exit code {code}, to be requeued: {decision.reason}" in output
    assert ("has died" in output) == (decision is not STOPPED and code not in (74, 75))


@pytest.mark.parametrize("code", [2, 76, 78])
@pytest.mark.parametrize("decision", [None, DIED, STOPPED], ids=["none", "died", "stopped"])
def test_codes_after_which_nothing_is_run_again(leave, code, decision):
    got, output = leave(code, decision, PREEMPTED="2026-11-21T12:00:00")
    assert got == code
    assert "requeued" not in output
    assert "has died" not in output
    assert f"not run again: exit code {code}" in output


@pytest.mark.parametrize(("code", "decision", "expected"), [(0, FINISHED, 0), (1, FINISHED, 1), (137, STOP, 76)])
def test_the_end(leave, code, decision, expected):
    got, output = leave(code, decision)
    assert got == expected
    assert "requeued" not in output
    assert "has died" not in output


@pytest.mark.parametrize("before", [None, STOP, FINISHED], ids=["none", "stop", "finished"])
@pytest.mark.parametrize(("code", "expected"), [(0, 1), (1, 1), (143, 143)])
def test_a_launch_that_ended_before_it_wrote_is_not_taken_for_an_earlier_one(leave, before, code, expected):
    got, output = leave(code, before=before)
    assert got == expected
    assert "requeued" not in output
    assert f"not run again: exit code {code} before it had begun" in output


@pytest.mark.parametrize("before", [DIED, SAVED, STOPPED], ids=["died", "saved", "stopped"])
@pytest.mark.parametrize(("code", "last"), [(0, 1), (1, 1), (137, 137)])
def test_a_run_that_is_under_way_survives_three_launches_in_a_row_that_died_early(leave, before, code, last):
    for _ in range(2):  # who submits it again after the end has three more
        for _ in range(3):
            got, output = leave(code, before=before, SLURM_JOB_ID="9")
            assert got == 75
            assert f"requeued 9\njob 9: exit code {code}" in output or "requeued 9" in output
            assert f"exit code {code}, to be requeued: died before it had begun" in output
        got, output = leave(code, before=before, SLURM_JOB_ID="9")
        assert got == last
        assert "requeued" not in output
        assert f"not run again: exit code {code} before it had begun" in output


def test_a_launch_that_began_ends_the_row_of_early_deaths(leave, tmp_path):
    for _ in range(3):
        for _ in range(3):
            assert leave(1, before=SAVED)[0] == 75
        assert leave(1, SAVED, before=DIED)[0] == 75
        assert not (tmp_path / "run" / "early-deaths").exists()


@pytest.mark.parametrize("code", [2, 76, 78])
def test_some_codes_are_no_early_deaths(leave, tmp_path, code):
    assert leave(code, before=SAVED)[0] == code
    assert not (tmp_path / "run" / "early-deaths").exists()


def test_early_deaths_that_cannot_be_counted_end_the_run(leave, tmp_path):
    (tmp_path / "run" / "early-deaths").mkdir()
    got, output = leave(137, before=SAVED)
    assert got == 137
    assert "requeued" not in output


def test_the_decision_of_another_job_is_not_taken_for_its_own(leave):
    got, output = leave(137, SAVED, before=DIED, job="8")
    assert got == 137
    assert "requeued" not in output


@pytest.mark.parametrize(
    "called_off", [{"PREEMPTED": "2026-11-21T12:00:00"}, {"SLURM_JOB_END_TIME": str(int(time.time()) + 100)}], ids=str
)
@pytest.mark.parametrize(("code", "expected"), [(0, 75), (143, 75), (1, 1)])
def test_called_off_before_it_had_begun(leave, called_off, code, expected):
    got, output = leave(code, **called_off)
    assert got == expected
    assert ("requeued 7" in output) == (expected == 75)


def test_a_task_of_an_array(leave):
    assert "requeued 5_3" in leave(75, STOPPED, SLURM_ARRAY_JOB_ID="5", SLURM_ARRAY_TASK_ID="3")[1]


@pytest.mark.parametrize("state", ["CANCELLED", "COMPLETING"])
def test_a_job_that_slurm_has_ended(leave, state):
    got, output = leave(75, STOPPED, STATE=state)
    assert got == 75
    assert "requeued 7" not in output


@pytest.mark.parametrize("state", ["SIGNALING", "SUSPENDED", "CONFIGURING"])
def test_a_job_that_runs_has_other_names_too(leave, state):
    assert "requeued 7" in leave(75, STOPPED, STATE=state)[1]


@pytest.mark.parametrize("way", [{"scontrol": False}, {"REQUEUE_CODE": "1"}], ids=["missing", "refuses"])
def test_scontrol_that_does_not_help(leave, way):
    got, output = leave(75, STOPPED, **way)
    assert got == 75
    assert output.rstrip().endswith("to go on, run: scontrol requeue 7")


def test_the_fields_are_those_of_the_file(tmp_path):
    file = DecisionFile(tmp_path)
    file.write(DIED, 5, attempt=2, job="7")
    assert set(json.loads(file.path.read_text())) >= {"decision", "reason", "attempt", "job"}

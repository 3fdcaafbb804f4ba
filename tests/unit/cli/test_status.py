"""`hpcdist status` and `hpcdist stop` on run folders as training leaves them."""

import json
import subprocess
import threading
import time

import numpy as np
import pytest

from hpcdist import Checkpoint, CheckpointManager
from hpcdist.checkpoint.store import Store
from hpcdist.run.decision import DecisionFile, decide
from hpcdist.run.ledger import Ledger


@pytest.fixture
def run_dir(tmp_path):
    """Return the folder of a run whose second attempt resumed from step 3, has saved step 5, and has not ended."""
    folder = tmp_path / "run"
    for step in (3, 5):
        checkpoint = Checkpoint(values=np.arange(4.0))
        manager = CheckpointManager(checkpoint, folder / "checkpoints")
        manager.restore_or_initialize()
        manager.save(step, {"loss": 1 / step})
        manager.wait()
    attempts = Ledger(Store(folder / "checkpoints")).attempts()
    DecisionFile(folder).write(decide(attempts, False), 5)
    (folder / "metrics.jsonl").write_text('{"step": 3, "loss": 0.5}\n{"step": 5, "loss": 0.25}\n{"step": 7, "lo')
    return folder


@pytest.fixture
def slurm(monkeypatch):
    """Return a dict: command of Slurm -> what it prints, None where it fails; empty for a command that is missing."""
    texts = {}

    def answer(command, **options):
        text = texts.get(command[0], "")
        if text and "--jobs" in command:
            number = command[command.index("--jobs") + 1]
            text = "".join(line for line in text.splitlines(True) if number in line.split("\t")[:2])
        return subprocess.CompletedProcess(command, text is None, text or "", "")

    monkeypatch.setattr(subprocess, "run", answer)
    return texts


def in_job_17(run_dir):
    path = run_dir / "checkpoints" / "attempts" / "0002.jsonl"
    path.write_text(path.read_text().replace('"job": null', '"job": "17"'))


@pytest.mark.feature("slurm.status-log-cancel")
def test_status(run_dir, hpcdist):
    code, out, _ = hpcdist("status", run_dir)
    assert code == 0
    for text in (
        "if it dies  it is to be run again\n",
        "from step 3; runs, or died by a signal or an error",
        "checkpoint  step 5, ",
        "metrics     step 5  loss 0.25",
    ):
        assert text in out
    report = json.loads(hpcdist("status", run_dir, "--json")[1])
    assert (report["n_attempts"], report["checkpoint"]["step"], report["is_asked_to_stop"]) == (2, 5, False)


def test_an_attempt_that_has_ended(run_dir, hpcdist):
    store = Store(run_dir / "checkpoints")
    ledger = Ledger(store)
    store.attempt = 2
    ledger.end("stopped", "SIGTERM on rank 1")
    DecisionFile(run_dir).write(decide(ledger.attempts(), False), 5)
    report = hpcdist("status", run_dir)[1]
    assert "; stopped: SIGTERM on rank 1\n" in report
    assert "to follow   it is to be run again: SIGTERM on rank 1\n" in report
    code, _, error = hpcdist("stop", run_dir)
    assert (code, error.count("\n")) == (2, 1)
    assert "got one whose last attempt has ended (stopped)" in error
    assert not (run_dir / "stop").exists()


def test_the_state_of_a_batch_job(run_dir, hpcdist, slurm):
    in_job_17(run_dir)
    slurm["squeue"] = f"17\t17\tN/A\tRUNNING\t58:00\tn1\thpcdist:{run_dir}\n"
    out = hpcdist("status", run_dir)[1]
    assert "attempt     2 in job 17 on " in out
    assert "; runs, or died by a signal or an error\n" in out
    assert "Slurm       RUNNING, 58:00 left, n1\n" in out
    assert hpcdist("status", 17)[1] == out, "the job's comment names its run folder"
    assert hpcdist("stop", 17)[0] == 0
    assert (run_dir / "stop").exists()


@pytest.mark.feature("slurm.status-log-cancel")
@pytest.mark.parametrize("has_begun", [False, True])
def test_a_job_that_waits(tmp_path, run_dir, hpcdist, monkeypatch, has_begun):
    """It may never have begun, so that it has no folder, or wait to go on."""
    folder = run_dir if has_begun else tmp_path / "other"
    cancelled = []

    def slurm(command, **options):
        if command[0] == "scancel":
            assert command[1] == "--state=PENDING"
            cancelled.append(command[2])
        line = f"31\t31\tN/A\tPENDING\t8:00:00\t(Priority)\thpcdist:{folder}\n"
        return subprocess.CompletedProcess(command, 0, line if command[0] == "squeue" else "", "")

    monkeypatch.setattr(subprocess, "run", slurm)
    code, out, _ = hpcdist("status", 31)
    assert code == 0
    assert f"run         {folder}\n" in out
    assert "Slurm       PENDING, 8:00:00 left, (Priority)\n" in out
    assert ("checkpoint  step 5" in out) == has_begun
    assert json.loads(hpcdist("status", 31, "--json")[1])["n_attempts"] == 2 * has_begun
    code, _, error = hpcdist("stop", 31)
    assert code == 2
    assert "expected a job that runs, got 31, which waits (Priority); add --for-good to cancel it" in error
    assert not cancelled
    code, out, _ = hpcdist("stop", 31, "--for-good")
    assert (code, cancelled) == (0, ["31"])
    assert "job 31 waited, and is cancelled; what it has saved stays" in out
    assert not (folder / "stop").exists()


def test_a_stop_for_good_is_said_in_the_file(run_dir, hpcdist):
    code, out, _ = hpcdist("stop", run_dir, "--for-good")
    assert code == 0
    assert "ends, and is not run again" in out
    assert (run_dir / "stop").read_text() == "hpcdist stop --for-good\n"


def test_a_run_folder_whose_job_waits_to_go_on(run_dir, hpcdist, monkeypatch):
    in_job_17(run_dir)
    cancelled = []

    def slurm(command, **options):
        cancelled.extend(command[2:] if command[0] == "scancel" else [])
        line = f"17\t17\tN/A\tPENDING\t8:00:00\t(BeginTime)\thpcdist:{run_dir}\n"
        return subprocess.CompletedProcess(command, 0, line if command[0] == "squeue" else "", "")

    monkeypatch.setattr(subprocess, "run", slurm)
    assert "; died by a signal or an error\n" in hpcdist("status", run_dir)[1]
    assert hpcdist("stop", run_dir)[0] == 2
    assert hpcdist("stop", run_dir, "--for-good")[0] == 0
    assert cancelled == ["17"]


@pytest.mark.feature("slurm.status-log-cancel")
@pytest.mark.parametrize("how", ["died", "stopped"])
def test_a_job_that_has_left_the_queue(run_dir, hpcdist, slurm, how):
    """Cancelled, say: neither does it run, nor is it run again by itself, and there is nothing to stop."""
    in_job_17(run_dir)
    if how == "stopped":
        path = run_dir / "checkpoints" / "attempts" / "0002.jsonl"
        path.write_text(path.read_text() + json.dumps({"event": "end", "how": "stopped", "reason": "SIGTERM"}) + "\n")
    code, out, _ = hpcdist("status", run_dir)
    assert code == 0
    assert "to follow   nothing by itself: job 17 is not in the queue; started again, it resumes\n" in out
    end = {"died": "died by a signal or an error", "stopped": "stopped: SIGTERM"}[how]
    assert f"from step 3; {end}\n" in out
    code, _, error = hpcdist("stop", run_dir)
    assert (code, (run_dir / "stop").exists()) == (2, False)
    expected = {"died": "whose job 17 is not in the queue", "stopped": "whose last attempt has ended (stopped)"}
    assert expected[how] in error
    slurm["squeue"] = None
    assert "not in the queue" not in hpcdist("status", run_dir)[1], "without an answer nothing is known"


@pytest.mark.parametrize("first_state", [None, "RUNNING"])
def test_the_next_job_of_a_chain(run_dir, hpcdist, slurm, first_state):
    """It waits while the first one runs: squeue prints it first."""
    in_job_17(run_dir)
    slurm["squeue"] = f"18\t18\tN/A\tPENDING\t8:00:00\t(Dependency)\thpcdist:{run_dir}\n"
    if first_state:
        slurm["squeue"] += f"17\t17\tN/A\tRUNNING\t8:00\tn1\thpcdist:{run_dir}\n"
    slurm["scontrol"] = "JobId=18 JobState=PENDING StdOut=/home/a b/runs-18.log Power=\n"
    out = hpcdist("status", run_dir)[1]
    job = {None: "PENDING, 8:00:00 left, (Dependency)", "RUNNING": "RUNNING, 8:00 left, n1"}[first_state]
    assert f"Slurm       {job}\nlog         /home/a b/runs-18.log\n" in out
    assert "not in the queue" not in out
    out = hpcdist("stop", run_dir, "--for-good")[1]
    assert ("cancelled" in out) == (first_state is None)
    assert "job 18 waited, and is cancelled" in hpcdist("stop", 18, "--for-good")[1]


def test_a_job_that_goes_on_after_its_attempt(run_dir, hpcdist, slurm):
    """It evaluates, say. A later job in the same folder has not begun, and can be stopped."""
    in_job_17(run_dir)
    path = run_dir / "checkpoints" / "attempts" / "0002.jsonl"
    path.write_text(path.read_text() + json.dumps({"event": "end", "how": "finished", "reason": "all is done"}) + "\n")
    (run_dir / "decision.json").write_text(json.dumps({"decision": "finished", "reason": "all is done"}))
    slurm["squeue"] = f"17\t17\tN/A\tRUNNING\t8:00\tn1\thpcdist:{run_dir}\n"
    assert "to follow   nothing: it has finished\n" in hpcdist("status", run_dir)[1]
    assert hpcdist("stop", run_dir)[0] == 2
    slurm["squeue"] = f"20\t20\tN/A\tRUNNING\t8:00\tn1\thpcdist:{run_dir}\n"
    assert "to follow   job 20 has started, and has not begun to train\n" in hpcdist("status", run_dir)[1]
    code, out, error = hpcdist("stop", run_dir)
    assert code == 0, error
    assert "the next attempt saves after its first step, and ends, and is run again; --for-good prevents that" in out


def test_a_task_of_an_array_is_that_of_its_folder(run_dir, hpcdist, slurm):
    """The ledger of the last task has the id of the whole array, as tasks that wait have."""
    in_job_17(run_dir)
    other_lines = "17_1\t18\t1\tRUNNING\t9:00\tn1\thpcdist:/r/a-{task}\n17_2\t17\t2\tPENDING\t9:00\tn1\thpcdist:/r/b\n"
    slurm["squeue"] = other_lines
    records = ("JobId=18 Comment=hpcdist:/r/a-1 StdOut=/1.log", f"JobId=17 Comment=hpcdist:{run_dir} StdOut=/3.log")
    slurm["scontrol"] = "\n".join(records)
    out = hpcdist("status", run_dir)[1]
    assert "job 17 is not in the queue" in out
    assert "log         /3.log\n" in out
    slurm["squeue"] += f"17_3\t17\t3\tRUNNING\t7:00\tn2\thpcdist:{run_dir}\n"
    assert "Slurm       RUNNING, 7:00 left, n2\n" in hpcdist("status", run_dir)[1]


def test_an_array_that_has_ended_is_not_one_job(hpcdist, slurm):
    slurm["scontrol"] = "JobId=22 ArrayTaskId=1 Comment=hpcdist:/r/a\nJobId=21 ArrayTaskId=2 Comment=hpcdist:/r/b\n"
    assert "expected one job, got 21, an array with 21_1 and others; name one of them." in hpcdist("status", 21)[2]


def test_a_job_of_a_recipe_that_starts(tmp_path, hpcdist, slurm):
    """It has no comment, and its run has not begun."""
    (tmp_path / "run" / "jobs").mkdir(parents=True)
    (tmp_path / "run" / "jobs" / "19").touch()
    slurm["squeue"] = "19\t19\tN/A\tRUNNING\t8:00:00\tn1\t(null)\n"
    assert "Slurm       RUNNING" in hpcdist("status", tmp_path / "run")[1]
    slurm["squeue"] = None
    assert "expected a run that has begun, with" in hpcdist("status", tmp_path / "run")[2], "it may run"


@pytest.mark.feature("slurm.status-log-cancel")
def test_a_job_that_ended_before_it_began_to_train(tmp_path, hpcdist, slurm):
    slurm["scontrol"] = (
        f"JobId=19 JobState=FAILED ExitCode=78:0 Comment=hpcdist:{tmp_path}/run StdOut={tmp_path}/runs-19.log\n"
    )
    (tmp_path / "runs-19.log").touch()
    (tmp_path / "run" / "jobs").mkdir(parents=True)
    (tmp_path / "run" / "jobs" / "19").touch()
    for run in (19, tmp_path / "run"):
        code, _, error = hpcdist("status", run)
        assert code == 2
        assert (
            f"got 19, which has ended before that (FAILED, exit code 78); read its log, {tmp_path}/runs-19.log" in error
        )
    slurm["scontrol"] = slurm["scontrol"].replace("78:0", "0:9")
    assert "(FAILED, signal 9)" in hpcdist("status", 19)[2]
    slurm["scontrol"] = None  # it forgets jobs after some minutes
    assert "got 19, which has ended before that; read its log." in hpcdist("status", tmp_path / "run")[2]
    slurm["squeue"] = f"19\t19\tN/A\tRUNNING\t8:00:00\tn1\thpcdist:{tmp_path}/run\n"
    out = hpcdist("status", tmp_path / "run")[1]
    assert "to follow   job 19 has started, and has not begun to train\nSlurm       RUNNING" in out
    code, out, _ = hpcdist("stop", 19, "--for-good")
    assert (code, "the next attempt saves after its first step, and ends, and is not run again" in out) == (0, True)
    assert (tmp_path / "run" / "stop").read_text() == "hpcdist stop --for-good\n"


@pytest.mark.parametrize(("how", "verdict"), [("stopped", "requeue"), ("stopped", "stop"), ("finished", "finished")])
def test_a_stop_between_two_attempts_is_for_the_next_one(run_dir, hpcdist, monkeypatch, how, verdict):
    """Slurm is requeueing the job, or has started it again, and it still imports torch."""
    path = run_dir / "checkpoints" / "attempts" / "0002.jsonl"
    end = json.dumps({"event": "end", "how": how, "reason": "SIGTERM on rank 0"})
    path.write_text(path.read_text().replace('"job": null', '"job": "17"') + f"{end}\n")

    (run_dir / "decision.json").write_text(json.dumps({"decision": verdict, "reason": "SIGTERM on rank 0"}))

    def slurm(command, **options):
        return subprocess.CompletedProcess(command, 0, f"17\t17\tN/A\tRUNNING\t8:00:00\tn1\thpcdist:{run_dir}\n", "")

    monkeypatch.setattr(subprocess, "run", slurm)
    code, out, error = hpcdist("stop", run_dir, "--for-good")
    if verdict != "requeue":
        assert (code, (run_dir / "stop").exists()) == (2, False)
        return
    assert code == 0, error
    assert "the next attempt saves after its first step, and ends, and is not run again" in out
    assert (run_dir / "stop").read_text() == "hpcdist stop --for-good\n"


@pytest.mark.parametrize("given", ["12,13", "31+0", "21_[1-5]"])
def test_what_is_no_job_number_cancels_nothing(hpcdist, monkeypatch, given):
    """It is taken for a folder: Slurm is asked who works in it at most."""
    commands = []

    def answer(command, **options):
        commands.append(command[0])
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", answer)
    assert hpcdist("stop", given, "--for-good")[0] == 2
    assert set(commands) <= {"squeue"}


ARRAY = (
    "21_1\t22\t1\tRUNNING\t9:00\tn1\thpcdist:/r/a-{task}\n"
    "21_2\t21\t2\tPENDING\t10:00\t(Resources)\thpcdist:/r/a-{task}\n"
)


@pytest.mark.feature("slurm.status-log-cancel")
def test_jobs_of_this_user(hpcdist, monkeypatch):
    """Those of `hpcdist submit`, each with its run folder; what somebody else's script has as a comment is left out."""
    listing = ARRAY + "22\t22\tN/A\tRUNNING\t1:00\tn2\tmine\n"
    monkeypatch.setattr(subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 0, listing, ""))
    assert hpcdist("status")[1].splitlines() == [
        "21_1  RUNNING, 9:00 left, n1  /r/a-1",
        "21_2  PENDING, 10:00 left, (Resources)  /r/a-2",
    ]
    assert [load["run_dir"] for load in json.loads(hpcdist("status", "--json")[1])] == ["/r/a-1", "/r/a-2"]


def test_a_whole_array_is_not_one_job(hpcdist, monkeypatch):
    monkeypatch.setattr(subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 0, ARRAY, ""))
    code, _, error = hpcdist("stop", "21")
    assert (code, error) == (2, "hpcdist: expected one job, got 21, an array with 21_1, 21_2; name one of them.\n")


def test_json_has_no_nan(run_dir, hpcdist):
    (run_dir / "metrics.jsonl").write_text('{"step": 3, "loss": NaN}\n' + "[" * 60_000)
    status_json = hpcdist("status", run_dir, "--json")[1]
    assert json.loads(status_json, parse_constant=pytest.fail)["metrics"] == {"step": 3, "loss": None}


@pytest.mark.feature("slurm.status-log-cancel")
def test_a_job_that_has_ended(run_dir, hpcdist, slurm):
    slurm["scontrol"] = f"JobId=17 JobState=COMPLETED Comment=hpcdist:{run_dir} Power= \n"
    assert f"run         {run_dir}" in hpcdist("status", 17)[1]


@pytest.mark.parametrize("given", ["17", "17_3"])
def test_a_job_that_nobody_knows(given, hpcdist, monkeypatch):
    monkeypatch.setattr(subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 1, "", "no"))
    code, _, error = hpcdist("status", given)
    assert (code, error.count("\n")) == (2, 1)
    assert f"expected a run folder, or a job of `hpcdist submit` that Slurm knows, got '{given}'" in error


def test_a_damaged_newest_checkpoint_is_passed_over(run_dir, hpcdist):
    (run_dir / "checkpoints" / "step-00000005-0002.h5").write_bytes(b"nothing")
    assert "checkpoint  step 3, " in hpcdist("status", run_dir)[1]


def test_stop_asks(run_dir, hpcdist):
    code, out, _ = hpcdist("stop", run_dir)
    assert (code, out) == (0, f"{run_dir}/stop: the job saves after its step, and ends\n")
    assert (run_dir / "stop").exists()
    assert ", asked to stop" in hpcdist("status", run_dir)[1]


@pytest.mark.feature("slurm.status-log-cancel")
def test_stop_waits_until_the_job_has_ended(run_dir, hpcdist):
    def end():
        while not (run_dir / "stop").exists():
            time.sleep(0.01)
        (run_dir / "stop").unlink()  # as the job does

    thread = threading.Thread(target=end)
    thread.start()
    assert hpcdist("stop", run_dir, "--wait", "30")[0] == 0
    thread.join()


def test_stop_does_not_wait_for_ever(run_dir, hpcdist):
    code, _, error = hpcdist("stop", run_dir, "--wait", "0.1")
    assert code == 1
    assert "expected the job to end within 0.1 s" in error


@pytest.mark.parametrize("command", ["status", "stop"])
def test_a_folder_of_something_else_is_refused(command, hpcdist, tmp_path):
    code, _, error = hpcdist(command, tmp_path)
    assert (code, error.count("\n")) == (2, 1)
    assert "expected a run that has begun, with checkpoints or a decision.json in its folder" in error
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_has_just_begun(hpcdist, tmp_path):
    (tmp_path / "checkpoints").mkdir()
    assert hpcdist("status", tmp_path)[:2] == (0, f"run         {tmp_path}\n")

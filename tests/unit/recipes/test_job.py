"""What the recipes do after a launch: every case of exit code and decision, with a stand-in for scontrol."""

import json
import os
import re
import subprocess
import sys
import time

import job
import pytest
from batch_systems import Facts
from restart_rule import Launch
from stand_ins import JOB, SCONTROL, add_program

from hpcdist.run.decision import Decision, DecisionFile, Verdict

pytestmark = pytest.mark.timeout(60)
PROGRAM = """
if [[ -n $WRITES ]]; then cp "$WRITES" "$RUN_DIR/new" && mv "$RUN_DIR/new" "$RUN_DIR/decision.json"; fi
if [[ -n $AWAY_S ]]; then
  mv "$RUN_DIR" "$RUN_DIR-away"
  (sleep "$AWAY_S" && mv "$RUN_DIR-away" "$RUN_DIR") &
fi
echo "ends at $SLURM_JOB_END_TIME, preempted: ${HPCDIST_PREEMPTED:-no}"
exit "$CODE"
"""
PREEMPTED = {"PREEMPTED": "4600"}


def nearly_over():
    return {"SLURM_JOB_END_TIME": str(int(time.time()) + 100)}


def nearly_over_as_slurm_says():
    """As after `scontrol update TimeLimit`, or where an older Slurm sets no variable."""
    return {"END": str(int(time.time()) + 100)}


@pytest.fixture
def leave(root, tmp_path, clean_environ):
    """Return leave(): launch a program with an exit code and a decision; the script's exit code and output."""
    (tmp_path / "run").mkdir()

    def leave(
        code, decision=None, before=None, scontrol=True, job="7", attempt=2, program=PROGRAM, command=None, **environ
    ):
        file = DecisionFile(tmp_path / "run")
        if before is not None:
            file.write(before, 3, attempt=1, job="7")
        written = DecisionFile(tmp_path)
        if decision is not None:
            written.write(decision, 5, attempt=attempt, job=job)
        if scontrol:  # None: the test has made its own
            add_program(tmp_path / "bin", "scontrol", SCONTROL)
            add_program(tmp_path / "bin", "srun", "#!/usr/bin/env bash\n")  # all nodes answer
        job_environ = {
            **JOB,
            "PATH": f"{tmp_path / 'bin'}:{clean_environ['PATH']}"
            if scontrol is not False
            else without_scontrol(tmp_path),
            "RUN_DIR": str(tmp_path / "run"),
            "WRITES": "" if decision is None else str(written.path),
            "CODE": str(code),
            "REQUEUE_PAUSES_S": "0 0 0",
            "READ_PAUSES_S": "0.1 0.1 1.3",
            "AWAY_S": "",
        }
        command = command or ("slurm/job.py", "bash", "-c", program)
        done = subprocess.run(
            [sys.executable, "-E", "-S", *command],
            env={**job_environ, **environ},
            cwd=root,
            capture_output=True,
            text=True,
            timeout=20,
        )
        requeued = tmp_path / "bin" / "calls"
        if requeued.exists():
            scontrol_calls = requeued.read_text()
        else:
            scontrol_calls = ""
        requeued.unlink(missing_ok=True)
        return done.returncode, done.stdout + done.stderr + scontrol_calls

    return leave


def without_scontrol(folder):
    programs = folder / "few"
    programs.mkdir()
    for name in ("bash", "cat", "cp", "date", "grep", "ls", "mkdir", "mv", "rm", "sed", "sleep", "stat"):
        (programs / name).symlink_to(next(f"{place}/{name}" for place in ("/bin", "/usr/bin") if os.path.exists(place)))
    return str(programs)


DIED = Decision(Verdict.REQUEUE, "died by a signal or an error")
SAVED = Decision(Verdict.REQUEUE, "died by a signal or an error, after a newer checkpoint")
STOPPED = Decision(Verdict.REQUEUE, 'he said "stop", on rank 0')
FINISHED = Decision(Verdict.FINISHED, "the program has finished")
STOP = Decision(Verdict.STOP, "attempt 3 in a row that died without progress")


@pytest.mark.feature("checkpoints.requeue")
@pytest.mark.parametrize(
    ("code", "decision"), [(0, SAVED), (137, DIED), (74, DIED), (75, DIED), (0, STOPPED), (75, STOPPED), (143, STOPPED)]
)
def test_requeue(leave, code, decision):
    exit_code, output = leave(code, decision)
    assert exit_code == 75
    assert "requeued 7" in output
    assert f"exit code {code}, to be requeued: {decision.reason}" in output
    assert ("inside the allocation" in output) == (decision is not STOPPED and code not in (74, 75))


@pytest.mark.parametrize(("code", "decision"), [(2, None), (76, DIED), (78, STOPPED)])
def test_codes_after_which_nothing_is_run_again(leave, code, decision):
    exit_code, output = leave(code, decision, **PREEMPTED)
    assert exit_code == code
    assert "requeued" not in output
    assert "inside the allocation" not in output
    assert f"not run again: exit code {code}" in output


@pytest.mark.parametrize(("code", "decision", "expected"), [(0, FINISHED, 0), (1, FINISHED, 1), (137, STOP, 76)])
def test_the_end(leave, code, decision, expected):
    exit_code, output = leave(code, decision)
    assert exit_code == expected
    assert "requeued" not in output
    assert "inside the allocation" not in output


@pytest.mark.parametrize(("before", "code", "expected"), [(None, 0, 1), (STOP, 1, 1), (FINISHED, 127, 127)])
def test_a_launch_that_ended_before_it_wrote_is_not_taken_for_an_earlier_one(leave, before, code, expected):
    exit_code, output = leave(code, before=before)
    assert exit_code == expected
    assert "requeued" not in output
    assert f"not run again: exit code {code} before training had begun" in output


@pytest.mark.parametrize(
    ("before", "code", "last"),
    [(DIED, 0, 1), (STOPPED, 137, 137), (FINISHED, 143, 143)],
)
def test_three_launches_in_a_row_may_die_early_in_a_run_that_is_under_way_or_by_signals(
    leave, tmp_path, before, code, last
):
    for _ in range(2):  # who submits it again after the end has three more
        for count in range(1, 4):
            exit_code, output = leave(code, before=before, SLURM_JOB_ID="9")
            assert exit_code == 75
            assert "requeued 9\n" in output
            lines = (tmp_path / "run" / "early-deaths").read_text().splitlines()
            assert len(lines) == count
            assert lines[-1].endswith(f" job 9: exit code {code}")
            assert f"exit code {code}, to be requeued: died before training had begun" in output
        exit_code, output = leave(code, before=before, SLURM_JOB_ID="9")
        assert exit_code == last
        assert "requeued" not in output
        assert f"not run again: exit code {code} before training had begun" in output


def test_a_launch_that_began_ends_the_row_of_early_deaths(leave, tmp_path):
    for _ in range(2):
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
    exit_code, output = leave(137, before=SAVED)
    assert exit_code == 137
    assert "requeued" not in output


@pytest.mark.parametrize(("code", "called_off"), [(0, {}), (75, PREEMPTED), (137, {}), (143, PREEMPTED)])
def test_a_job_whose_run_another_has_taken_over_ends(leave, tmp_path, code, called_off):
    exit_code, output = leave(code, SAVED, before=DIED, job="8", **called_off)
    assert exit_code == 76
    assert "requeued" not in output
    assert "inside the allocation" not in output
    assert "not run again: job 8 has taken over the run folder" in output


@pytest.mark.parametrize("before", [None, DIED], ids=["new", "under way"])
@pytest.mark.parametrize("code", [74, 137])
def test_a_decision_that_cannot_be_read_at_once_is_waited_for(leave, before, code):
    """As where the file server was away that the program has died of, and comes back."""
    exit_code, output = leave(code, STOPPED, before=before, AWAY_S="0.5")
    assert exit_code == 75
    assert f"exit code {code}, to be requeued: {STOPPED.reason}" in output


def test_a_decision_that_stays_away_leaves_the_code_of_the_program(leave):
    exit_code, output = leave(74, SAVED, before=DIED, AWAY_S="5")
    assert exit_code == 74
    assert "taken over" not in output


def test_a_decision_that_was_removed_is_none(leave, tmp_path):
    """Not waited for."""
    exit_code, output = leave(74, before=SAVED, READ_PAUSES_S="30", program='rm "$RUN_DIR/decision.json"' + PROGRAM)
    assert exit_code == 74
    assert "not run again: exit code 74 before training had begun" in output


@pytest.mark.parametrize("end", [nearly_over, nearly_over_as_slurm_says], ids=["variable", "slurm"])
def test_the_program_is_signalled_when_its_time_is_over(leave, end):
    _, output = leave(0, FINISHED, **end())
    told = float(re.search(r"ends at (\d+)", output)[1])
    assert told == pytest.approx(time.time() + 100, abs=60)
    assert "ends at ," in leave(0, FINISHED)[1]


def test_the_end_of_the_job_that_submitted_this_one_is_not_its_own(leave):
    """As of a chain's job before, where Slurm sets no variable."""
    _, output = leave(0, FINISHED, **{"SLURM_JOB_END_TIME": "1000", **nearly_over_as_slurm_says()})
    assert "ends at 1000" not in output
    assert float(re.search(r"ends at (\d+)", output)[1]) == pytest.approx(time.time() + 100, abs=60)


@pytest.mark.parametrize("is_last", [True, False], ids=["last", "attempt"])
@pytest.mark.parametrize(("code", "decision", "expected"), [(75, STOPPED, 75), (137, STOP, 76)])
def test_a_decision_that_says_what_stood_there_is_its_own(leave, code, decision, expected, is_last):
    """Whose checkpoints were removed begins with attempt 1 again."""
    if is_last:
        before = decision
    else:
        before = DIED
    exit_code, output = leave(code, decision, before=before, attempt=1)
    assert exit_code == expected
    assert "before training had begun" not in output


def test_a_decision_that_was_written_again_word_for_word_is_its_own(leave, tmp_path):
    exit_code, output = leave(0, before=FINISHED, WRITES=str(tmp_path / "run" / "decision.json"))
    assert exit_code == 0
    assert "before training had begun" not in output


CALLED_OFF = {"preempted": PREEMPTED, "time": nearly_over(), "slurm": nearly_over_as_slurm_says()}


@pytest.mark.parametrize("called_off", CALLED_OFF.values(), ids=CALLED_OFF)
@pytest.mark.parametrize(("code", "expected"), [(0, 75), (143, 75), (1, 1)])
def test_called_off_before_it_had_begun(leave, called_off, code, expected):
    exit_code, output = leave(code, **called_off)
    assert exit_code == expected
    assert ("requeued 7" in output) == (expected == 75)


@pytest.mark.parametrize(("before", "code", "last"), [(None, 0, 1), (SAVED, 138, 138)])
def test_a_start_that_is_out_of_time_again_and_again_ends_the_run(leave, tmp_path, before, code, last):
    for count in range(3):
        if count == 0 and before is None:
            (tmp_path / "run").rmdir()
        exit_code, output = leave(code, before=before, **nearly_over())
        assert exit_code == 75
        assert "requeued 7\n" in output
        assert f"exit code {code}, to be requeued: out of time before training had begun" in output
    exit_code, output = leave(code, before=before, **nearly_over())
    assert exit_code == last
    assert "requeued" not in output
    assert f"not run again: exit code {code} before training had begun" in output


@pytest.mark.parametrize("before", [None, SAVED], ids=["none", "saved"])
def test_preemptions_before_it_had_begun_are_not_counted(leave, tmp_path, before):
    for _ in range(5):
        exit_code, output = leave(143, before=before, **PREEMPTED, **nearly_over())
        assert exit_code == 75
        assert "exit code 143, to be requeued: preempted before training had begun" in output
    assert not (tmp_path / "run" / "early-deaths").exists()


def test_a_preemption_before_the_job_started_last_is_none(leave):
    exit_code, output = leave(0, PREEMPTED="999")
    assert exit_code == 1
    assert "requeued" not in output


ARRAY = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}


def test_a_task_of_an_array_whose_first_was_cancelled(leave):
    """The last task has the id of the array; asked for that, scontrol tells of all tasks."""
    exit_code, output = leave(75, STOPPED, **ARRAY)
    assert exit_code == 75
    assert "requeued 7_3" in output


@pytest.mark.feature("slurm.job-arrays")
def test_a_task_of_an_array_whose_first_was_preempted(leave):
    assert leave(0, **ARRAY)[0] == 1


def test_a_job_that_a_task_of_an_array_has_submitted_is_no_such_task(leave):
    """It has the variables of the one that submitted it."""
    exit_code, output = leave(75, STOPPED, SLURM_ARRAY_JOB_ID="50", SLURM_ARRAY_TASK_ID="1")
    assert exit_code == 75
    assert "requeued 7\n" in output


def has_started_before(tmp_path, *lines):
    """Leave what a job's earlier starts leave in its run folder."""
    marker = tmp_path / "run" / "jobs" / "7"
    marker.parent.mkdir(exist_ok=True)
    marker.write_text("".join(f"{line}\n" for line in lines))
    return marker


@pytest.mark.parametrize(
    ("restarts", "restart_count", "expected"), [("1", "0", 76), ("2", "1", 76), ("1", "1", 75), ("0", "2", 75)]
)
def test_a_job_that_slurm_has_started_again_elsewhere(leave, tmp_path, restarts, restart_count, expected):
    """A job keeps its id; a variable of the job that submitted this one may be left."""
    has_started_before(tmp_path)
    exit_code, output = leave(143, DIED, RESTARTS=restarts, SLURM_RESTART_COUNT=restart_count)
    assert exit_code == expected
    assert ("requeued 7" in output) == (expected == 75)


@pytest.mark.parametrize("state", ["CANCELLED", "COMPLETING"])
def test_a_job_that_slurm_has_ended(leave, state):
    exit_code, output = leave(75, STOPPED, STATE=state)
    assert exit_code == 75
    assert "requeued 7" not in output


@pytest.mark.parametrize("state", ["SIGNALING", "SUSPENDED", "CONFIGURING"])
def test_a_job_that_runs_has_other_names_too(leave, state):
    assert "requeued 7" in leave(75, STOPPED, STATE=state)[1]


@pytest.mark.parametrize(
    "way", [{"scontrol": False}, {"REFUSALS": "99"}, {"STATE": ""}], ids=["missing", "refuses", "mute"]
)
def test_scontrol_that_does_not_help(leave, way):
    exit_code, output = leave(75, STOPPED, **way)
    assert exit_code == 75
    assert "requeued 7" not in output
    assert output.rstrip().endswith("to resume, run: scontrol requeue 7")


def test_scontrol_that_helps_in_the_end(leave):
    exit_code, output = leave(75, STOPPED, REFUSALS="2")
    assert exit_code == 75
    assert output.count("requeued 7\n") == 1
    assert "to resume, run" not in output


def test_a_busy_slurmctld_has_a_minute(tmp_path, monkeypatch):
    pauses = []
    tries = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    monkeypatch.setattr(job, "output_of", lambda *command, **_: None)
    monkeypatch.setattr(job.Job, "look", lambda job: tries.append(1) or Facts("RUNNING"))
    busy = job.Job({"SLURM_JOB_ID": "7", "RUN_DIR": str(tmp_path)})
    busy.folder.make_marker()
    tries.clear()
    assert busy.leave(Launch(75, "requeue", "why")) == 75
    assert pauses[0] == 0
    assert 45 <= sum(pauses) <= 90
    assert len(tries) - 1 == len(pauses) > 3


def test_without_an_answer_the_last_known_end_holds(tmp_path, monkeypatch):
    """The variable may be older than `scontrol update TimeLimit`."""
    answers = ["JobState=RUNNING Restarts=0 EndTime=9000", "JobState=RUNNING Restarts=0 EndTime=20000", None]
    monkeypatch.setattr(job, "output_of", lambda *command, **_: answers.pop(0))
    queried_job = job.Job({"SLURM_JOB_ID": "7", "RUN_DIR": str(tmp_path), "SLURM_JOB_END_TIME": "1000"})
    assert [queried_job.look().end_s, queried_job.look().end_s] == [20000, 20000]


#: Launches a program, with a SIGUSR1 that was sent before, and perhaps one that is sent meanwhile.
SIGNALLED = """
import os, signal, sys, threading
sys.path.insert(0, "slurm")
from batch_systems import WAITED_FOR
from job import Job

signal.pthread_sigmask(signal.SIG_BLOCK, WAITED_FOR)
os.kill(os.getpid(), signal.SIGUSR1)
if sys.argv[1] == "again":
    threading.Timer(1, os.kill, (os.getpid(), signal.SIGUSR1)).start()
program = "trap 'echo received' USR1; for _ in {1..20}; do sleep 0.1; done"
Job(os.environ).launch(["bash", "-c", program])
"""


@pytest.mark.parametrize(("when", "n_received"), [("before", 0), ("again", 1)])
def test_a_signal_reaches_the_launch_that_it_was_meant_for(leave, when, n_received):
    _, output = leave(0, command=("-c", SIGNALLED, when))
    assert output.count("received\n") == n_received


def test_a_restart_that_does_not_see_the_run_folder_makes_nothing(leave, tmp_path):
    """A file system that is not mounted on the node: the job would train anew, into a folder of the node's own."""
    code, output = leave(0, FINISHED, RESTARTS="1", SLURM_RESTART_COUNT="1")
    assert code == 74
    assert f"expected {tmp_path}/run/jobs/7, as this job has started before, got none" in output
    assert list((tmp_path / "run").iterdir()) == []


def test_a_first_start_makes_the_run_folder(leave, tmp_path):
    (tmp_path / "run").rmdir()
    assert leave(75, STOPPED, SLURM_RESTART_COUNT="3")[0] == 75, "a count that is left from another job"
    assert (tmp_path / "run" / "jobs" / "7").read_text() == "requeued after restart 0\n"


@pytest.mark.parametrize(
    ("lines", "expected"), [([], "1"), (["requeued after restart 0"], "1"), (["requeued after restart 1"], "no")]
)
def test_what_slurm_has_ended_is_told_from_what_died(leave, tmp_path, lines, expected):
    """Slurm restarts a job that was preempted, or that lost a node; this script one that died."""
    has_started_before(tmp_path, *lines)
    _, output = leave(75, STOPPED, RESTARTS="2", SLURM_RESTART_COUNT="2")
    assert f"preempted: {expected}\n" in output


def test_a_preempted_job_that_the_script_requeues_was_ended_by_slurm(leave, tmp_path):
    marker = has_started_before(tmp_path)
    assert leave(75, STOPPED, **PREEMPTED)[0] == 75
    assert marker.read_text() == ""


def test_a_job_whose_limit_is_near_is_requeued_while_its_program_runs(leave, tmp_path):
    """Slurm does not requeue a job that has reached its limit."""
    program = PROGRAM.replace("exit", "sleep 2; exit")
    for margin_s, is_requeued in (("200", True), ("0", False)):
        file = DecisionFile(tmp_path / "run")
        file.write(DIED, 3, attempt=1, job="7")
        _, output = leave(0, DIED, program=program, LIMIT_MARGIN_S=margin_s, **nearly_over_as_slurm_says())
        assert ("the program has not ended: requeued" in output) == is_requeued
        assert output.count("requeued 7\n") == 1 + is_requeued, "once more by the script, when the program has ended"


@pytest.mark.parametrize("state", ["CANCELLED", "COMPLETING"])
def test_a_cancelled_job_is_not_requeued_as_its_time_is_over(leave, tmp_path, state):
    """Its end is now."""
    DecisionFile(tmp_path / "run").write(DIED, 3, attempt=1, job="7")
    program = PROGRAM.replace("exit", "sleep 1; exit")
    _, output = leave(75, STOPPED, program=program, STATE=state, END=str(int(time.time())))
    assert "requeued 7" not in output


def test_the_batch_system_is_not_asked_again_and_again(leave, tmp_path):
    counting = SCONTROL.replace("if [[ -z $STATE", 'echo >> "${0%/*}/looks"\nif [[ -z $STATE')
    add_program(tmp_path / "bin", "scontrol", counting)
    leave(75, STOPPED, scontrol=None, program=PROGRAM.replace("exit", "sleep 2; exit"), **nearly_over_as_slurm_says())
    assert len((tmp_path / "bin" / "looks").read_text().splitlines()) < 12


def test_a_job_that_reached_its_limit_may_still_be_requeued(leave, tmp_path):
    add_program(tmp_path / "bin", "scontrol", SCONTROL.replace("Reason=None", "Reason=TimeLimit"))
    code, output = leave(75, STOPPED, STATE="COMPLETING", scontrol=None)
    assert code == 75
    assert "requeued 7" in output


def test_the_fields_are_those_of_the_file(tmp_path):
    file = DecisionFile(tmp_path)
    file.write(DIED, 5, attempt=2, job="7")
    assert set(json.loads(file.path.read_text())) >= {"decision", "reason", "attempt", "job"}


#: Lets the watch look once.
WATCH = """
import sys, time
sys.path.insert(0, "slurm")
import watch

def sleep(seconds, looks=[]):
    if seconds == 9:
        looks.append(seconds)
        if len(looks) == 2:
            sys.exit("watches on")
        prepare()

def prepare(): ...

time.sleep = sleep
watch.main("")
"""


@pytest.fixture
def watch(leave, tmp_path):
    """Return watch(): one look of watch.py, with a decision that stands there; its exit code and output."""
    has_started_before(tmp_path)
    return lambda before, program=WATCH, **environ: leave(
        0, before=before, command=("-c", program), WATCH_PAUSE_S="9", **environ
    )


@pytest.mark.parametrize(
    ("decision", "does"),
    [
        (SAVED, f"exit code 137, to be requeued: {SAVED.reason}"),
        (None, "exit code 137, to be requeued: died before training had begun"),
        (STOP, f"not run again: {STOP.reason}"),
        (FINISHED, "ends 7"),
    ],
    ids=["saved", "none", "stop", "finished"],
)
def test_a_job_that_has_lost_the_node_of_its_script(watch, tmp_path, decision, does):
    """It is requeued, if it is to go on, else ended: there is no script that would come to an end."""
    add_program(tmp_path / "bin", "scancel", "#!/usr/bin/env bash\necho ends $* >> ${0%scancel}calls\n")
    (tmp_path / "run" / "log").write_text("the log so far\n")
    _, output = watch(decision, NODES="n2")
    log = (tmp_path / "run" / "log").read_text()
    assert log.startswith("the log so far\n")
    assert "the node of the batch script is lost" in log
    assert does in log + output
    assert ("requeued 7" in output) != ("ends 7" in output)


def test_a_chain_that_has_lost_its_script_and_is_to_stop_withdraws_its_successor(watch, tmp_path):
    add_program(tmp_path / "bin", "scancel", "#!/usr/bin/env bash\necho ends $* >> ${0%scancel}calls\n")
    _, output = watch(STOP, WATCH.replace('watch.main("")', 'watch.main("8")'), NODES="n2")
    assert "ends 8\nends 7\n" in output


UNKNOWN = {"there": {}, "no answer": {"STATE": ""}, "requeued": {"STATE": "PENDING", "NODES": "n2"}}


@pytest.mark.parametrize("environ", UNKNOWN.values(), ids=UNKNOWN)
def test_a_job_whose_script_is_not_known_to_be_lost_is_let_alone(watch, environ):
    exit_code, output = watch(SAVED, **environ)
    assert (exit_code, output) == (1, "watches on\n")


def test_a_job_that_cannot_be_requeued_is_watched_on(watch, tmp_path):
    add_program(tmp_path / "bin", "scancel", "#!/usr/bin/env bash\necho ends $* >> ${0%scancel}calls\n")
    exit_code, output = watch(SAVED, NODES="n2", REFUSALS="9")
    assert exit_code == 1
    assert "to resume, run: scontrol requeue 7" in output
    assert "ends" not in output


def test_a_job_whose_decision_cannot_be_read_is_watched_on(watch, tmp_path):
    run = str(tmp_path / "run")
    loses = f"import os; os.rename({run!r}, {run + '-away'!r}); open({run!r}, 'w')"  # a file in place of the folder
    exit_code, output = watch(None, WATCH.replace("...", loses), NODES="n2")
    assert exit_code == 1
    assert output.endswith("the node of the batch script is lost\nwatches on\n")


def test_a_watch_on_a_node_that_does_not_see_the_run_folder_makes_nothing(watch, tmp_path):
    (tmp_path / "run" / "jobs" / "7").unlink()
    exit_code, output = watch(SAVED, NODES="n2", READ_PAUSES_S="")
    assert exit_code == 1
    assert f"expected {tmp_path}/run/jobs/7, got none: this node does not see the run folder" in output
    assert list((tmp_path / "run" / "jobs").iterdir()) == []

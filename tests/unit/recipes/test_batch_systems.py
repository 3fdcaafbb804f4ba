"""What batch systems say of a job, in the words of their manuals."""

import time

import pytest
from batch_systems import FLUX, LSF, PBS, SLURM, Facts, batch_system, output_of

SLURM_TEXT = (
    "JobId=7 JobName=a UserId=root(0) Priority=1 Requeue=1 Restarts=2 BatchFlag=1 JobState={state} Reason={reason} "
    "StartTime=1000 EndTime=4600 PreemptEligibleTime=1000 PreemptTime={preempted} NodeList=n[1-2] BatchHost=n1 "
    "Command=/a b JobState=FORGED StdErr=/run/log\n"
)
RUNNING = Facts("RUNNING", False, False, True, 2, 4600, "n1", "n[1-2]", "/run/log")


@pytest.mark.parametrize(
    ("state", "reason", "preempted", "expected"),
    [
        ("RUNNING", "None", "None", RUNNING),
        ("RUNNING", "None", "4000", RUNNING._replace(is_preempted=True)),
        ("RUNNING", "None", "999", RUNNING),
        ("CANCELLED", "None", "None", RUNNING._replace(state="CANCELLED", is_ending=True)),
        ("COMPLETING", "None", "None", RUNNING._replace(state="COMPLETING", is_ending=True)),
        ("COMPLETING", "TimeLimit", "None", RUNNING._replace(state="COMPLETING")),
    ],
)
def test_slurm(state, reason, preempted, expected):
    text = SLURM_TEXT.format(state=state, reason=reason, preempted=preempted)
    assert SLURM.read(text, 0) == expected


def test_an_answer_that_says_nothing():
    for system in (SLURM, PBS, LSF, FLUX):
        assert system.read("", 0).state == ""
        assert system.read("no such job\n", 0).end_s is None


PBS_TEXT = """Job Id: 13.server
    Job_Name = train
    job_state = R
    Rerunable = True
    Resource_List.walltime = 01:30:05
    stime = Mon Nov 23 02:00:00 2026
    run_count = 2
"""


@pytest.mark.feature("launch.other-batch-systems", "complaints.time-limit-known")
def test_pbs():
    started_s = time.mktime((2026, 11, 23, 2, 0, 0, 0, 0, -1))
    assert PBS.read(PBS_TEXT, 0) == Facts("RUNNING", n_restarts=1, end_s=started_s + 5405)
    assert not PBS.read(PBS_TEXT.replace("True", "False"), 0).can_requeue
    assert PBS.read(PBS_TEXT.replace("01:30:05", "forever"), 0).end_s is None


@pytest.mark.feature("launch.other-batch-systems", "complaints.time-limit-known")
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("RUN 0:58 L\n", Facts("RUNNING", end_s=1000 + 58 * 60)),
        ("RUN 12:00 L\n", Facts("RUNNING", end_s=1000 + 12 * 3600)),
        ("RUN -\n", Facts("RUNNING")),
        ("EXIT -\n", Facts("EXIT")),
    ],
)
def test_lsf(text, expected):
    assert LSF.read(text, 1000) == expected


@pytest.mark.feature("launch.other-batch-systems")
@pytest.mark.parametrize(("text", "end_s"), [("3600\n", 4600), ("12.5", 1012.5), ("infinity", None)])
def test_flux(text, end_s):
    assert FLUX.read(text, 1000) == Facts("RUNNING", can_requeue=False, end_s=end_s)


@pytest.mark.feature("launch.other-batch-systems")
def test_which_batch_system():
    for system in (SLURM, PBS, LSF, FLUX):
        assert batch_system({system.id_variable: "7"}) is system
    with pytest.raises(SystemExit, match="batch"):
        batch_system({"SLURM_JOB_ID": ""})


def test_the_variables_are_those_of_the_package():
    from hpcdist.cluster.environment import JOB_ID_VARIABLES

    assert tuple(system.id_variable for system in (SLURM, PBS, LSF, FLUX)) == JOB_ID_VARIABLES[1:]


def test_commands_that_fail_say_nothing(tmp_path):
    assert output_of(["echo", "a"]) == "a\n"
    assert output_of(["false"]) is output_of([str(tmp_path / "missing")]) is None

"""The rule of restarts: its table, and both callers obeying it for every end of a launch."""

import itertools
import re
from types import SimpleNamespace

import pytest
from batch_systems import Facts
from job import Job
from restart_rule import (
    FINAL_CODES,
    FINISHED,
    HAND_BACK,
    JOB,
    RESTART,
    RUN,
    STOP,
    Action,
    Launch,
    Situation,
    action_after,
    is_of_signal,
)

import hpcdist.restart_rule
from hpcdist.cli import run
from hpcdist.errors import ExitCode

#: Exit codes of hpcdist, of shells, of signals, and those by which MPICH's mpirun names a signal.
CODES = (0, 1, 2, 70, 74, 75, 76, 78, 127, 134, 135, 137, 143, 4, 6, 7, 8, 9, 10, 11, 12, 15)
DECISIONS = [
    ("none", ""),
    ("requeue", "died by a signal or an error"),
    ("requeue", "SIGTERM on rank 0"),
    ("stop", "ranks differ"),
    ("finished", ""),
]
EARLIER = ("none", "requeue", "stop", "finished")
LAUNCHERS = ("/usr/bin/srun", "/opt/bin/mpirun")


def launches():
    """Yield every end of a launch; of the decision before it only what the launch has not replaced."""
    for code, launcher, (decision, reason) in itertools.product(CODES, LAUNCHERS, DECISIONS):
        for earlier in EARLIER if decision == "none" else ("none",):
            yield Launch(code, decision, reason, earlier, is_of_signal(code, launcher))
    for code in CODES:
        yield Launch(code, "another", "8", is_signalled=code > 128)


def situations(caller):
    for is_preempted, is_out_of_time, may_restart, has_lost_node in itertools.product((False, True), repeat=4):
        yield Situation(caller, is_preempted, is_out_of_time, may_restart, has_lost_node)


@pytest.mark.parametrize("caller", [JOB, RUN])
def test_what_holds_for_every_end_of_a_launch(caller):
    for launch, situation in itertools.product(launches(), situations(caller)):
        action = action_after(launch, situation)
        if launch.decision == "finished":
            assert action.verb == FINISHED
            if launch.is_signalled:
                expected_code = 0
            else:
                expected_code = launch.code
            assert action.code == expected_code
        elif launch.code in FINAL_CODES:
            assert (action.verb, action.code) == (STOP, launch.code), "the same command would end in the same way"
        elif launch.decision in ("stop", "another"):
            assert (action.verb, action.code) == (STOP, 76)
        elif launch.decision == "requeue":
            assert action.verb in (RESTART, HAND_BACK)
        assert action.why or action.verb == FINISHED
        assert action.code or action.verb in (FINISHED, RESTART), "0 means finished"
        if action.verb == RESTART:
            assert situation.may_restart
            assert not situation.is_preempted
            assert not situation.is_out_of_time
            assert launch.code != 75
        if action.verb == HAND_BACK and launch.decision == "none" and not action.is_early:
            assert situation.is_preempted, "what is not bounded by a count is not this job's doing"


def test_the_callers_differ_where_the_table_names_them():
    """job.py hands back to the batch system what had not begun; `hpcdist run` has none, and starts it again."""
    for launch, situation in itertools.product(launches(), situations(JOB)):
        job = action_after(launch, situation)
        command = action_after(launch, situation._replace(caller=RUN))
        if job.verb == command.verb:
            continue
        if launch.decision == "requeue":
            assert launch.code == 74, "a job waits for a disk by being requeued"
            assert (job.verb, command.verb) == (HAND_BACK, RESTART)
            continue
        assert launch.decision == "none"
        if launch.code == 0 and launch.earlier != "requeue":
            assert command == Action(FINISHED, 0), "a program that is not hpcdist's writes no decision"
        elif job.verb == HAND_BACK:
            assert job.is_early
            assert command.verb == RESTART
        else:
            assert job.verb == RESTART
            assert situation.has_lost_node


@pytest.mark.parametrize(
    ("launch", "facts", "expected"),
    [
        (Launch(1), {}, Action(STOP, 1, "exit code 1 before training had begun")),
        (Launch(0), {}, Action(STOP, 1, "exit code 0 before training had begun")),
        (Launch(127), {"is_preempted": True}, Action(STOP, 127, "exit code 127 before training had begun")),
        (Launch(137, is_signalled=True), {}, Action(HAND_BACK, 75, "died before training had begun", is_early=True)),
        (Launch(1, earlier="requeue"), {}, Action(HAND_BACK, 75, "died before training had begun", is_early=True)),
        (Launch(1, earlier="stop"), {}, Action(STOP, 1, "exit code 1 before training had begun")),
        (Launch(78, earlier="stop", reason="3 attempts in a row"), {}, Action(STOP, 78, "exit code 78")),
        (Launch(76, earlier="stop", reason="3 attempts in a row"), {}, Action(STOP, 76, "3 attempts in a row")),
        (Launch(0), {"is_preempted": True}, Action(HAND_BACK, 75, "preempted before training had begun")),
        (Launch(0), {"is_out_of_time": True}, Action(HAND_BACK, 75, "out of time before training had begun", True)),
        (Launch(143, "finished", is_signalled=True), {}, Action(FINISHED, 0)),
        (Launch(1, "finished"), {}, Action(FINISHED, 1, "finished, and then exit code 1")),
        (Launch(137, "another", "8"), {}, Action(STOP, 76, "job 8 has taken over the run folder")),
        (Launch(1), {"may_restart": True, "has_lost_node": True}, Action(RESTART, 1, "a node is lost")),
        (Launch(74, "requeue", "died"), {"may_restart": True}, Action(HAND_BACK, 75, "died")),
    ],
)
def test_rows_of_job_py(launch, facts, expected):
    assert action_after(launch, Situation(JOB, **facts)) == expected


DIED = "died by a signal or an error"
STOPPED = "SIGTERM on rank 3"


@pytest.mark.parametrize(
    ("launch", "may_restart", "expected"),
    [
        (Launch(0), False, Action(FINISHED, 0)),
        (Launch(0, earlier="finished"), True, Action(FINISHED, 0)),
        (Launch(9, "finished", is_signalled=True), True, Action(FINISHED, 0)),
        (Launch(0, "stop", "ranks differ"), True, Action(STOP, 76, "ranks differ")),
        (Launch(78, "stop", "another model"), True, Action(STOP, 78, "another model")),
        (Launch(2), True, Action(STOP, 2, "exit code 2")),
        (Launch(1), True, Action(STOP, 1, "exit code 1 before training had begun")),
        (Launch(0, "requeue", DIED), True, Action(RESTART, 0, DIED)),
        (Launch(0, "requeue", DIED), False, Action(HAND_BACK, 1, DIED)),
        (Launch(137, "requeue", DIED, is_signalled=True), False, Action(HAND_BACK, 137, DIED)),
        (Launch(74, "requeue", DIED), True, Action(RESTART, 74, DIED)),
        (Launch(75, "requeue", DIED), True, Action(HAND_BACK, 75, DIED)),
        (Launch(0, "requeue", STOPPED), True, Action(HAND_BACK, 75, STOPPED)),
        (Launch(1, "requeue", STOPPED), True, Action(HAND_BACK, 75, STOPPED)),
        (Launch(70, "requeue", "an error"), True, Action(HAND_BACK, 70, "an error")),
        (Launch(74, "requeue", "an error"), True, Action(HAND_BACK, 74, "an error")),
        (Launch(137, is_signalled=True), True, Action(RESTART, 137, "died before training had begun")),
        (Launch(137, is_signalled=True), False, Action(HAND_BACK, 137, "died before training had begun", True)),
        (Launch(0, earlier="requeue"), True, Action(RESTART, 1, "died before training had begun")),
        (Launch(0, earlier="requeue"), False, Action(HAND_BACK, 1, "died before training had begun", True)),
        (Launch(75, earlier="requeue"), True, Action(HAND_BACK, 75, "died before training had begun", True)),
    ],
)
def test_rows_of_hpcdist_run(launch, may_restart, expected):
    assert action_after(launch, Situation(RUN, may_restart=may_restart)) == expected


@pytest.mark.parametrize("code", [4, 7, 8, 10, 12, 70, 74])
def test_mpirun_s_codes_of_signals_and_of_file_systems_start_again(code):
    """A bus error is what a full /dev/shm gives."""
    is_signalled = is_of_signal(code, "/opt/bin/mpirun")
    assert is_signalled == (code < 70)
    if is_signalled:
        earlier = "none"
    else:
        earlier = "requeue"
    launch = Launch(code, earlier=earlier, is_signalled=is_signalled)
    assert action_after(launch, Situation(RUN, may_restart=True)).verb == RESTART
    assert action_after(launch, Situation(JOB)).verb == HAND_BACK


def test_job_py_obeys_the_rule(monkeypatch, tmp_path):
    for launch, situation in itertools.product(launches(), situations(JOB)):
        job = Job.__new__(Job)
        nodes = ["n1", "n2"]
        answering = ["n1"] if situation.has_lost_node else nodes
        if not situation.may_restart:
            answering = []
        if situation.is_out_of_time:
            end_s = 1.0
        else:
            end_s = None
        facts = Facts(is_preempted=situation.is_preempted, end_s=end_s)
        n_launches = run_job(monkeypatch, job, launch, facts, nodes, answering)
        expected = action_after(launch, situation)
        assert (n_launches > 1) == (expected.verb == RESTART), (launch, situation)
        if expected.verb != RESTART:
            assert job.code == expected.code, (launch, situation)
            assert job.n_requeues == (expected.verb == HAND_BACK)


def run_job(monkeypatch, job, launch, facts, nodes, answering):
    """Run `Job.train` where each launch ends alike, without a batch system; return the number of launches."""
    seen = []

    def fake_launch(command):
        seen.append(command)
        if len(seen) == 1:
            next_launch = launch
        else:
            next_launch = Launch(2)
        return next_launch, None

    def requeue():
        job.n_requeues += 1
        return 75

    job.n_requeues = 0
    job.id = "7"
    job.successor = ""
    job.n_restarts = 0
    job.environ = {"SLURM_JOB_NODELIST": "n"}
    job.folder = SimpleNamespace(may_repeat=lambda note: True, note_requeue=lambda n_restarts: None)
    replaced = {
        "launch": fake_launch,
        "look": lambda: facts,
        "names_of": lambda nodelist: nodes,
        "log": lambda text: None,
        "_answering": lambda names: answering,
        "_watch_from": lambda names: None,
        "_forget_copies": lambda names: None,
        "_requeue": requeue,
    }
    for name, function in replaced.items():
        monkeypatch.setattr(job, name, function, raising=False)
    job.code = job.train(["srun", "program"])
    return len(seen)


def test_hpcdist_run_obeys_the_rule(monkeypatch, tmp_path, capfd):
    for launch, may_restart, is_interrupted in itertools.product(launches(), (False, True), (False, True)):
        if launch.decision == "another":  # there is no other job
            continue
        if launch.is_signalled:
            path = "/opt/bin/mpirun"
        else:
            path = "/usr/bin/srun"
        launcher = SimpleNamespace(path=path)
        seen = run_command(monkeypatch, launch, launcher, tmp_path, int(may_restart), is_interrupted)
        expected = action_after(launch, Situation(RUN, may_restart=may_restart and not is_interrupted))
        assert (len(seen.launches) > 1) == (expected.verb == RESTART), launch
        printed = capfd.readouterr().err
        if expected.verb != RESTART:
            assert seen.code == expected.code, launch
            assert expected.why in printed


def run_command(monkeypatch, launch, launcher, folder, n_restarts, is_interrupted):
    """Run `hpcdist run`'s loop where the first launch ends so, and writes its decision; return what was seen."""
    launches_seen = []
    earlier = None
    if launch.earlier != "none":
        earlier = run.Decision(launch.earlier, "died by a signal or an error", (1, 1))

    def fake_launch(launcher, line, environ):
        launches_seen.append(line)
        if len(launches_seen) == 1:
            launch_code = launch.code
        else:
            launch_code = 2
        return launch_code, is_interrupted

    def read(path):
        if launches_seen and launch.decision != "none":
            return run.Decision(launch.decision, launch.reason, (2, 2))
        return earlier

    monkeypatch.setattr(run, "_launch", fake_launch)
    monkeypatch.setattr(run, "read_decision", read)
    run_folder = run.RunFolder(folder / "note", folder)
    code = run._run(launcher, ["program"], {}, "program", run_folder, n_restarts)
    return SimpleNamespace(code=code, launches=launches_seen)


def test_exit_codes_of_signals():
    assert [is_of_signal(code, "srun") for code in (9, 15, 75, 129, 143, 255)] == [False] * 3 + [True, True, False]
    assert [is_of_signal(code, "/opt/bin/mpirun") for code in (9, 15, 3, 75, 143)] == [True, True, False, False, True]


def test_the_codes_are_those_of_the_package():
    final = {ExitCode.USAGE, ExitCode.DO_NOT_REQUEUE, ExitCode.BAD_CONFIGURATION}
    assert set(map(int, final)) == set(FINAL_CODES)
    rule = hpcdist.restart_rule
    codes = (rule.RUN_AGAIN, rule.INTERNAL, rule.CHECKPOINT_IO, rule.DO_NOT_REQUEUE)
    assert codes == (ExitCode.RUN_AGAIN, ExitCode.INTERNAL, ExitCode.CHECKPOINT_IO, ExitCode.DO_NOT_REQUEUE)


def test_the_docs_show_the_table(root):
    table = re.findall(r"^\|.*\|$", hpcdist.restart_rule.__doc__, re.MULTILINE)
    assert len(table) > 10
    assert "\n".join(table) in (root / "docs" / "reference" / "restarts.md").read_text()


def test_one_file_is_the_rule_of_both(root):
    assert (root / "hpcdist" / "restart_rule.py").resolve() == root / "slurm" / "restart_rule.py"

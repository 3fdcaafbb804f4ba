"""What follows a launch of the recipes: every row of the table, and what launchers print."""

import itertools

import pytest
import rules
from rules import End, Ended, Requeue, action_after, failed_node, filled, has_died, is_of_signal, restart_nodes

CODES = (0, 1, 2, 70, 74, 75, 76, 78, 127, 134, 137, 143)
BOOLS = (False, True)


def all_ended():
    for code, earlier in itertools.product(CODES, ("none", "requeue", "stop", "finished")):
        yield Ended(code, "none", "", earlier, is_signalled=code > 128)
    for code, (decision, reason) in itertools.product(
        CODES, [("requeue", "died without notice"), ("requeue", "SIGTERM on rank 0"), ("stop", "why"), ("finished", "")]
    ):
        yield Ended(code, decision, reason, "none", code > 128)
    for code in CODES:
        yield Ended(code, "another", "8", "none", code > 128)


@pytest.mark.parametrize("is_preempted", BOOLS)
@pytest.mark.parametrize("is_out_of_time", BOOLS)
def test_rules_that_hold_for_every_end_of_a_launch(is_preempted, is_out_of_time):
    for ended in all_ended():
        action = action_after(ended, is_preempted, is_out_of_time)
        is_end = isinstance(action, End)
        if is_end:
            assert (action.code == 0) == (ended.code == 0 and ended.decision == "finished"), "0 means finished"
        if ended.code in (2, 76, 78):
            assert is_end, "the same command would end in the same way"
            assert action.code == ended.code
        elif ended.decision in ("stop", "another"):
            assert is_end
            assert action.code == 76
        elif ended.decision == "requeue":
            assert action == Requeue(ended.reason)
        elif ended.decision == "none" and not is_end and not action.is_early:
            assert is_preempted, "what is not bounded by a count is not this job's doing"
        assert action.why or ended.decision == "finished"


@pytest.mark.parametrize(
    ("ended", "facts", "expected"),
    [
        (Ended(1), {}, End(1, "exit code 1 before it had begun")),
        (Ended(0), {}, End(1, "exit code 0 before it had begun")),
        (Ended(127), {"is_preempted": True}, End(127, "exit code 127 before it had begun")),
        (Ended(137, is_signalled=True), {}, Requeue("died before it had begun", is_early=True)),
        (Ended(1, earlier="requeue"), {}, Requeue("died before it had begun", is_early=True)),
        (Ended(1, earlier="stop"), {}, End(1, "exit code 1 before it had begun")),
        (Ended(0), {"is_preempted": True, "is_out_of_time": True}, Requeue("preempted before it had begun")),
        (Ended(0), {"is_out_of_time": True}, Requeue("out of time before it had begun", is_early=True)),
        (Ended(143, "finished"), {}, End(143, "")),
    ],
)
def test_a_program_that_has_not_begun(ended, facts, expected):
    assert action_after(ended, **{"is_preempted": False, "is_out_of_time": False, **facts}) == expected


@pytest.mark.parametrize("code", CODES)
def test_what_counts_as_dying(code):
    may_die = code not in (2, 74, 75, 76, 78)
    assert has_died(Ended(code)) == has_died(Ended(code, "requeue", "died without notice")) == may_die
    for decision, reason in [("requeue", "SIGTERM on rank 0"), ("stop", "died"), ("finished", ""), ("another", "8")]:
        assert not has_died(Ended(code, decision, reason))


DIED, NOT_BEGUN = Ended(137, "requeue", "died without notice"), Ended(137)
N = ["n1", "n2", "n3"]


@pytest.mark.parametrize(
    ("ended", "nodes", "answering", "failed", "expected"),
    [
        (DIED, N, N, None, N),
        (DIED, N, ["n1", "n2"], None, ["n1", "n2"]),
        (DIED, N, ["n1", "n2"], "n2", ["n1", "n2"]),
        (DIED, N, N, "n2", ["n1", "n3"]),
        (DIED, ["n1"], ["n1"], "n1", ["n1"]),
        (DIED, N, [], None, None),
        (DIED, [], [], None, []),
        (NOT_BEGUN, N, N, "n2", None),
        (NOT_BEGUN, N, ["n1", "n2"], "n2", ["n1", "n2"]),
        (NOT_BEGUN, [], [], None, None),
        (Ended(75, "requeue", "SIGTERM on rank 0"), N, N, None, None),
    ],
)
def test_the_nodes_of_a_restart(ended, nodes, answering, failed, expected):
    assert restart_nodes(ended, nodes, answering, failed) == expected


MPICH = """
===================================================================================
=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES
=   PID 15521 RUNNING AT n2
=   EXIT CODE: {}
=   CLEANING UP REMAINING PROCESSES
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", None),
        ("epoch 1\nsrun: error: n2: task 1: Killed\nsrun: Terminating StepId=2.0\n", "n2"),
        ("srun: error: n2: tasks 0-1: Segmentation fault (core dumped)\n", "n2"),
        ("srun: error: n1: task 0: Exited with exit code 1\nsrun: error: n2: task 1: Killed\n", None),
        (MPICH.format(9), "n2"),
        (MPICH.format(9) + "srun: error: n1: task 0: Exited with exit code 7\n", "n2"),
        ("srun: error: n1: task 0: Exited with exit code 7\n" + MPICH.format(9), None),
        (MPICH.format(1), None),
        (MPICH.format(70), None),
        ("prterun noticed that process rank 1 with PID 1 on node n2 exited on signal 9 (Killed).\n", "n2"),
        ("prterun noticed that process rank 1 with PID 1 on node n2 exited on signal 15 (Terminated).\n", None),
    ],
)
def test_the_node_that_a_launcher_names(text, expected):
    assert failed_node(text) == expected


def test_exit_codes_of_signals():
    assert [is_of_signal(code, "srun") for code in (9, 15, 75, 129, 143)] == [False, False, False, True, True]
    assert [is_of_signal(code, "/opt/bin/mpirun") for code in (9, 15, 3, 75, 143)] == [True, True, False, False, True]


def test_placement_is_filled_in():
    command = ["run", "--on=%nodes", "%hosts", "-N%n_nodes", "%n_ranks", "%n_rank", "100%"]
    assert filled(command, "n1,n2", 2, 4) == ["run", "--on=n1,n2", "n1:4,n2:4", "-N2", "8", "%n_rank", "100%"]


def test_the_codes_are_those_of_the_package():
    from hpcdist.errors import ExitCode

    final = {ExitCode.USAGE, ExitCode.DO_NOT_REQUEUE, ExitCode.BAD_CONFIGURATION}
    assert {int(code) for code in final} == set(rules.FINAL_CODES)
    assert int(ExitCode.RUN_AGAIN) == rules.RUN_AGAIN

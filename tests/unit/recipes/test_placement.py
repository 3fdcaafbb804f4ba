"""The nodes of a restart, and what launchers print of the rank that failed first."""

import pytest
from placement import failed_node, filled, restart_nodes
from restart_rule import Launch

DIED = Launch(137, "requeue", "died by a signal or an error")
NOT_BEGUN = Launch(137)
N = ["n1", "n2", "n3"]


@pytest.mark.parametrize(
    ("launch", "nodes", "answering", "failed", "expected"),
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
    ],
)
def test_the_nodes_of_a_restart(launch, nodes, answering, failed, expected):
    assert restart_nodes(launch, nodes, answering, failed) == expected


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


def test_placement_is_filled_in():
    command = ["run", "--on=%nodes", "%hosts", "-N%n_nodes", "%n_ranks", "%n_rank", "100%"]
    assert filled(command, "n1,n2", 2, 4) == ["run", "--on=n1,n2", "n1:4,n2:4", "-N2", "8", "%n_rank", "100%"]

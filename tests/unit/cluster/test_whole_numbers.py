"""Numbers in texts of users and launchers: Python refuses to read thousands of digits, and no door passes that on."""

import pytest

from hpcdist.cli.launcher import request_here
from hpcdist.cli.run import n_ranks_on
from hpcdist.cluster.environment import (
    has_lost_launcher,
    is_child_of_rank,
    job_end,
    launcher_of,
    slurm_tasks,
    terminal_columns,
    torchrun_sizes,
)
from hpcdist.cluster.resolvers import parse_roles
from hpcdist.cluster.slurm import SlurmClusterResolver, parse_hostlist, parse_tasks_per_node
from hpcdist.cluster.spec import ClusterSpec
from hpcdist.cluster.tf_config import parse_tf_config
from hpcdist.errors import HpcdistError

DIGITS = "1" * 5000
STEP = {"SLURM_STEP_NODELIST": "n1", "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_PROCID": "0"}
REFUSING = {
    "roles": lambda: parse_roles(f"worker:{DIGITS}"),
    "hosts": lambda: n_ranks_on(f"n1:{DIGITS}"),
    "node list": lambda: parse_hostlist(f"n[1-{DIGITS}]"),
    "tasks of a node": lambda: parse_tasks_per_node(DIGITS),
    "times of a node": lambda: parse_tasks_per_node(f"1(x{DIGITS})"),
    "tasks of a step": lambda: SlurmClusterResolver(environ={**STEP, "SLURM_STEP_NUM_TASKS": DIGITS}),
    "index as text": lambda: ClusterSpec({"worker": {DIGITS: "a:1"}}),
    "index as a number": lambda: ClusterSpec({"worker": {10**9: "a:1"}}),
    "TF_CONFIG": lambda: parse_tf_config('{"cluster": {"worker": {"' + DIGITS + '": "a:1"}}}'),
}
TORCHRUN = {"TORCHELASTIC_RUN_ID": "a", "WORLD_SIZE": DIGITS, "LOCAL_WORLD_SIZE": "1"}
IGNORING = {
    "tasks": (lambda: slurm_tasks({"SLURM_NTASKS": DIGITS}), 0),
    "launcher": (lambda: launcher_of({"PMI_SIZE": DIGITS, "PMI_RANK": "0"}), None),
    "torchrun": (lambda: torchrun_sizes(TORCHRUN), None),
    "descriptor": (lambda: has_lost_launcher({"PMI_FD": DIGITS}), False),
    "rank's process": (lambda: is_child_of_rank({"HPCDIST_RANK_PROCESS": DIGITS}), False),
    "columns": (lambda: terminal_columns({"HPCDIST_TERMINAL_COLUMNS": DIGITS}), 0),
    "end of the job": (lambda: job_end({"SLURM_JOB_END_TIME": DIGITS}), None),
    "cores": (
        lambda: request_here(1, ["a"], {"SLURM_JOB_ID": "1", "SLURM_CPUS_PER_TASK": DIGITS}, "", True).cpus_per_task,
        0,
    ),
}


@pytest.mark.parametrize("read", REFUSING.values(), ids=REFUSING)
def test_what_a_person_writes_is_refused(read):
    with pytest.raises(HpcdistError, match="expected .*, got "):
        read()


@pytest.mark.parametrize(("read", "expected"), IGNORING.values(), ids=IGNORING)
def test_what_a_launcher_writes_says_nothing(read, expected):
    assert read() == expected

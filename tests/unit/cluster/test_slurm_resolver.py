import pytest

from hpcdist.cluster.slurm import SlurmClusterResolver, parse_hostlist, parse_tasks_per_node
from hpcdist.errors import ConfigurationError

STEP = {
    "SLURM_PROCID": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "n[09-10],login",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2),2",
}


@pytest.mark.feature(
    "launch.slurm-cluster-resolver",
    "slurm.host-lists",
    "semantics.slurm-resolver-details",
    "complaints.host-lists-and-addresses",
)
@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", "n1"),
        ("n[1-3]", "n1 n2 n3"),
        ("n[08-11]", "n08 n09 n10 n11"),
        ("n[1,3-4,7]x", "n1x n3x n4x n7x"),
        ("b[1-2],a", "b1 b2 a"),
        ("r[1-2]n[01-02]", "r1n01 r1n02 r2n01 r2n02"),
        ("a-b[1-2].c,d", "a-b1.c a-b2.c d"),
    ],
)
def test_host_lists(text, hosts):
    assert parse_hostlist(text) == hosts.split()


@pytest.mark.feature("slurm.host-lists")
@pytest.mark.parametrize("text", ["", "n[1-2", "n[2-1]", "n[a-b]", "n 1", "n[]", "n]1["])
def test_refuses_host_lists(text):
    with pytest.raises(ConfigurationError, match="slurm: expected"):
        parse_hostlist(text)


@pytest.mark.feature("launch.slurm-cluster-resolver", "semantics.slurm-resolver-rules")
def test_tasks_per_node():
    assert parse_tasks_per_node("3(x2),2") == [3, 3, 2]
    with pytest.raises(ConfigurationError, match="3\\(x2\\),2"):
        parse_tasks_per_node("3x2")


@pytest.mark.feature(
    "launch.slurm-cluster-resolver", "semantics.slurm-resolver-rules", "semantics.slurm-resolver-details"
)
def test_step():
    resolver = SlurmClusterResolver({"worker": 3, "chief": 1}, environ=STEP)
    assert resolver.cluster_spec().as_dict() == {
        "chief": ["n09:8888"],
        "worker": ["n10:8888", "login:8888", "login:8889"],
    }
    assert resolver.get_task_info() == ("worker", 1)


@pytest.mark.feature("launch.slurm-cluster-resolver", "semantics.slurm-resolver-details")
def test_every_rank_a_worker_by_default():
    assert SlurmClusterResolver(environ=STEP).cluster_spec().num_tasks("worker") == 4


@pytest.mark.feature("launch.slurm-cluster-resolver", "semantics.slurm-resolver-rules")
@pytest.mark.parametrize(
    ("changes", "jobs", "expected"),
    [
        ({}, {"worker": 5}, "got 5 in jobs"),
        ({"SLURM_STEP_TASKS_PER_NODE": "1(x3)"}, None, "3 on the nodes"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x2)"}, None, "for 3 hosts, got 2"),
        ({"SLURM_STEP_NODELIST": ""}, None, "SLURM_STEP_NODELIST in the environment"),
        ({"SLURM_PROCID": "4"}, None, "SLURM_PROCID below 4"),
        ({"SLURM_STEP_NUM_TASKS": "many"}, None, "whole number"),
    ],
)
def test_refuses(changes, jobs, expected):
    with pytest.raises(ConfigurationError) as caught:
        SlurmClusterResolver(jobs, environ={**STEP, **changes})
    assert expected in str(caught.value)


@pytest.mark.feature("launch.slurm-cluster-resolver", "semantics.slurm-resolver-rules")
def test_gpus_of_a_task(monkeypatch):
    """The arguments in TensorFlow's order; a node's GPUs are divided by the tasks of the fullest node."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    assert SlurmClusterResolver(None, 8888, None, 2, None, False, environ=STEP).num_accelerators() == {"GPU": 2}
    assert SlurmClusterResolver(gpus_per_node=4, environ=STEP).num_accelerators() == {"GPU": 2}
    assert SlurmClusterResolver(gpus_per_task=0, environ=STEP).num_accelerators() == {}
    assert SlurmClusterResolver(environ=STEP).num_accelerators() == {"GPU": 3}
    assert SlurmClusterResolver(environ=STEP).master() == "grpc://login:8888"
    assert SlurmClusterResolver(environ=STEP, rpc_layer=None).master() == "login:8888"

import pytest

from hpcdist.cluster.spec import ClusterSpec, Task
from hpcdist.errors import ConfigurationError


@pytest.mark.feature("launch.chief-rules", "launch.cluster-spec")
def test_answers_by_type():
    spec = ClusterSpec({"ps": ["p:1"], "worker": ["a:1", "b:1"], "chief": ["c:1"]})
    assert spec.jobs == ["chief", "worker", "ps"]
    assert spec.as_dict() == {"chief": ["c:1"], "worker": ["a:1", "b:1"], "ps": ["p:1"]}
    assert spec.num_tasks("worker") == 2
    assert spec.has_tasks("worker")
    assert not spec.has_tasks("evaluator")
    with pytest.raises(ValueError, match="task.*type"):
        spec.num_tasks("evaluator")
    assert ClusterSpec(spec) == spec
    assert spec.task_address("worker", 1) == "b:1"
    assert list(spec.tasks()) == [Task("chief", 0), Task("worker", 0), Task("worker", 1), Task("ps", 0)]
    assert spec.chief == Task("chief", 0)
    assert ClusterSpec({"worker": ["a:1"]}).chief == Task("worker", 0)


@pytest.mark.feature("launch.cluster-spec")
def test_indices_may_be_left_out():
    spec = ClusterSpec({"worker": {3: "d:1", "1": "b:1"}, "ps": {0: "p:1"}})
    assert spec.as_dict() == {"worker": {1: "b:1", 3: "d:1"}, "ps": ["p:1"]}
    assert spec.task_indices("worker") == [1, 3]
    assert spec.num_tasks("worker") == 2
    assert spec.job_tasks("worker") == [None, "b:1", None, "d:1"]
    assert spec.task_address("worker", 3) == "d:1"
    assert list(spec.tasks()) == [Task("worker", 1), Task("worker", 3), Task("ps", 0)]
    assert spec.chief == Task("worker", 1)
    assert ClusterSpec(spec) == spec
    with pytest.raises(ConfigurationError, match="worker.*index.*1.*3.*0"):
        spec.task_address("worker", 0)


def test_is_frozen_and_equal_by_value():
    spec = ClusterSpec({"worker": ["a:1"]})
    assert spec == ClusterSpec({"worker": ["a:1"]})
    assert hash(spec) == hash(ClusterSpec({"worker": ["a:1"]}))
    with pytest.raises(AttributeError):
        spec._jobs = ()
    spec.as_dict()["worker"].append("b:1")
    assert spec.num_tasks("worker") == 1


@pytest.mark.feature("launch.chief-rules")
@pytest.mark.parametrize(
    ("jobs", "text"),
    [
        ({"master": ["a:1"]}, "got 'master'"),
        ({"chief": ["a:1", "b:1"]}, "at most one chief, got 2"),
        ({"worker": ["w:1"], "evaluator": ["a:1", "b:1"]}, "at most one evaluator, got 2"),
        ({"worker": "a:1"}, "list of addresses"),
        ({"worker": {"first": "a:1"}}, "got 'first'"),
        ({"worker": {-1: "a:1"}}, "got -1"),
        ({"worker": {0: "a:1", 2: "a:1"}}, "'a:1' 2 times"),
        ({"worker": {"1": "a:1", "01": "b:1"}}, "every index once in cluster.worker, got 1 2 times"),
        ({"worker": {1: "a:1", "1": "b:1"}}, "got 1 2 times"),
        ({"worker": 3}, "list of addresses"),
        ({"worker": [""]}, "got ''"),
        ({"worker": [None]}, "got None"),
        ({"worker": ["a:1", "a:1"]}, "'a:1' 2 times"),
        ({"worker": ["a:1"], "ps": ["a:1"]}, "'a:1' 2 times"),
    ],
)
def test_refuses(jobs, text):
    with pytest.raises(ConfigurationError, match="expected") as caught:
        ClusterSpec(jobs)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("type_", "index"), [("boss", 0), ("worker", -1), ("worker", "0"), ("worker", True)])
def test_refuses_what_is_no_task(type_, index):
    with pytest.raises(ConfigurationError, match="task.*type"):
        Task(type_, index)


@pytest.mark.feature("launch.cluster-spec", "semantics.worker-numbers")
def test_refuses_a_task_it_does_not_have():
    spec = ClusterSpec({"worker": ["a:1"]})
    with pytest.raises(ConfigurationError, match="0.*0.*1"):
        spec.task_address("worker", 1)
    with pytest.raises(ConfigurationError, match="got 'ps'"):
        spec.job_tasks("ps")

import json

import pytest

from hpcdist.cluster.spec import Task
from hpcdist.cluster.tf_config import TFConfigClusterResolver, parse_tf_config
from hpcdist.errors import ConfigurationError

CLUSTER = {"chief": ["h0:1"], "worker": ["h1:1", "h2:1"]}


def resolver(config, **arguments):
    return TFConfigClusterResolver(environ={"TF_CONFIG": json.dumps(config)}, **arguments)


@pytest.mark.feature("launch.tf-config")
def test_reads_cluster_and_task():
    cluster_resolver = resolver({"cluster": CLUSTER, "task": {"type": "worker", "index": 1}})
    assert cluster_resolver.cluster_spec().as_dict() == CLUSTER
    assert (cluster_resolver.task_type, cluster_resolver.task_id) == ("worker", 1)
    assert cluster_resolver.resolve(0, 3) == (cluster_resolver.cluster_spec(), Task("worker", 1))


@pytest.mark.feature("launch.tf-config", "launch.cluster-spec")
def test_an_index_may_be_text():
    cluster_resolver = resolver({"cluster": CLUSTER, "task": {"type": "worker", "index": "1"}})
    assert cluster_resolver.task_id == 1
    assert cluster_resolver.cluster_spec().task_indices("worker") == [0, 1]


@pytest.mark.feature("semantics.tf-config-resolver-rules")
def test_master_is_the_address_of_a_task():
    cluster_resolver = resolver({"cluster": CLUSTER, "task": {"type": "worker", "index": 1}})
    assert (cluster_resolver.master(), cluster_resolver.master(rpc_layer="grpc")) == ("h2:1", "grpc://h2:1")
    assert cluster_resolver.master("chief", 0) == "h0:1"
    assert resolver({"cluster": CLUSTER}).master() == ""
    assert TFConfigClusterResolver("worker", 1, environ={}).master() == ""
    with pytest.raises(ConfigurationError, match="0.*1.*2"):
        cluster_resolver.master("worker", 2)


@pytest.mark.feature("semantics.tf-config-resolver-rules")
def test_constructor_overrides_the_task():
    cluster_resolver = resolver(
        {"cluster": CLUSTER, "task": {"type": "worker", "index": 1}}, task_type="chief", task_id=0
    )
    assert (cluster_resolver.task_type, cluster_resolver.task_id) == ("chief", 0)
    wrong = resolver({"cluster": CLUSTER}, task_type="worker", task_id=7)
    with pytest.raises(ConfigurationError, match="0.*1.*7"):
        wrong.cluster_spec()


@pytest.mark.feature("launch.tf-config", "semantics.tf-config-resolver-rules")
def test_the_variable_is_read_when_a_property_is_asked_for(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    cluster_resolver = TFConfigClusterResolver()
    assert not cluster_resolver.cluster_spec()
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": CLUSTER, "task": {"type": "worker", "index": 1}}))
    assert (cluster_resolver.task_type, cluster_resolver.task_id) == ("worker", 1)
    assert cluster_resolver.cluster_spec().as_dict() == CLUSTER


@pytest.mark.feature("launch.tf-config")
def test_an_evaluator_need_not_be_listed():
    cluster = {"worker": ["a:1", "b:1"]}
    spec, task = parse_tf_config(json.dumps({"cluster": cluster, "task": {"type": "evaluator", "index": 0}}))
    assert spec.as_dict() == cluster
    assert str(task) == "evaluator 0"
    assert resolver({"cluster": cluster}, task_type="evaluator", task_id=0).task_type == "evaluator"
    with pytest.raises(ConfigurationError):
        parse_tf_config(json.dumps({"cluster": cluster, "task": {"type": "evaluator", "index": 1}}))


@pytest.mark.feature("launch.tf-config", "semantics.tf-config-resolver-rules")
@pytest.mark.parametrize("text", ["", "{}"])
def test_nothing_means_no_cluster(text):
    spec, task = parse_tf_config(text)
    assert not spec
    assert task is None


def test_without_task_the_rank_decides():
    assert resolver({"cluster": CLUSTER}).task_type is None


@pytest.mark.feature("semantics.tf-config-resolver-rules")
def test_the_arguments_that_tensorflow_s_resolver_takes():
    assert TFConfigClusterResolver("worker", 1, rpc_layer="grpc", environment="", environ={}).task_id == 1


def test_host_names_that_tell_tasks_apart():
    assert resolver({"cluster": CLUSTER}).host_names["h2"] == Task("worker", 1)
    assert resolver({"cluster": {"worker": ["localhost:1", "localhost:2"]}}).host_names == {}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{", "JSON"),
        ("[1]", "JSON object"),
        ('{"cluster": {"chief": ["a:1"], "chief": ["b:1"]}}', "'chief' twice"),
        ("3", "JSON object"),
        ('{"task": {"type": "worker", "index": 0}}', '"cluster" as an object'),
        ('{"cluster": {}}', '"cluster" as an object'),
        ('{"cluster": {"worker": []}}', '"cluster" as an object'),
        ('{"cluster": ["a:1"]}', '"cluster" as an object'),
        ('{"clutser": {"worker": ["a:1"]}}', "'clutser'"),
        ('{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker"}}', "'index' as a whole number"),
        ('{"cluster": {"worker": ["a:1"]}, "task": {"index": 0}}', "'type' as text"),
        ('{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": "x"}}', "got 'x'"),
        ('{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": true}}', "got True"),
        ('{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "indx": 0}}', "got 'indx'; write 'index'"),
        ("[" * 20_000, "nested too deeply"),
        ('{"cluster": ' + "1" * 5000 + "}", "JSON object"),
        (
            '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": "' + "1" * 5000 + '"}}',
            "'index' as a whole number",
        ),
        ('{"cluster": {"worker": {"' + "1" * 5000 + '": "a:1"}}}', "expected indices from 0"),
        ('{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 1}}', "from 0 to 0, got 1"),
        ('{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": -1}}', "got 'worker' -1"),
        ('{"cluster": {"worker": ["a:1"]}, "task": {"type": "ps", "index": 0}}', "got 'ps'"),
        ('{"cluster": {"boss": ["a:1"]}}', "got 'boss'"),
    ],
)
def test_refuses(text, expected):
    with pytest.raises(ConfigurationError) as caught:
        parse_tf_config(text)
    assert expected in str(caught.value)
    assert "expected" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_tensorflow_ignores_is_warned_of(caplog):
    text = '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0, "trial": "1"}, "job": {}}'
    spec, task = parse_tf_config(text)
    assert (spec.num_tasks("worker"), task) == (1, Task("worker", 0))
    assert "got 'job', which is ignored" in caplog.text
    assert "got 'trial', which is ignored" in caplog.text


def test_the_error_of_a_repeated_key_is_the_whole_text():
    with pytest.raises(ConfigurationError, match=r"^TF_CONFIG: expected every key once, got 'a' twice; keep one\.$"):
        parse_tf_config('{"a": 1, "a": 2}')

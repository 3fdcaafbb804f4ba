import json
import os

import pytest

import hpcdist
from hpcdist.cluster.environment import visible_gpus
from hpcdist.errors import ConfigurationError, UsageError


def make_simple(jobs, type_=None, index=None):
    return hpcdist.SimpleClusterResolver(hpcdist.ClusterSpec(jobs), type_, index, rpc_layer="grpc")


def test_clusters_are_joined():
    first = make_simple({"worker": ["a", "b"]})
    second = make_simple({"worker": ["b", "c"], "ps": ["d"]}, "worker", 1)
    union = hpcdist.UnionResolver(first, second)
    joined, task = union.resolve(0, 1)
    assert joined.as_dict() == union.cluster_spec().as_dict() == {"worker": ["a", "b", "c"], "ps": ["d"]}
    assert task == hpcdist.Task("worker", 2)
    assert (union.task_type, union.task_id) == ("worker", 2)


def test_the_first_task_known_is_this_process_s():
    environ = {"TF_CONFIG": json.dumps({"cluster": {"worker": ["a", "b"]}, "task": {"type": "worker", "index": 1}})}
    from_environ = hpcdist.TFConfigClusterResolver(environ=environ)
    union = hpcdist.UnionResolver(from_environ, make_simple({"ps": ["c"]}, "ps", 0))
    assert (union.task_type, union.task_id) == ("worker", 1)
    nobody = hpcdist.UnionResolver(make_simple({"worker": ["a"]}))
    assert (nobody.task_type, nobody.task_id, nobody.resolve(0, 1)[1]) == (None, None, None)


def test_a_union_keeps_indices_where_some_are_left_out():
    sparse = make_simple({"worker": {2: "c"}}, "worker", 2)
    union = hpcdist.UnionResolver(sparse, make_simple({"worker": ["a", "b"]}))
    assert union.cluster_spec().as_dict() == {"worker": ["a", "b", "c"]}
    assert (union.task_type, union.task_id) == ("worker", 2)
    with pytest.raises(ConfigurationError, match="address.*worker.*2.*'c'.*'d'"):
        hpcdist.UnionResolver(sparse, make_simple({"worker": {2: "d", 4: "e"}})).cluster_spec()


@pytest.mark.parametrize("resolvers", [(), (1,), (make_simple({}), "worker")])
def test_what_is_no_resolver_is_refused(resolvers):
    with pytest.raises(UsageError, match="UnionResolver.*cluster.*resolvers"):
        hpcdist.UnionResolver(*resolvers)


@pytest.mark.parametrize("tpu", [None, "", "local", "my-tpu"])
def test_a_tpu_makes_every_rank_a_worker(tpu):
    resolver = hpcdist.TPUClusterResolver(tpu, zone="here", project="ours")
    assert resolver.master() == (tpu or "local")
    assert resolver.cluster_spec().as_dict() == {"worker": ["rank-0"]}
    assert resolver.resolve(1, 2)[1] is None
    assert resolver.task_type is None


def test_a_tpu_s_address_is_taken_for_the_local_one_with_a_warning(caplog):
    resolver = hpcdist.TPUClusterResolver(tpu="grpc://10.0.0.1:8470")
    assert "got the address 'grpc://10.0.0.1:8470'" in caplog.text
    assert resolver.cluster_spec().as_dict() == {"worker": ["rank-0"]}
    with pytest.raises(ConfigurationError, match="job_name.*'worker'.*'tpu_worker'"):
        hpcdist.TPUClusterResolver(job_name="tpu_worker")


def test_addresses_come_with_the_layer_and_accelerators_as_given():
    spec = hpcdist.SimpleClusterResolver(
        hpcdist.ClusterSpec({"worker": ["a:1"]}), "worker", 0, rpc_layer="grpc", num_accelerators={"GPU": 3}
    )
    assert spec.master() == "grpc://a:1"
    assert spec.master(rpc_layer="http") == "http://a:1"
    assert spec.num_accelerators() == {"GPU": 3}
    n_gpus = visible_gpus(os.environ)
    accelerators = hpcdist.SimpleClusterResolver(hpcdist.ClusterSpec({})).num_accelerators()
    if n_gpus:
        expected = {"GPU": n_gpus}
    else:
        expected = {}
    assert accelerators == expected

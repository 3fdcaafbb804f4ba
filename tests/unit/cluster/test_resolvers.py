import json

import pytest

import hpcdist
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


@pytest.mark.parametrize("resolvers", [(), (1,), (make_simple({}), "worker")])
def test_what_is_no_resolver_is_refused(resolvers):
    with pytest.raises(UsageError, match="UnionResolver: expected cluster resolvers"):
        hpcdist.UnionResolver(*resolvers)


@pytest.mark.parametrize("tpu", [None, "", "local", "my-tpu"])
def test_a_tpu_makes_every_rank_a_worker(tpu):
    resolver = hpcdist.TPUClusterResolver(tpu, zone="here", project="ours")
    assert resolver.master() == (tpu or "local")
    assert not resolver.cluster_spec()
    assert resolver.resolve(1, 2)[1] is None
    assert resolver.task_type is None


def test_a_tpu_elsewhere_is_refused():
    with pytest.raises(
        ConfigurationError, match="got the address 'grpc://10.0.0.1:8470'; start the ranks on the hosts"
    ):
        hpcdist.TPUClusterResolver(tpu="grpc://10.0.0.1:8470")
    with pytest.raises(ConfigurationError, match="expected job_name 'worker', got 'tpu_worker'"):
        hpcdist.TPUClusterResolver(job_name="tpu_worker")

import pytest

from hpcdist.cluster.resolvers import MPIClusterResolver, parse_roles, spec_of_tasks, tasks_of_roles
from hpcdist.cluster.spec import Task
from hpcdist.errors import ConfigurationError


@pytest.mark.feature("launch.roles-from-ranks")
def test_map_is_given_to_ranks_in_its_order():
    tasks = tasks_of_roles(parse_roles("chief:1,ps:2, evaluator:1 ,worker:*"), 7)
    names = ["chief 0", "ps 0", "ps 1", "evaluator 0", "worker 0", "worker 1", "worker 2"]
    assert list(map(str, tasks)) == names
    assert spec_of_tasks(tasks).as_dict()["ps"] == ["rank-1", "rank-2"]


@pytest.mark.feature("launch.roles-from-ranks")
def test_star_may_stand_anywhere():
    assert tasks_of_roles(parse_roles("worker:*,ps:1"), 3) == [Task("worker", 0), Task("worker", 1), Task("ps", 0)]


@pytest.mark.parametrize(
    "text",
    ["", "worker", "boss:1", "worker:0", "worker:-1", "worker:x", "worker:*,ps:*", "chief:2", "chief:*", "ps:1,ps:1"],
)
def test_refuses(text):
    with pytest.raises(ConfigurationError, match="roles: expected"):
        parse_roles(text)


@pytest.mark.parametrize(
    ("text", "size", "wanted"),
    [("chief:1,worker:*", 1, "at least 2"), ("worker:2", 3, "exactly 2"), ("chief:1,ps:2", 2, "exactly 3")],
)
def test_refuses_another_number_of_ranks(text, size, wanted):
    with pytest.raises(ConfigurationError, match=f"expected {wanted} ranks .* got {size}"):
        tasks_of_roles(parse_roles(text), size)


@pytest.mark.feature("launch.mpi-cluster-resolver")
def test_resolver_asks_the_launcher_when_it_has_no_communicator():
    environ = {"PMI_SIZE": "3", "PMI_RANK": "2", "HPCDIST_ROLES": "chief:1,worker:*"}
    resolver = MPIClusterResolver(environ=environ)
    assert (resolver.task_type, resolver.task_id) == ("worker", 1)
    assert resolver.cluster_spec().num_tasks("worker") == 2


@pytest.mark.feature("launch.mpi-cluster-resolver")
def test_resolver_alone_is_one_worker():
    resolver = MPIClusterResolver(environ={})
    assert (resolver.task_type, resolver.task_id) == ("worker", 0)

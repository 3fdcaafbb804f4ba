import contextlib
import gc
import json
import mmap
import os

import numpy as np
import pytest
from mpi4py import MPI

from hpcdist.cluster.resolvers import MPIClusterResolver
from hpcdist.cluster.spec import Task
from hpcdist.cluster.tf_config import TFConfigClusterResolver
from hpcdist.errors import CheckpointError, CollectiveTimeoutError, ConfigurationError, DataError
from hpcdist.runtime.mpich_shm import remove_stale
from hpcdist.runtime.process import make_world
from hpcdist.runtime.world import World

pytestmark = [pytest.mark.mpi, pytest.mark.core]


@pytest.fixture
def world():
    created_worlds = []

    def make(resolver=None):
        created_worlds.append(World(resolver))
        return created_worlds[-1]

    yield make
    for created_world in created_worlds:
        created_world.free()


def tf_config(cluster, task=None):
    if task is None:
        config = {"cluster": cluster}
    else:
        config = {"cluster": cluster, "task": task}
    return TFConfigClusterResolver(environ={"TF_CONFIG": json.dumps(config)})


@pytest.mark.feature(
    "launch.roles-from-ranks",
    "launch.mpi-cluster-resolver",
    "launch.ranks-within-and-between-hosts",
    "semantics.multi-worker-without-a-cluster",
)
def test_every_rank_a_worker_by_default(world, comm):
    new_world = world()
    assert (new_world.rank, new_world.size) == (comm.rank, comm.size)
    assert new_world.task == Task("worker", comm.rank)
    assert new_world.is_chief == (comm.rank == 0)
    assert (new_world.role_comm.rank, new_world.role_comm.size) == (comm.rank, comm.size)
    assert str(new_world) == f"rank {comm.rank} (worker {comm.rank})"
    assert new_world.cluster_resolver.task_id == comm.rank


@pytest.mark.feature("launch.mpi-cluster-resolver", "launch.ranks-within-and-between-hosts", "launch.own-communicators")
def test_communicators_are_its_own(world):
    new_world = world()
    for communicator in (new_world.comm, new_world.role_comm, new_world.node_comm, new_world.hosts.lane_comm):
        assert MPI.Comm.Compare(communicator, MPI.COMM_WORLD) != MPI.IDENT
    assert new_world.node_comm.size * new_world.hosts.lane_comm.size >= new_world.role_comm.size
    assert new_world.hosts.lane_comm.size == new_world.n_hosts == 1
    assert new_world.cores_per_rank >= 1


@pytest.mark.feature("launch.chief-rules")
@pytest.mark.parametrize("order", ["chief:1,worker:*", "worker:*,chief:1"])
def test_chief_comes_first_in_the_worker_group(world, comm, order):
    if comm.size == 1:
        pytest.skip("a chief and a worker need two ranks")
    new_world = world(MPIClusterResolver(order))
    if order.startswith("chief"):
        chief_rank = 0
    else:
        chief_rank = comm.size - 1
    assert new_world.is_chief == (comm.rank == chief_rank)
    assert (new_world.role_comm.rank == 0) == new_world.is_chief
    assert new_world.role_comm.size == comm.size


@pytest.mark.feature("launch.roles-from-ranks")
def test_roles_have_groups_of_their_own(world, comm):
    if comm.size < 4:
        pytest.skip("four roles need four ranks")
    new_world = world(MPIClusterResolver("chief:1,ps:1,evaluator:1,worker:*"))
    sizes = {"chief": comm.size - 2, "worker": comm.size - 2, "ps": 1, "evaluator": 1}
    assert new_world.role_comm.size == sizes[new_world.task.type]
    assert comm.allgather(new_world.is_chief).count(True) == 1


def test_tf_config_with_a_task_per_rank(world, comm):
    addresses = [f"localhost:{port}" for port in range(comm.size)]
    new_world = world(tf_config({"worker": addresses}, {"type": "worker", "index": comm.size - 1 - comm.rank}))
    assert new_world.task.index == new_world.role_comm.rank == comm.size - 1 - comm.rank
    assert new_world.is_chief == (comm.rank == comm.size - 1)


def test_tf_config_without_task_the_rank_decides(world, comm):
    new_world = world(tf_config({"worker": [f"localhost:{port}" for port in range(comm.size)]}))
    assert new_world.task == Task("worker", comm.rank)


@pytest.mark.feature("complaints.host-lists-and-addresses")
def test_one_tf_config_worker_owns_the_ranks_of_its_host(world, comm):
    new_world = world(tf_config({"worker": ["here:1"]}, {"type": "worker", "index": 0}))
    assert new_world.task == Task("worker", 0)
    assert new_world.role_comm.size == comm.size
    assert comm.allgather(new_world.is_chief) == [True] + [False] * (comm.size - 1)


def raised_everywhere(comm, act, kind):
    """Return the text that act() raises on every rank alike."""
    with pytest.raises(kind) as caught:
        act()
    texts = comm.allgather(str(caught.value))
    assert len(set(texts)) == 1, texts
    assert "\n" not in texts[0]
    assert caught.value.is_agreed
    return texts[0]


def test_too_many_entries(comm):
    resolver = tf_config({"worker": [f"localhost:{port}" for port in range(comm.size + 1)]})
    text = raised_everywhere(comm, lambda: World(resolver), ConfigurationError)
    assert f"expected {comm.size + 1} ranks" in text


def test_roles_that_need_more_ranks(comm):
    resolver = MPIClusterResolver("chief:1,ps:9,worker:*")
    text = raised_everywhere(comm, lambda: World(resolver), ConfigurationError)
    assert f"at least 11 ranks for chief:1,ps:9,worker:*, got {comm.size}" in text


def test_the_same_task_on_every_rank(comm):
    if comm.size == 1:
        pytest.skip("one rank cannot repeat a task")
    resolver = tf_config({"worker": [f"h:{port}" for port in range(comm.size)]}, {"type": "worker", "index": 0})
    assert 'drop "task"' in raised_everywhere(comm, lambda: World(resolver), ConfigurationError)


def test_another_cluster_on_one_rank(comm):
    if comm.size == 1:
        pytest.skip("one rank cannot differ")
    last = comm.rank == comm.size - 1
    resolver = tf_config({"worker": [f"{'x' if last else 'h'}:{port}" for port in range(comm.size)]})
    text = raised_everywhere(comm, lambda: World(resolver), ConfigurationError)
    assert "expected the cluster of rank 0" in text
    assert f"[rank {comm.size - 1}]" in text


def test_what_is_the_same_on_all_ranks_is_accepted(world):
    new_world = world()
    new_world.require_same("a model", new_world.comm, lambda roots: DataError(f"not {roots}"))


def test_what_differs_is_explained_alike_on_all_ranks(world, comm):
    if comm.size == 1:
        pytest.skip("one rank cannot differ")
    new_world = world()
    if comm.rank == comm.size - 1:
        model_name = "another model"
    else:
        model_name = "a model"
    with pytest.raises(DataError) as caught:
        new_world.require_same(
            model_name, new_world.comm, lambda roots: DataError(f"expected {roots}, got {model_name}")
        )
    assert caught.value.is_agreed
    assert set(comm.allgather(str(caught.value).partition(" [")[0])) == {"expected a model, got another model"}


def test_agreeing_on_nothing_returns(world):
    world().agree(None)


@pytest.mark.parametrize("kind", [DataError, CheckpointError])
def test_agreeing_names_the_lowest_failing_rank(world, comm, kind):
    new_world = world()
    failing = comm.rank >= comm.size // 2
    if failing:
        error = kind(f"x: expected 1, got {comm.rank}; do y.")
    else:
        error = None
    text = raised_everywhere(comm, lambda: new_world.agree(error), kind)
    assert f"got {comm.size // 2};" in text
    n_more = comm.size - comm.size // 2 - 1
    if comm.size > 1:
        assert text.endswith(
            f"[rank {comm.size // 2} (worker {comm.size // 2})" + (f" and {n_more} more]" if n_more else "]")
        )


@pytest.mark.feature("complaints.hang-at-the-start")
def test_a_rank_that_does_not_come_is_waited_for_only_so_long(world, comm):
    new_world = world()
    new_world.timeout_s = 0.2
    if comm.rank == 0:
        request = new_world.comm.Ibarrier()
    else:
        request = None
    if comm.size > 1 and comm.rank == 0:
        with pytest.raises(CollectiveTimeoutError, match=r"0.2.*HPCDIST_TIMEOUT_S"):
            new_world.wait(request)
    comm.Barrier()
    new_world.timeout_s = 30
    new_world.wait(request or new_world.comm.Ibarrier())


def test_a_rank_that_comes_too_late_writes_to_no_memory_of_ranks_that_went_on(world, comm):
    new_world = world()
    later_arrays = []
    if comm.size > 1 and comm.rank == 0:
        new_world.timeout_s = 0.1
        with pytest.raises(CollectiveTimeoutError):
            new_world.all_reduce_int(3, MPI.MAX, new_world.comm)
        gc.collect()
        later_arrays = [np.array([-7]) for _ in range(100)]
    comm.Barrier()
    if comm.rank > 0:
        new_world.all_reduce_int(4, MPI.MAX, new_world.comm)
    new_world.timeout_s = 30
    new_world.wait(new_world.comm.Ibarrier())
    assert [int(array[0]) for array in later_arrays] == [-7] * len(later_arrays)


def test_the_process_wide_world_is_made_once():
    assert make_world() is make_world()


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no /dev/shm")
def test_segments_that_a_killed_start_left_are_swept_when_they_are_old_and_nobody_has_them(comm):
    names = {kind: f"/dev/shm/mpich_shm_test{os.getpid()}{kind}_0" for kind in ("old", "young", "open")}
    try:
        for kind, name in names.items():
            with open(name, "wb") as file:
                file.write(bytes(mmap.PAGESIZE))
            if kind != "young":
                os.utime(name, (0, 0))
        with open(names["open"], "r+b") as file, mmap.mmap(file.fileno(), 0):
            comm.Barrier()  # every rank has made its own; all sweep at once
            remove_stale()
            comm.Barrier()
            assert {kind for kind, name in names.items() if os.path.exists(name)} == {"young", "open"}
            comm.Barrier()
    finally:
        for name in names.values():
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)

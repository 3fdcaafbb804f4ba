"""The one function that decides which algorithm sums a buffer: its table, and that all that it depends on is given."""

import itertools

import numpy as np
import pytest

from hpcdist.collectives.gpu import nccl
from hpcdist.collectives.ops import MEAN, OPS, SUM
from hpcdist.collectives.options import AllReduceAlgorithm, CommunicationOptions
from hpcdist.collectives.options import CommunicationImplementation as Implementation
from hpcdist.collectives.route import (
    LANE_BYTES,
    NCCL_DTYPES,
    NCCL_OPS,
    SMALLEST_BYTES,
    GroupFacts,
    Route,
    auto_routes,
    candidates,
    choose_route,
    goes_by_halving,
    is_clearly_faster,
)
from hpcdist.plan.placement import Placement
from hpcdist.plan.replicas import ReplicaPlan

ONE_HOST = Placement(((0, 1, 2, 3),))
TWO_HOSTS = Placement(((0, 1), (2, 3)))
UNEVEN = Placement(((0, 1, 2), (3,)))
TABLE = ((4096, Implementation.MPI), (65536, Implementation.SHARED_MEMORY))


class Own(AllReduceAlgorithm):
    def all_reduce(self, array, comm, op):
        raise AssertionError("nothing is summed here")


class Named(Own):
    stands_for = Implementation.RING


def route(placement=ONE_HOST, implementation="AUTO", nbytes=1 << 20, **more):
    facts = {}
    for name in ("can_share_memory", "has_nccl", "table"):
        if name in more:
            facts[name] = more.pop(name)
    options = {name: more.pop(name) for name in ("is_ordered", "wire_dtype") if name in more}
    facts = GroupFacts(placement, **{"can_share_memory": True, "table": TABLE, **facts})
    buffer_arguments = {"op": SUM, "nbytes": nbytes, **more}
    return choose_route(facts, CommunicationOptions(implementation=implementation, **options), **buffer_arguments)


def gradients(placement=ONE_HOST, implementation="AUTO", n_replicas=4, **more):
    return route(placement, implementation, replicas=ReplicaPlan(n_replicas, placement.size), **more)


@pytest.mark.parametrize(
    "implementation",
    [algorithm for algorithm in Implementation if algorithm not in (Implementation.AUTO, Implementation.NCCL)],
)
def test_what_is_asked_for_by_name_is_taken(implementation):
    for placement in (ONE_HOST, TWO_HOSTS, UNEVEN):
        assert route(placement, implementation).algorithm is implementation
        assert gradients(placement, implementation).algorithm is implementation
        assert not route(placement, implementation).is_on_device


class OwnAfterAll(Named):
    def all_reduce(self, array, comm, op):
        raise AssertionError("nothing is summed here")


def test_a_subclass_of_a_name_with_an_all_reduce_of_its_own_is_called():
    custom_algorithm = OwnAfterAll()
    assert route(implementation=custom_algorithm).algorithm is custom_algorithm
    assert gradients(implementation=custom_algorithm).algorithm is custom_algorithm


@pytest.mark.feature("semantics.transport-of-gradients")
def test_nccl_is_chosen_for_exactly_what_it_can_carry():
    assert set(NCCL_DTYPES) == set(nccl.DTYPES)
    assert set(NCCL_OPS) == set(nccl.OPS)


@pytest.mark.feature("collectives.communication-hook")
@pytest.mark.parametrize("given", [Own(), Named()])
def test_an_algorithm_of_the_users_own(given):
    chosen = given.stands_for or given
    assert route(implementation=given).algorithm is chosen
    assert gradients(TWO_HOSTS, given).algorithm is chosen
    assert gradients(TWO_HOSTS, given).is_overlapped
    assert not gradients(TWO_HOSTS, given).by_subtrees
    assert gradients(implementation=Own()).name == "Own"


@pytest.mark.feature("collectives.auto-algorithm")
@pytest.mark.parametrize(
    ("nbytes", "expected"),
    [(0, "MPI"), (SMALLEST_BYTES - 1, "MPI"), (SMALLEST_BYTES, "MPI"), (65535, "MPI"), (65536, "SHARED_MEMORY")],
)
def test_auto_goes_by_the_measured_table(nbytes, expected):
    assert route(nbytes=nbytes).name == expected
    assert route(nbytes=nbytes, table=None).name == "SHARED_MEMORY"
    if nbytes >= LANE_BYTES:
        between_hosts = "HIERARCHICAL"
    else:
        between_hosts = "MPI"
    assert route(TWO_HOSTS, nbytes=nbytes, table=None).name == between_hosts
    assert route(nbytes=nbytes, can_share_memory=False).name == "MPI"
    assert route(Placement(((0,),)), nbytes=nbytes).name == "MPI"


@pytest.mark.parametrize("nbytes", [0, SMALLEST_BYTES - 1, SMALLEST_BYTES, 65535, 65536, 1 << 30])
@pytest.mark.parametrize("table", [None, TABLE, ((1024, Implementation.SHARED_MEMORY),)])
@pytest.mark.parametrize("placement", [ONE_HOST, TWO_HOSTS, UNEVEN])
def test_routes_chosen_once_are_those_of_every_size(placement, table, nbytes):
    rows = auto_routes(GroupFacts(placement, can_share_memory=True, table=table))
    first = next(chosen for end_bytes, chosen in rows if nbytes < end_bytes)
    assert all(choice != next_choice for (_, choice), (_, next_choice) in itertools.pairwise(rows))
    assert first == route(placement, nbytes=nbytes, table=table)


def test_auto_leaves_what_is_expected_on_clear_evidence_only():
    """Twenty launches on a noisy machine choose alike: neither chance nor one slow round decides."""
    random = np.random.default_rng(0)

    def is_left(factor, n_rounds, n_slow=0):
        expected, rival_times = (np.exp(random.normal(0, 0.1, n_rounds)) for _ in range(2))
        expected[:n_slow] *= 20
        return is_clearly_faster(rival_times / factor, expected)

    for n_rounds in (12, 20):
        assert not any(is_left(1.0, n_rounds) for _ in range(20))
        assert not any(is_left(1.0, n_rounds, n_slow=n_rounds // 4) for _ in range(20))
        assert all(is_left(2.0, n_rounds) for _ in range(20))


def test_what_is_expected_to_be_the_fastest():
    assert candidates(ONE_HOST, 4)[0] is Implementation.SHARED_MEMORY
    assert candidates(TWO_HOSTS, LANE_BYTES - 1) == (Implementation.MPI, Implementation.HIERARCHICAL)
    assert candidates(TWO_HOSTS, LANE_BYTES) == (Implementation.HIERARCHICAL, Implementation.MPI)


@pytest.mark.parametrize(
    ("n_hosts", "n_ranks", "expected"),
    [(2, 8, False), (16, 8, False), (24, 8, True), (32, 8, True), (32, 6, True), (1025, 1, True)],
)
def test_many_hosts_go_by_halving_where_that_is_the_order_of_the_tree(n_hosts, n_ranks, expected):
    assert goes_by_halving(Placement(tuple(_host(number, n_ranks) for number in range(n_hosts)))) == expected


def test_aligned_hosts_of_other_sizes_do_not_go_by_halving():
    """The tree over ranks is another one than that over hosts."""
    hosts = [tuple(range(32)), tuple(range(32, 48)), tuple(range(48, 56)), tuple(range(56, 60))]
    hosts += [(60 + number,) for number in range(28)]
    placement = Placement(tuple(hosts))
    assert len(placement.hosts) == 32
    assert not placement.is_aligned or not goes_by_halving(placement)


def _host(number, n_ranks):
    return tuple(range(number * n_ranks, (number + 1) * n_ranks))


@pytest.mark.feature("collectives.auto-algorithm")
def test_gradients_do_not_go_by_size():
    """Else the bits would depend on how parameters are packed."""
    for nbytes in (0, 1, 1 << 30):
        assert gradients(nbytes=nbytes).name == "SHARED_MEMORY"
        assert gradients(TWO_HOSTS, nbytes=nbytes).name == "HIERARCHICAL"
        assert gradients(TWO_HOSTS, nbytes=nbytes, can_share_memory=False).name == "MPI"


@pytest.mark.feature("collectives.auto-algorithm")
@pytest.mark.parametrize(("op", "dtype"), list(itertools.product(OPS.values(), [*NCCL_DTYPES, "int16", "complex64"])))
def test_device_buffers_go_by_nccl_where_it_can_carry_them(op, dtype):
    def on_device(placement=ONE_HOST, implementation="AUTO", has_nccl=True):
        return route(placement, implementation, has_nccl=has_nccl, op=op, device_dtype=dtype)

    is_carried = op is not MEAN and dtype in NCCL_DTYPES
    assert on_device().is_on_device == is_carried
    if is_carried:
        expected = "NCCL"
    else:
        expected = "SHARED_MEMORY"
    assert on_device().name == expected
    assert not on_device(has_nccl=False).is_on_device
    assert not on_device(has_nccl=None).is_on_device
    assert not on_device(implementation="RING").is_on_device
    if is_carried and op is not SUM:
        ordered_route = "NCCL"
    else:
        ordered_route = "HIERARCHICAL"
    assert on_device(TWO_HOSTS, "HIERARCHICAL").name == ordered_route
    assert on_device(UNEVEN, "HIERARCHICAL").name == ("NCCL" if is_carried else "HIERARCHICAL")


@pytest.mark.parametrize("placement", [ONE_HOST, TWO_HOSTS])
def test_gradients_on_gpus_go_by_nccl_in_hosts_and_by_mpi_between_them(placement):
    def on_gpus(placement=placement, implementation="HIERARCHICAL", has_nccl=True, **options):
        return gradients(placement, implementation, has_nccl=has_nccl, device_dtype="any", **options)

    assert on_gpus() == Route(Implementation.HIERARCHICAL, is_on_device=True, is_overlapped=True)
    assert on_gpus(is_ordered=False).is_on_device
    assert on_gpus(implementation="AUTO").name == "NCCL"
    assert not on_gpus(is_ordered=True).is_on_device
    assert not on_gpus(wire_dtype="bfloat16").is_on_device
    assert not on_gpus(has_nccl=False).is_on_device
    assert not on_gpus(UNEVEN).is_on_device


def test_nccl_asked_for_by_name_says_itself_what_it_cannot_carry():
    nccl_route = route(implementation="NCCL", has_nccl=False, device_dtype="complex64")
    assert nccl_route == Route(Implementation.NCCL, is_on_device=True)
    assert gradients(implementation="NCCL").is_on_device


@pytest.mark.parametrize(("placement", "is_aligned"), [(ONE_HOST, True), (TWO_HOSTS, True), (UNEVEN, False)])
def test_sums_are_in_the_order_of_replicas_where_that_costs_nothing(placement, is_aligned):
    assert gradients(placement).is_ordered == is_aligned
    assert gradients(placement, "RING").is_ordered is False
    assert gradients(placement, "HIERARCHICAL", is_ordered=True).is_ordered
    assert not gradients(placement, "HIERARCHICAL", is_ordered=False).is_ordered


def test_ranks_contribute_subtrees_where_replicas_are_not_one_tree_of_ranks():
    assert not gradients(n_replicas=8).by_subtrees
    assert gradients(n_replicas=9).by_subtrees
    assert not gradients(implementation="RING", n_replicas=9).by_subtrees
    assert not gradients(TWO_HOSTS, n_replicas=9, wire_dtype="bfloat16").by_subtrees


@pytest.mark.feature("collectives.overlap-with-backward")
def test_the_wire_and_the_background_thread_are_for_several_hosts():
    assert gradients(TWO_HOSTS, wire_dtype="bfloat16").wire_dtype == "bfloat16"
    assert gradients(ONE_HOST, wire_dtype="bfloat16").wire_dtype is None
    assert (gradients(TWO_HOSTS).is_overlapped, gradients(ONE_HOST).is_overlapped) == (True, False)


def test_gradients_by_subtrees_are_in_the_order_of_replicas():
    """So a checkpoint says so, also where ranks cannot share memory and the plain algorithm would be MPI's."""
    chosen = gradients(n_replicas=6, can_share_memory=False)
    assert (chosen.name, chosen.is_in_replica_order) == ("MPI", True)
    assert gradients(TWO_HOSTS, n_replicas=6).is_in_replica_order
    assert not gradients(UNEVEN, "RING").is_in_replica_order

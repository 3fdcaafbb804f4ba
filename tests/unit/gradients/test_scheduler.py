"""The replica scheduler: replicas run in turn, and the last one acts. No MPI."""

import ctypes
import re
import threading
from pathlib import Path

import pytest
import torch

from hpcdist.errors import DesyncError
from hpcdist.replicas.scheduler import ReplicaScheduler


class Noted:
    """Writes down who leaves and who enters."""

    def __init__(self):
        self.events = []

    def begin_run(self):
        self.events.append("begin")

    def end_run(self):
        self.events.append("end")

    def suspend(self, replica):
        self.events.append(f"-{replica}")

    def resume(self, replica):
        self.events.append(f"+{replica}")


@pytest.mark.feature("launch.simulated-replicas")
def test_replicas_go_in_turn_and_the_last_one_acts():
    noted = Noted()
    log = []
    scheduler = ReplicaScheduler(range(2, 5), [noted])

    def call():
        log.append(f"start {scheduler.replica}")
        scheduler.barrier("the middle")
        if scheduler.is_last:
            log.append(f"act {scheduler.replica}")
            scheduler.release()
        log.append(f"rest {scheduler.replica}")
        return scheduler.replica

    assert scheduler.run([call] * 3) == [2, 3, 4]
    assert log == ["start 2", "start 3", "start 4", "act 4", "rest 2", "rest 3", "rest 4"]
    assert noted.events == ["begin", "+2", "-2", "+3", "-3", "+4", "-4", "+2", "-2", "+3", "-3", "+4", "-4", "end"]
    assert scheduler.replica is None


@pytest.mark.feature("tf.merge-call-waits", "semantics.merge-call")
def test_merge_gives_each_its_part():
    scheduler = ReplicaScheduler(range(3), [])
    calls = [
        lambda: (scheduler.merge("a sum", scheduler.replica + 1, lambda all_: [sum(all_)] * 3), scheduler.replica)
    ] * 3
    assert scheduler.run(calls) == [(6, 0), (6, 1), (6, 2)]


def test_nobody_is_a_replica_in_what_a_merge_calls():
    scheduler = ReplicaScheduler(range(2), [])
    seen = []
    scheduler.run([lambda: scheduler.merge("a merge", None, lambda all_: [seen.append(scheduler.replica)] * 2)] * 2)
    assert seen == [None]


@pytest.mark.feature("tf.error-replica-stops", "semantics.results-of-run")
@pytest.mark.parametrize("failing", [0, 1, 2])
def test_an_error_in_one_replica_stops_the_others_and_is_raised_once(failing):
    scheduler = ReplicaScheduler(range(3), [])
    after = []

    def call():
        if scheduler.replica == failing:
            raise KeyError("mine")
        scheduler.barrier("a backward")
        after.append(scheduler.replica)

    with pytest.raises(KeyError, match="mine"):
        scheduler.run([call] * 3)
    assert after == []
    assert not [thread for thread in threading.enumerate() if "_thread" in thread.name and thread.is_alive()]


@pytest.mark.feature("tf.merge-points-must")
def test_replicas_that_make_other_calls_are_named():
    scheduler = ReplicaScheduler(range(2), [])
    calls = [lambda: scheduler.barrier("a backward"), lambda: scheduler.barrier("an all_reduce")]
    with pytest.raises(DesyncError, match="1.*0.*all_reduce"):
        scheduler.run(calls)
    with pytest.raises(DesyncError, match="replica.*1.*0.*backward"):
        scheduler.run([lambda: None, lambda: scheduler.barrier("a backward")])
    assert scheduler.run([lambda: 1, lambda: 2]) == [1, 2]


def test_replicas_have_the_modes_of_the_caller():
    scheduler = ReplicaScheduler(range(2), [])
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        replica_modes = scheduler.run([lambda: (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"))] * 2)
    assert replica_modes == [(False, True)] * 2


def test_replicas_use_as_many_cores_as_their_caller():
    """Otherwise a matrix product has other bits than on a rank of one replica, which has no threads."""
    mapped = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "omp" in line:
            mapped.append(line.split()[-1])
    openmp = ctypes.CDLL(next(name for name in mapped if re.search(r"lib[gi]?omp", name)))
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        thread_counts = ReplicaScheduler(range(2), []).run([openmp.omp_get_max_threads] * 2)
    finally:
        torch.set_num_threads(before)
    assert thread_counts == [1, 1]

"""The store of torch.distributed over MPI: what one rank sets another one gets, and no port is opened for it."""

import contextlib
import os
import socket
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

import hpcdist.torch_backend
from hpcdist.torch_backend.mpi_store import KeyTable

pytestmark = [pytest.mark.mpi, pytest.mark.core]
assert hpcdist.torch_backend


def listening():
    """Return the addresses at which this process listens."""
    inodes = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(f"/proc/self/fd/{name}"))
    lines = (Path("/proc/net/tcp").read_text() + Path("/proc/net/tcp6").read_text()).splitlines()
    rows = [line.split() for line in lines]
    return sorted(row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes)


@pytest.fixture
def store(comm):
    dist.init_process_group("hpcdist", init_method="hpcdist://", timeout=timedelta(seconds=30))
    yield dist.distributed_c10d._get_default_store()
    comm.Barrier()
    dist.destroy_process_group()


def test_no_port_is_opened(comm):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        assert len(listening()) > 0, "the test sees ports"
    before = listening()
    dist.init_process_group("hpcdist", init_method="hpcdist://")
    group = dist.new_group(list(range(comm.size)))
    dist.barrier(group)
    assert listening() == before
    dist.destroy_process_group()


def test_what_one_rank_sets_all_get(comm, store):
    if comm.rank == comm.size - 1:
        time.sleep(0.2)
        store.set("text", "from the last rank")
        store.set("bytes", bytes(range(256)).decode("latin-1"))
    assert store.get("text") == b"from the last rank"
    assert store.add("count", comm.rank + 1) > 0
    comm.Barrier()
    assert store.add("count", 0) == comm.size * (comm.size + 1) // 2
    assert store.check(["text", "count"])
    assert not store.check(["text", "nothing"])


def test_one_of_all_ranks_wins(comm, store):
    value = store.compare_set("winner", "", str(comm.rank)).decode()
    assert len(set(comm.allgather(value))) == 1


def test_a_wait_for_what_never_comes_ends(comm, store):
    started = time.monotonic()
    with pytest.raises(dist.DistStoreError, match="nothing"):
        store.wait(["nothing"], timedelta(seconds=0.3))
    assert 0.2 < time.monotonic() - started < 20


def test_an_answer_that_comes_too_late_is_not_the_next_one(comm, store):
    if comm.rank:
        inner_store = store.underlying_store.underlying_store
    else:
        inner_store = None
    while isinstance(inner_store, dist.PrefixStore):
        inner_store = inner_store.underlying_store
    if comm.rank > 0:
        with pytest.raises(dist.DistStoreError, match="within 0.05 s"):
            inner_store._ask_holder("wait", (["nothing"], 2.0), 0.05)
        time.sleep(2.2)  # until rank 0 has answered that
        inner_store.set(f"number {comm.rank}", "7")
        assert inner_store.get(f"number {comm.rank}") == b"7"


def test_a_store_begins_empty_whenever_a_group_is_made_again(comm):
    for _ in range(3):
        dist.init_process_group("hpcdist", init_method="hpcdist://")
        assert dist.distributed_c10d._get_default_store().add("once", 1) <= comm.size
        comm.Barrier()
        dist.destroy_process_group()


def test_two_threads_of_a_rank_ask_at_once(comm, store):
    results = []

    def add():
        for _ in range(50):
            results.append(store.add(f"of rank {comm.rank}", 1))

    threads = [threading.Thread(target=add) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(results) == list(range(1, 101))


def test_keys_of_a_table():
    table = KeyTable()
    assert table.compare_set("a", b"x", b"y") == b"x", "it is not there, and another value is expected"
    assert table.compare_set("a", b"", b"y") == b"y"
    assert table.compare_set("a", b"z", b"w") == b"y"
    table.append("a", b"!")
    assert (table.get("a"), table.num_keys()) == (b"y!", 1)
    assert table.delete_key("a")
    assert not table.delete_key("a")
    assert not table.wait(["a"], 0.01)

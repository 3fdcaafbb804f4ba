"""The ranks of `hosts.py`: every way to sum, in turn, on fresh values, each result checked."""

import json
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np

import hpcdist
from hpcdist.collectives import hierarchical, library
from hpcdist.collectives.group import group_of
from hpcdist.collectives.ops import SUM
from hpcdist.gradients.half_wire import HalfWire
from hpcdist.runtime.mpi import MPI
from hpcdist.runtime.process import make_world


def bytes_sent():
    """Return the bytes that this host has sent."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        device, _, counters = line.partition(":")
        if device.strip() == "eth0":
            return int(counters.split()[8])
    raise SystemExit("hosts_job: expected a device eth0 in /proc/net/dev, got none")


def contenders(group):
    """Return the ways to sum: name -> (call, largest error of an element in units of the largest sum)."""

    def ordered(array):
        hierarchical.all_reduce(array, group, SUM, True)

    def unordered(array):
        hierarchical.all_reduce(array, group, SUM, False)

    def on_half_wire(array):
        hierarchical.all_reduce(array, group, wire=HalfWire("bfloat16"))

    return {
        "MPI_Allreduce in place": (partial(library.all_reduce, group=group), 1e-6),
        "hpcdist AUTO": (partial(hpcdist.all_reduce, comm=group.comm), 1e-6),
        "HIERARCHICAL ordered": (ordered, 1e-6),
        "HIERARCHICAL unordered": (unordered, 1e-6),
        "HIERARCHICAL bf16 wire": (on_half_wire, 2e-2),
    }


def time_one(group, call, tolerance, nbytes, seed):
    """Return seconds of the slowest rank, and the bytes that each host sent. Collective over `group.comm`."""
    rows = []
    for rank in range(group.size):
        generator = np.random.default_rng([seed, rank])
        rows.append(generator.random(nbytes // 4, np.float32))
    array = rows[group.rank].copy()
    total = np.sum(rows, axis=0, dtype=np.float64)
    group.comm.Barrier()
    sent = bytes_sent()
    started = time.perf_counter()
    call(array)
    taken_s = time.perf_counter() - started
    group.comm.Barrier()
    sent = bytes_sent() - sent
    error = np.abs(array - total).max()
    assert error <= tolerance * total.max(), "a wrong sum"
    per_host = []
    for local_rank, n_sent in group.comm.allgather((group.node_comm.rank, sent)):
        if local_rank == 0:
            per_host.append(n_sent)
    return group.comm.allreduce(taken_s, MPI.MAX), per_host


def main():
    repeats = int(sys.argv[1])
    sizes = [int(text) for text in sys.argv[2:]]
    group = group_of(make_world().role_comm)
    rows = []
    for nbytes in sizes:
        ways = contenders(group)
        names = list(ways)
        rows_of = {}
        for name in names:
            row = {"nbytes": nbytes, "name": name, "seconds": [], "sent": []}
            rows_of[name] = row
            rows.append(row)
        # the first repeat makes connections and measures them, and does not count
        for repeat in range(repeats + 1):
            for name in names:
                call, tolerance = ways[name]
                seconds, sent = time_one(group, call, tolerance, nbytes, repeat)
                if repeat:
                    rows_of[name]["seconds"].append(seconds)
                    rows_of[name]["sent"] = sent
            names.reverse()
    if group.rank == 0:
        result = {"n_hosts": len(group.placement.hosts), "rows": rows}
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()

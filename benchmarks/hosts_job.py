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
    (line,) = (
        line
        for line in Path("/proc/net/dev").read_text().splitlines()
        if line.strip().startswith("eth0:")
    )
    return int(line.split(":")[1].split()[8])


def contenders(group):
    """Return the ways to sum: name -> (call, largest error of an element in units of the largest sum)."""
    return {
        "MPI_Allreduce in place": (partial(library.all_reduce, group=group), 1e-6),
        "hpcdist AUTO": (partial(hpcdist.all_reduce, comm=group.comm), 1e-6),
        "HIERARCHICAL ordered": (
            lambda array: hierarchical.all_reduce(array, group, SUM, True),
            1e-6,
        ),
        "HIERARCHICAL unordered": (
            lambda array: hierarchical.all_reduce(array, group, SUM, False),
            1e-6,
        ),
        "HIERARCHICAL bf16 wire": (
            lambda array: hierarchical.all_reduce(array, group, wire=HalfWire("bfloat16")),
            2e-2,
        ),
    }


def time_one(group, call, tolerance, nbytes, seed):
    """Return seconds of the slowest rank, and the bytes that each host sent. Collective: `group.comm`."""
    rows = [
        np.random.default_rng([seed, rank]).random(nbytes // 4, np.float32)
        for rank in range(group.size)
    ]
    array = rows[group.rank].copy()
    total = np.sum(rows, axis=0, dtype=np.float64)
    group.comm.Barrier()
    sent = bytes_sent()
    started = time.perf_counter()
    call(array)
    taken_s = time.perf_counter() - started
    group.comm.Barrier()
    sent = bytes_sent() - sent
    assert np.abs(array - total).max() <= tolerance * total.max(), "a wrong sum"
    per_host = [
        n_sent for place, n_sent in group.comm.allgather((group.node_comm.rank, sent)) if place == 0
    ]
    return group.comm.allreduce(taken_s, MPI.MAX), per_host


def main():
    repeats = int(sys.argv[1])
    sizes = [int(text) for text in sys.argv[2:]]
    group = group_of(make_world().role_comm)
    rows = []
    for nbytes in sizes:
        ways = contenders(group)
        measured = {name: [] for name in ways}
        # the first makes connections and measures, and does not count
        for repeat in range(-1, repeats):
            for name, (call, tolerance) in list(ways.items())[:: 1 if repeat % 2 else -1]:
                result = time_one(group, call, tolerance, nbytes, repeat + 1)
                if repeat >= 0:
                    measured[name].append(result)
        for name, results in measured.items():
            seconds = [slowest_s for slowest_s, _ in results]
            rows.append(
                {"nbytes": nbytes, "name": name, "seconds": seconds, "sent": results[-1][1]}
            )
    if group.rank == 0:
        print(json.dumps({"n_hosts": len(group.placement.hosts), "rows": rows}), flush=True)


if __name__ == "__main__":
    main()

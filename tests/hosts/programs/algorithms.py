"""Sum random rows by each way between hosts; report bytes that hosts sent, wrong elements and the bits of the sum."""

import sys

import numpy as np
import xxhash
from report import bytes_sent_by_hosts, print_result

from hpcdist.collectives import halving, hierarchical, ring
from hpcdist.collectives.group import group_of
from hpcdist.collectives.ops import SUM
from hpcdist.gradients.half_wire import HalfWire
from hpcdist.runtime.process import make_world

world = make_world()
n_elements = int(sys.argv[1])
group = group_of(world.role_comm)
rows = [np.random.default_rng(rank).standard_normal(n_elements).astype(np.float32) for rank in range(world.size)]
expected = np.sum(rows, axis=0, dtype=np.float64)
ways = {
    "ordered": (lambda array: hierarchical.all_reduce(array, group, SUM, True), 1e-5),
    "unordered": (lambda array: hierarchical.all_reduce(array, group, SUM, False), 1e-5),
    "bfloat16": (lambda array: hierarchical.all_reduce(array, group, wire=HalfWire("bfloat16")), 0.1),
    "ring": (lambda array: ring.all_reduce(array, group), 1e-5),
    "halving": (lambda array: halving.all_reduce(array, group), 1e-5),
}
found = {}
for name, (sum_up, tolerance) in ways.items():
    sum_up(rows[world.rank].copy())  # makes connections
    array = rows[world.rank].copy()
    sent = bytes_sent_by_hosts(world, lambda sum_up=sum_up, array=array: sum_up(array))
    bits = world.comm.allgather(xxhash.xxh3_64_hexdigest(array.tobytes()))
    n_wrong = world.comm.allreduce(int(np.count_nonzero(np.abs(array - expected) > tolerance)))
    found[name] = {"sent": sent, "n_wrong": n_wrong, "bits": sorted(set(bits))}
print_result(world.comm, n_hosts=world.n_hosts, nbytes=4 * n_elements, ways=found)

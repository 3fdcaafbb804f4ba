"""Sum arrays of the given numbers of float32 elements; report wrong elements and the bytes each host sent for each."""

import sys

import numpy as np
from report import bytes_sent_by_hosts, print_result

import hpcdist
from hpcdist.runtime.mpi import MPI
from hpcdist.runtime.process import make_world

world = make_world()
rows = []
for n_elements in map(int, sys.argv[1:]):
    pattern = np.arange(n_elements, dtype=np.float32) % 1000
    array = pattern * (world.rank + 1)  # integers far below 2**24: the sum is exact in any order
    hpcdist.all_reduce(array.copy())  # the first of a size makes connections, and may try algorithms
    sent = bytes_sent_by_hosts(world, lambda array=array: hpcdist.all_reduce(array))
    expected = pattern * (world.size * (world.size + 1) // 2)
    n_wrong = world.comm.allreduce(int(np.count_nonzero(array != expected)), MPI.SUM)
    rows.append({"nbytes": array.nbytes, "n_wrong": n_wrong, "sent": sent})
print_result(world.comm, n_hosts=world.n_hosts, rows=rows)

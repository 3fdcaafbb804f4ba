"""Save at step 5 on the disk and copy step 7 to the memory of each host, then die; or restore, and report from where.

Usage: copies.py RUN_DIR die | restore
"""

import os
import signal
import sys

import numpy as np
from report import print_result

import hpcdist
from hpcdist.runtime.process import make_world

world = make_world()
values = np.zeros(1 << 18)
checkpoint = hpcdist.Checkpoint(values=values)
manager = hpcdist.CheckpointManager(checkpoint, f"{sys.argv[1]}/checkpoints", fast_directory="/dev/shm")
path = manager.restore_or_initialize()
if sys.argv[2] == "die":
    values += 5
    manager.save(5)
    manager.wait()  # while the disk takes a file, the chief's host makes no copy
    values += 2
    manager.save_fast(7)
    manager.wait()
    world.comm.Barrier()
    os.kill(os.getpid(), signal.SIGKILL)
manager.wait()
found = world.comm.allgather((path, float(values.min()), float(values.max())))
print_result(world.comm, found=sorted(set(found)), n_hosts=world.n_hosts)
manager.end_attempt()

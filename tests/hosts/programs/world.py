"""Print what the ranks see of their hosts."""

import json
import os

import hpcdist
from hpcdist.mpi import MPI

world = hpcdist.MultiWorkerMirroredStrategy().world
facts = {
    "rank": world.rank,
    "host": MPI.Get_processor_name(),
    "node_size": world.node_comm.size,
    "lane_size": world.lane_comm.size,
    "n_hosts": world.n_hosts,
    "shared_memory": os.stat("/dev/shm").st_dev,
    "pid": os.getpid(),
}
everyone = world.comm.gather(facts)
if world.rank == 0:
    print(json.dumps({"library": MPI.Get_library_version(), "ranks": everyone}), flush=True)

"""Report what each rank sees of its host."""

import os

from report import print_result

from hpcdist.runtime.mpi import MPI, library_name
from hpcdist.runtime.process import make_world

world = make_world()
facts = {
    "rank": world.rank,
    "host": MPI.Get_processor_name(),
    "n_hosts": world.n_hosts,
    "n_ranks_of_host": world.node_comm.size,
    "n_ranks_of_lane": world.hosts.lane_comm.size,
    "shared_memory_device": os.stat("/dev/shm").st_dev,
    "namespaces": [os.readlink(f"/proc/self/ns/{name}") for name in ("net", "uts", "ipc", "mnt", "pid")],
}
print_result(world.comm, library=library_name(), ranks=world.comm.gather(facts))

"""What the programs here share: this host's link, and one JSON object from rank 0."""

import json
from pathlib import Path
from typing import Any

from hpcdist.runtime.mpi import MPI
from hpcdist.runtime.world import World


def link_bytes_sent() -> int:
    """Return the bytes that this rank's host has sent over its link so far."""
    (line,) = (line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("eth0:"))
    return int(line.split(":")[1].split()[8])


def bytes_sent_by_hosts(world: World, run: Any) -> list[int]:
    """Call `run` on every rank; return what each host has sent meanwhile, on every rank. Collective: all ranks."""
    world.comm.Barrier()
    before = link_bytes_sent()
    run()
    world.comm.Barrier()  # who has passed has received all that was sent to it
    rank_and_bytes = (world.node_comm.rank, link_bytes_sent() - before)
    return [sent for rank, sent in world.comm.allgather(rank_and_bytes) if rank == 0]


def print_result(comm: MPI.Comm, **values: Any) -> None:
    """Print rank 0's `values` as one line of JSON, for `Outcome.result`."""
    if comm.rank == 0:
        print(json.dumps(values), flush=True)

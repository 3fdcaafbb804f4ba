"""torch.distributed over gloo among the ranks that mpirun started."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from hpcdist.mpi import MPI


@contextmanager
def start_gloo(comm: MPI.Comm) -> Iterator[None]:
    """Make the ranks of `comm`, all on one host, torch's default process group for the time of the block.

    Collective: `comm`.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    folder = comm.bcast(tempfile.mkdtemp(prefix="hpcdist-gloo-") if comm.rank == 0 else None)
    meeting = Path(folder) / "meeting"
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=comm.rank, world_size=comm.size, timeout=timedelta(seconds=60)
    )
    try:
        yield
    finally:
        dist.destroy_process_group()
        comm.Barrier()
        if comm.rank == 0:
            meeting.unlink(missing_ok=True)
            Path(folder).rmdir()

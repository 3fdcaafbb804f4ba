"""torch.distributed over gloo among the ranks that mpirun started."""

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from hpcdist.runtime.mpi import MPI

_TIMEOUT = timedelta(seconds=60)


@contextmanager
def start_gloo(comm: MPI.Comm, backend: str = "gloo") -> Iterator[None]:
    """Make the ranks of `comm`, all on one host, torch's default process group for the time of the block.

    Collective over `comm`.

    Args:
        comm: ranks of the group.
        backend: backend of the group; "nccl" needs a GPU for each rank.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    folder_name = None
    if comm.rank == 0:
        folder_name = tempfile.mkdtemp(prefix="hpcdist-gloo-")
    folder = Path(comm.bcast(folder_name))
    meeting = f"file://{folder / 'meeting'}"
    report = sys.excepthook
    dist.init_process_group(
        backend,
        init_method=meeting,
        rank=comm.rank,
        world_size=comm.size,
        timeout=_TIMEOUT,
    )
    # torch's hook holds back printed text until it returns, and a hook that aborts never does
    sys.excepthook = report
    yield
    dist.destroy_process_group()  # not after an error: other ranks would not be there
    comm.Barrier()
    if comm.rank == 0:
        shutil.rmtree(folder)

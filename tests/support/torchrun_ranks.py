"""A pytest plugin with which tests/mpi/test_torch_backend.py runs under torchrun, where no MPI may be started.

torchrun --nproc-per-node 2 --no-python python -m pytest --noconftest -p no:pytest_mpi -p torchrun_ranks FILE
"""

import os
import sys
from types import SimpleNamespace

import pytest
import torch.distributed as dist


@pytest.fixture
def comm(gloo):
    """Return what the tests use of a communicator."""
    rank = int(os.environ["RANK"])
    size = int(os.environ["WORLD_SIZE"])
    yield SimpleNamespace(rank=rank, size=size, barrier=lambda: dist.barrier(group=gloo))
    assert "mpi4py" not in sys.modules, "MPI is not started"

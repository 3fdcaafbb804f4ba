"""Checks on real GPUs, run as the tests under mpirun are; skipped, with the reason, where there is no GPU."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from hpcdist.cluster.environment import nccl_may_share_devices, read_environment
from hpcdist.collectives.gpu import cupy_door as cuda
from hpcdist.errors import ConfigurationError
from hpcdist.plan.devices import plan_devices

_spec = importlib.util.spec_from_file_location("mpi_conftest", Path(__file__).parent.parent / "mpi" / "conftest.py")
_mpi = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_mpi)
comm = _mpi.comm
make_group = _mpi.make_group


@pytest.fixture(scope="session")
def what_is_missing(comm):
    """Return why this machine cannot run the checks, "" when it can; the same on all ranks."""
    try:
        cuda.visible_devices()
        cuda.load_nccl()
        missing_reason = ""
    except ConfigurationError as error:
        missing_reason = str(error)
    return next((text for text in comm.allgather(missing_reason) if text), "")


@pytest.fixture
def cupy(comm, what_is_missing):
    """Return cupy, with this rank's device as the current one."""
    if what_is_missing:
        pytest.skip(what_is_missing)
    cuda.use_device(plan_devices(comm.size, len(cuda.visible_devices()))[comm.rank])
    return cuda.load_cupy()


@pytest.fixture(scope="session")
def has_gpu_each(comm, what_is_missing):
    """Return whether every rank has a GPU of its own."""
    return not what_is_missing and len(cuda.visible_devices()) >= comm.size


@pytest.fixture
def nccl_ranks(cupy, has_gpu_each):
    """Leave out what takes NCCL between ranks where it refuses to share the GPU."""
    if not has_gpu_each and not nccl_may_share_devices(read_environment()):
        pytest.skip("fewer GPUs than ranks, and NCCL_MULTI_RANK_GPU_ENABLE is not 1")


@pytest.fixture
def on_gpu(cupy):
    """Return a function that copies a numpy array to the GPU; no kernel is compiled for it."""

    def copy(host):
        array = cupy.empty(host.shape, host.dtype)
        array.set(np.ascontiguousarray(host))
        cupy.cuda.get_current_stream().synchronize()  # other streams do not wait for this one
        return array

    return copy

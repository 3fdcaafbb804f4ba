"""Setting up an NCCL communicator: a GPU for each rank, one unique id sent by MPI, and a call that waits for all."""

import contextlib
import threading
from dataclasses import replace
from typing import Any

import numpy as np

from hpcdist.cluster.environment import nccl_may_share_devices, read_environment, visible_gpus
from hpcdist.collectives.gpu.cupy_door import load_nccl, use_device, visible_devices
from hpcdist.collectives.group import Group
from hpcdist.errors import CollectiveFailed, ConfigurationError, HpcdistError
from hpcdist.plan.devices import plan_devices, shared_devices
from hpcdist.runtime.mpi import MPI
from hpcdist.runtime.waiting import late, wait_until

#: Tag of the message by which a rank that cannot join releases those that wait for it inside NCCL.
_FAILED_TAG = 901


def choose_device(group: Group) -> int:
    """Return the index of this rank's device, by its local rank, and make it the current one.

    Collective over `group.comm`. Where each rank sees one device only (as `srun --gpus-per-task=1` sees to), that one.

    Raises:
        ConfigurationError: without cupy, driver or GPU; on every rank alike.
    """
    index = 0
    error = None
    try:
        index = plan_devices(group.node_comm.size, len(visible_devices()))[group.node_comm.rank]
        use_device(index)
    except ConfigurationError as caught:
        error = caught
    group.agree(error, group.comm)
    return index


def find_nccl(group: Group, device: int | None = None) -> None:
    """Record in the facts of the group whether every rank has NCCL and a GPU of its own.

    Collective over `group.comm` at the first call.

    Args:
        group: the ranks.
        device: index of this rank's; default: by its number on the host.
    """
    if group.facts.has_nccl is not None:
        return
    try:
        load_nccl()
        devices = visible_devices()
        planned = plan_devices(group.node_comm.size, len(devices))[group.node_comm.rank]
        identity = devices[planned if device is None else device]
    except ConfigurationError:
        identity = ""
    identities = group.node_comm.allgather(identity)
    is_own = not shared_devices(identities) or nccl_may_share_devices(read_environment())
    has_nccl = group.world.all_reduce_int(int(all(identities) and is_own), MPI.MIN, group.comm)
    group.set_facts(replace(group.facts, has_nccl=bool(has_nccl)))


def has_gpu(group: Group) -> bool:
    """Return whether any rank sees a GPU. Collective over `group.comm`."""
    n_gpus = visible_gpus(read_environment())
    # of what is missing: it is raised where NCCL is set up after all
    with contextlib.suppress(ConfigurationError):
        n_gpus += len(visible_devices())
    return group.world.all_reduce_int(n_gpus, MPI.MAX, group.comm) > 0


def join(
    group: Group,
    comm: MPI.Comm,
    device: int,
    limit_s: float,
) -> Any:
    """Return cupy's NCCL communicator, made in steps, each agreed on before ranks wait for each other in the next one.

    Collective over `group.comm`.

    Args:
        group: whose ranks agree.
        comm: the ranks that share the communicator: group.comm or group.node_comm.
        device: index of this rank's device.
        limit_s: longest wait for the other ranks, in seconds.

    Raises:
        ConfigurationError: without cupy, NCCL or GPU, and for two ranks on one GPU; on every rank alike.
        CollectiveFailed: when NCCL fails on a rank, or one does not arrive; on every rank alike.
    """
    identity = ""
    error = None
    try:
        load_nccl()
        identity = visible_devices()[device]
    except ConfigurationError as caught:
        error = caught
    group.agree(error, group.comm)
    group.agree(_two_ranks_on_one(group, identity), group.comm)
    unique_id = _broadcast_unique_id(group, comm)
    return _join_by(unique_id, group, comm, device, limit_s)


def _two_ranks_on_one(group: Group, identity: str) -> ConfigurationError | None:
    """Return the error of two ranks on one GPU, which NCCL refuses or hangs in; None when all is well."""
    on_host = group.node_comm.allgather((group.comm.rank, identity))
    shared = shared_devices([identity for _, identity in on_host])
    if not shared or nccl_may_share_devices(read_environment()):
        return None
    device, local_ranks = next(iter(shared.items()))
    ranks = " and ".join(str(on_host[local_rank][0]) for local_rank in local_ranks)
    return ConfigurationError(
        f"nccl: expected one rank per GPU, got ranks {ranks} on GPU {device}; start as many ranks per node as it has "
        f"GPUs and give each its own (srun --gpus-per-task=1, or torch.cuda.set_device(local rank)). NCCL 2.30 and "
        f"later may share one, for tests, with NCCL_MULTI_RANK_GPU_ENABLE=1."
    )


def _broadcast_unique_id(group: Group, comm: MPI.Comm) -> Any:
    """Return root's unique id, in the form that cupy made it."""
    packed = np.zeros(129, np.uint8)
    error = None
    if comm.rank == 0:
        try:
            packed[:] = pack_unique_id(load_nccl().get_unique_id())
        except RuntimeError as caught:
            error = _failure(comm, caught)
    group.agree(error, group.comm)
    comm.Bcast(packed, 0)
    return unpack_unique_id(packed)


def pack_unique_id(unique_id: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return a unique id as (129,) uint8: its form, then its bytes. cupy 14 gives bytes, older ones signed numbers."""
    return np.array(
        [isinstance(unique_id, bytes), *(number & 0xFF for number in unique_id)], np.uint8
    )


def unpack_unique_id(packed: np.ndarray[Any, np.dtype[np.uint8]]) -> Any:
    """Return the unique id that `pack_unique_id` was given."""
    return packed[1:].tobytes() if packed[0] else tuple(packed[1:].view(np.int8).tolist())


def _failure(comm: MPI.Comm, error: Exception) -> CollectiveFailed:
    return CollectiveFailed(
        f"nccl: expected a communicator of {comm.size} ranks, got {error} on rank {comm.rank}; run again with "
        f"NCCL_DEBUG=INFO, which names the call that failed."
    )


def _join_by(
    unique_id: Any,
    group: Group,
    comm: MPI.Comm,
    device: int,
    limit_s: float,
) -> Any:
    """Return cupy's communicator. NCCL makes it when all ranks have arrived, so it waits in a thread of its own."""
    joining = _Joining(comm, device, unique_id)
    error = joining.wait(limit_s)
    if error is not None and joining.error is not None:
        joining.release_others()
    group.agree(error, group.comm)
    return joining.inner


class _Joining:
    """A call of NCCL that returns when all ranks have made it; meanwhile another rank's failure is listened for."""

    def __init__(self, comm: MPI.Comm, device: int, unique_id: Any) -> None:
        self.inner: Any = None
        self.error: Exception | None = None
        self._comm = comm
        self._device = device
        self._unique_id = unique_id
        self._thread = threading.Thread(target=self._run, name="hpcdist-nccl", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            use_device(self._device)  # the current device is the thread's
            self.inner = load_nccl().NcclCommunicator(
                self._comm.size, self._unique_id, self._comm.rank
            )
        except Exception as error:  # noqa: BLE001 - handed to the thread that waits, which raises it on all ranks
            self.error = error

    def wait(self, limit_s: float) -> HpcdistError | None:
        """Wait for NCCL, for another rank's failure, or for the limit; return this rank's own error."""

        def has_failed() -> bool:
            return bool(self._comm.Iprobe(MPI.ANY_SOURCE, _FAILED_TAG))

        is_over = wait_until(lambda: not self._thread.is_alive() or has_failed(), limit_s, yields=0)
        if not is_over:
            return late("nccl", limit_s, "some", f"rank {self._comm.rank}")
        if self._thread.is_alive() or has_failed():
            self._comm.Recv(bytearray(0), MPI.ANY_SOURCE, _FAILED_TAG)
            return None
        return _failure(self._comm, self.error) if self.error else None

    def release_others(self) -> None:
        """Send a message to the ranks that wait inside NCCL for this one."""
        for rank in range(self._comm.size):
            if rank != self._comm.rank:
                self._comm.Isend(bytearray(0), rank, _FAILED_TAG).Free()

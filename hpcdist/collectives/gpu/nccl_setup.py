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

#: Tag of the message by which a rank that cannot join releases the ranks that wait for it inside NCCL.
_FAILED_TAG = 901


def choose_device(group: Group) -> int:
    """Return the index of this rank's device, by its local rank, and make it the current one.

    Collective over `group.comm`. Where each rank sees only one device, as with `srun --gpus-per-task=1`, it is this.

    Raises:
        ConfigurationError: without cupy, driver or GPU; on every rank alike.
    """
    index = 0
    error = None
    try:
        n_devices = len(visible_devices())
        index_of_rank = plan_devices(group.node_comm.size, n_devices)
        index = index_of_rank[group.node_comm.rank]
        use_device(index)
    except ConfigurationError as caught:
        error = caught
    group.agree(error, group.comm)
    return index


def find_nccl(group: Group, device: int | None = None) -> None:
    """Record in the facts of the group whether every rank has NCCL and a GPU for itself.

    Collective over `group.comm` at the first call.

    Args:
        group: the ranks.
        device: index of this rank's device; default: by the rank's number on the host.
    """
    if group.facts.has_nccl is not None:
        return
    try:
        load_nccl()
        devices = visible_devices()
        index_of_rank = plan_devices(group.node_comm.size, len(devices))
        planned_device = index_of_rank[group.node_comm.rank]
        identity = devices[planned_device if device is None else device]
    except ConfigurationError:
        identity = ""
    identities = group.node_comm.allgather(identity)
    may_use_devices = not shared_devices(identities) or nccl_may_share_devices(read_environment())
    is_ready = all(identities) and may_use_devices
    has_nccl = group.world.all_reduce_int(int(is_ready), MPI.MIN, group.comm)
    group.set_facts(replace(group.facts, has_nccl=bool(has_nccl)))


def has_gpu(group: Group) -> bool:
    """Return whether any rank sees a GPU. Collective over `group.comm`."""
    n_gpus = visible_gpus(read_environment())
    # an error about a missing library is raised where NCCL is set up after all
    with contextlib.suppress(ConfigurationError):
        n_gpus += len(visible_devices())
    return group.world.all_reduce_int(n_gpus, MPI.MAX, group.comm) > 0


def join(
    group: Group,
    comm: MPI.Comm,
    device: int,
    limit_s: float,
) -> Any:
    """Return cupy's NCCL communicator, made in steps. Ranks agree on each step before the next one.

    Collective over `group.comm`.

    Args:
        group: the ranks that agree.
        comm: the ranks that share the communicator: group.comm or group.node_comm.
        device: index of this rank's device.
        limit_s: longest wait for the other ranks, in seconds.

    Raises:
        ConfigurationError: without cupy, NCCL or GPU, and for two ranks on one GPU; on every rank alike.
        CollectiveFailed: when NCCL fails on a rank, or a rank does not arrive; on every rank alike.
    """
    identity = ""
    error = None
    try:
        load_nccl()
        identity = visible_devices()[device]
    except ConfigurationError as caught:
        error = caught
    group.agree(error, group.comm)
    sharing_error = _two_ranks_on_one(group, identity)
    group.agree(sharing_error, group.comm)
    unique_id = _broadcast_unique_id(group, comm)
    return _join_by(unique_id, group, comm, device, limit_s)


def _two_ranks_on_one(group: Group, identity: str) -> ConfigurationError | None:
    """Return the error of two ranks on one GPU, where NCCL refuses or hangs; None if none share, or they may share."""
    entries = group.node_comm.allgather((group.comm.rank, identity))
    rank_of = [rank for rank, _ in entries]
    identities = [rank_identity for _, rank_identity in entries]
    shared = shared_devices(identities)
    if not shared or nccl_may_share_devices(read_environment()):
        return None
    device, local_ranks = next(iter(shared.items()))
    ranks = " and ".join(str(rank_of[local_rank]) for local_rank in local_ranks)
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
            unique_id = load_nccl().get_unique_id()
            packed[:] = pack_unique_id(unique_id)
        except RuntimeError as caught:
            error = _failure(comm, caught)
    group.agree(error, group.comm)
    comm.Bcast(packed, 0)
    return unpack_unique_id(packed)


def pack_unique_id(unique_id: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return a unique id as (129,) uint8: its form, then its bytes. cupy 14 has bytes, before it had signed numbers."""
    is_bytes = isinstance(unique_id, bytes)
    unsigned_numbers = [number & 0xFF for number in unique_id]
    return np.array([is_bytes, *unsigned_numbers], np.uint8)


def unpack_unique_id(packed: np.ndarray[Any, np.dtype[np.uint8]]) -> Any:
    """Return the unique id that `pack_unique_id` packed."""
    packed_bytes = packed[1:]
    if packed[0]:
        return packed_bytes.tobytes()
    return tuple(packed_bytes.view(np.int8).tolist())


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
    """Return cupy's communicator. NCCL makes it when all ranks have arrived, so a separate thread waits for it."""
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
            nccl = load_nccl()
            size = self._comm.size
            self.inner = nccl.NcclCommunicator(size, self._unique_id, self._comm.rank)
        except Exception as error:  # noqa: BLE001 - handed to the thread that waits, which raises it on all ranks
            self.error = error

    def wait(self, limit_s: float) -> HpcdistError | None:
        """Wait for NCCL, for another rank's failure, or for the limit; return this rank's own error."""

        def has_failed() -> bool:
            return bool(self._comm.Iprobe(MPI.ANY_SOURCE, _FAILED_TAG))

        is_over = wait_until(lambda: not self._thread.is_alive() or has_failed(), limit_s, yields=0)
        if not is_over:
            return late("nccl", limit_s, "some ranks", f"rank {self._comm.rank}")
        if self._thread.is_alive() or has_failed():
            self._comm.Recv(bytearray(0), MPI.ANY_SOURCE, _FAILED_TAG)
            return None
        if self.error:
            return _failure(self._comm, self.error)
        return None

    def release_others(self) -> None:
        """Send a message to the ranks that wait inside NCCL for this one."""
        for rank in range(self._comm.size):
            if rank != self._comm.rank:
                self._comm.Isend(bytearray(0), rank, _FAILED_TAG).Free()

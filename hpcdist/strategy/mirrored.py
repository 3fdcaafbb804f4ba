"""MirroredStrategy: the replicas of one machine."""

import logging
from collections.abc import Sequence

import torch

from hpcdist.collectives.cross_device_ops import CrossDeviceOps
from hpcdist.collectives.ops import ReduceOp
from hpcdist.errors import ConfigurationError, agreed
from hpcdist.runtime.process import make_world
from hpcdist.strategy.devices import parse_device
from hpcdist.strategy.multi_worker import MultiWorkerMirroredStrategy

logger = logging.getLogger("hpcdist")


class MirroredStrategy(MultiWorkerMirroredStrategy):
    """Synchronous training on all ranks of one machine; each rank is one process with one device.

    >>> strategy = hpcdist.MirroredStrategy()
    >>> with strategy.scope():
    ...     model = torch.nn.Linear(64, 10)

    Collective over all ranks.

    Args:
        devices: one name for each rank, such as "/gpu:1": start one rank for each device. Modules, tensors and
            variables made in the scope and in `run` are on the rank's device, and batches are moved to it. Default:
            see `device` of `MultiWorkerMirroredStrategy`; a single rank that sees several GPUs logs that it uses one.
            Several names of the host for a single rank, such as ["/cpu:0", "/cpu:1"], mean one replica for each.
        cross_device_ops: algorithm that sums gradients: `HierarchicalCopyAllReduce` (default), `NcclAllReduce`,
            `ReductionToOneDevice`, or your own `CrossDeviceOps`.
        num_replicas: number of replicas, as for `MultiWorkerMirroredStrategy`.
        gradient_op: SUM or MEAN, as for `MultiWorkerMirroredStrategy`.

    Raises:
        ConfigurationError: on every rank alike, when ranks are on several hosts, when the number of ranks is not the
            number of devices, or when torch cannot use a rank's device.
    """

    def __init__(
        self,
        devices: Sequence[str] | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        *,
        num_replicas: int | None = None,
        gradient_op: ReduceOp | str | None = None,
    ) -> None:
        world = make_world()
        name = type(self).__name__
        if world.n_hosts > 1:
            raise agreed(
                ConfigurationError(
                    f"{name}: expected all ranks on one host, got {world.n_hosts} hosts; use "
                    f"MultiWorkerMirroredStrategy."
                )
            )
        n_ranks = world.role_comm.size
        if (
            n_ranks == 1
            and devices is not None
            and len(devices) > 1
            and num_replicas in (None, len(devices))
        ):
            # several names of the host: a replica of the only rank for each
            with world.agreed(world.role_comm):
                kinds = {parse_device(device, name).type for device in devices}
                if kinds == {"cpu"}:
                    num_replicas = len(devices)
                    devices = [devices[0]]
        if devices is not None and len(devices) != n_ranks:
            raise agreed(
                ConfigurationError(
                    f"{name}: expected one rank for each of {len(devices)} devices, got {n_ranks} ranks; "
                    f"start by mpirun -n {len(devices)}, or leave devices out."
                )
            )
        rank_device = None if devices is None else devices[world.role_comm.rank]
        n_gpus = torch.cuda.device_count()
        if devices is None and n_ranks == 1 and n_gpus > 1:
            logger.warning(
                "%s: expected a rank for each GPU, to use them all, got 1 rank and %d visible GPUs; start by "
                "mpirun -n %d.",
                name,
                n_gpus,
                n_gpus,
            )
        super().__init__(
            num_replicas=num_replicas,
            gradient_op=gradient_op,
            cross_device_ops=cross_device_ops,
            device=rank_device,
        )

"""MirroredStrategy: the replicas of one machine."""

from collections.abc import Sequence

from hpcdist.collectives.cross_device_ops import CrossDeviceOps
from hpcdist.errors import ConfigurationError, agreed
from hpcdist.strategy.multi_worker import MultiWorkerMirroredStrategy
from hpcdist.strategy.reduce_op import ReduceOp
from hpcdist.world import make_world


class MirroredStrategy(MultiWorkerMirroredStrategy):
    """Synchronous training on all ranks of one machine; each rank is one process with one device.

    Collective: all ranks.

    Args:
        devices: one name for each rank, for tf.distribute's sake: start as many ranks as there are devices.
        cross_device_ops: what sums gradients: `HierarchicalCopyAllReduce` (default), `NcclAllReduce`,
            `ReductionToOneDevice`, or a `CrossDeviceOps` of your own.
        gradient_op: as `MultiWorkerMirroredStrategy`.

    Raises:
        ConfigurationError: on every rank alike, when ranks are on several hosts, or not as many as devices.
    """

    def __init__(
        self,
        devices: Sequence[str] | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        *,
        gradient_op: ReduceOp | str | None = None,
    ) -> None:
        world = make_world()
        if world.n_hosts > 1:
            raise agreed(
                ConfigurationError(
                    f"MirroredStrategy: expected all ranks on one host, got {world.n_hosts}; use "
                    f"MultiWorkerMirroredStrategy."
                )
            )
        n_ranks = world.role_comm.size
        if devices is not None and len(devices) != n_ranks:
            raise agreed(
                ConfigurationError(
                    f"MirroredStrategy: expected one rank for each of {len(devices)} devices, got {n_ranks} ranks; "
                    f"start by mpirun -n {len(devices)}, or leave devices out."
                )
            )
        super().__init__(gradient_op=gradient_op, cross_device_ops=cross_device_ops)

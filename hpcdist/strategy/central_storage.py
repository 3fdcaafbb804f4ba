"""CentralStorageStrategy: variables once on a node, used by all of its ranks."""

from collections.abc import Sequence

import torch

from hpcdist.collectives.ops import ReduceOp
from hpcdist.errors import ConfigurationError, agreed
from hpcdist.storage.host_storage import HostStorage
from hpcdist.storage.storage import PrivateStorage, Storage
from hpcdist.strategy.devices import parse_device
from hpcdist.strategy.mirrored import MirroredStrategy


class CentralStorageStrategy(MirroredStrategy):
    """Synchronous training on all ranks of one machine, which hold a model's parameters once.

    At the first use of a model its parameters move to memory that the ranks share. Gradients are summed as by
    MultiWorkerMirroredStrategy, and the weights have the same bits; the chief alone makes the optimizer's step, so that
    the optimizer's state exists once, too. Buffers, such as BatchNorm's statistics, stay with each rank and are
    averaged. Parameters on GPUs are copies of the parameters on the host, renewed after every step.

    Weights change in `optimizer.step()` and `extended.update`. Other code that writes into them, such as clipping of
    weights, belongs on the chief, between barriers. With one rank, everything is on its device.

    >>> strategy = hpcdist.CentralStorageStrategy()
    >>> with strategy.scope():
    ...     model = torch.nn.Linear(64, 10)

    Collective over all ranks.

    Args:
        compute_devices: one name for each rank, such as "/gpu:1", where modules and tensors of the scope and of `run`
            are; default: see `device` of `MultiWorkerMirroredStrategy`.
        parameter_device: device of parameters, which must be the default: "cpu"; with one rank, its compute device.
        num_replicas: number of replicas, as for `MultiWorkerMirroredStrategy`.
        gradient_op: SUM or MEAN, as for `MultiWorkerMirroredStrategy`.

    Raises:
        ConfigurationError: on every rank alike, when ranks are on several hosts or cannot share memory, when there are
            not as many as devices, when torch cannot use a device, or when parameters cannot be on parameter_device.
    """

    def __init__(
        self,
        compute_devices: Sequence[str] | None = None,
        parameter_device: str | None = None,
        *,
        num_replicas: int | None = None,
        gradient_op: ReduceOp | str | None = None,
    ) -> None:
        super().__init__(compute_devices, num_replicas=num_replicas, gradient_op=gradient_op)
        device = self._parameter_device
        with self.world.agreed(self._comm):
            if parameter_device is not None:
                device = parse_device(parameter_device)
        if device != self._parameter_device:
            raise agreed(
                ConfigurationError(
                    f"CentralStorageStrategy: expected parameter_device {str(self._parameter_device)!r} with "
                    f"{self._comm.size} ranks, got {parameter_device!r}; leave it out."
                )
            )
        if not self.engine.managed.storage.is_private and not self.group.facts.can_share_memory:
            raise agreed(
                ConfigurationError(
                    "CentralStorageStrategy: expected ranks that can share memory, got a node that forbids it; use "
                    "MultiWorkerMirroredStrategy."
                )
            )

    def _make_storage(self) -> Storage:
        if self._comm.size == 1:
            return PrivateStorage()
        return HostStorage(self.group, is_divided=False)

    @property
    def _parameter_device(self) -> torch.device:
        if self.engine.managed.storage.is_private:
            return self.device
        return torch.device("cpu")

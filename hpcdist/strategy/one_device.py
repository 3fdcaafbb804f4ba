"""OneDeviceStrategy: one replica on a named device."""

import logging

import torch

from hpcdist.cluster.environment import launcher_of, read_environment
from hpcdist.cluster.resolvers import ClusterResolver, SimpleClusterResolver
from hpcdist.cluster.spec import ClusterSpec
from hpcdist.program.single_replica import SingleReplicaSteps
from hpcdist.strategy.base import Strategy
from hpcdist.strategy.cross_replica_context import Parts
from hpcdist.strategy.devices import parse_device, require_device
from hpcdist.strategy.inputs import OneInput
from hpcdist.strategy.sums import NoSums

logger = logging.getLogger("hpcdist")


class OneDeviceStrategy(Strategy):
    """One replica on one device: tensors and modules made in the scope and in `run` are there, inputs are moved there.

    It does not communicate, and ignores the cluster: as with tf.distribute, each of several ranks trains another model;
    the first rank warns of that. `is_chief` is true on all of them.

    >>> strategy = hpcdist.OneDeviceStrategy("cpu")
    >>> with strategy.scope():
    ...     model = torch.nn.Linear(64, 10)

    Not collective.

    Args:
        device: name of the device, such as "cpu", "/gpu:0", "cuda:1" or "/job:worker/task:0/device:GPU:0".

    Raises:
        ConfigurationError: when the name names no device, or torch cannot use the device; on this rank only.
    """

    def __init__(self, device: str | torch.device) -> None:
        name = type(self).__name__
        torch_device = parse_device(device, name)
        require_device(torch_device, name)
        sums = NoSums(SingleReplicaSteps())
        super().__init__(Parts(sums=sums, inputs=OneInput(torch_device), device=torch_device))
        launcher = launcher_of(read_environment())
        if launcher is not None and launcher.size > 1 and launcher.rank == 0:
            logger.warning(
                "%s: expected one rank, got %d, each of which trains a model of its "
                "own; to train one model together use MirroredStrategy or MultiWorkerMirroredStrategy.",
                name,
                launcher.size,
            )

    @property
    def cluster_resolver(self) -> ClusterResolver:
        """A cluster of this process alone."""
        return SimpleClusterResolver(ClusterSpec({"worker": ["this process"]}), "worker", 0)

"""TPUStrategy: replicas on XLA devices, through torch_xla. The one door to torch_xla."""

import weakref
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from hpcdist.cluster.resolvers import ClusterResolver
from hpcdist.cluster.spec import ClusterSpec
from hpcdist.collectives.ops import ReduceOp
from hpcdist.errors import ConfigurationError, UsageError
from hpcdist.program import torch_hooks
from hpcdist.runtime.process import make_world
from hpcdist.strategy.context import Replica
from hpcdist.strategy.multi_worker import MultiWorkerMirroredStrategy


def load_xla(caller: str) -> Any:
    """Return torch_xla.

    Raises:
        ConfigurationError: when it is not there, or finds no device; on this rank only.
    """
    try:
        import torch_xla

        torch_xla.device()
    except (ImportError, RuntimeError, OSError) as error:
        text = " ".join(str(error).split())[:160]
        raise ConfigurationError(
            f"{caller}: expected torch_xla and an XLA device, got {type(error).__name__} ({text}); install the "
            f"torch_xla of this torch, {torch.__version__}, by pip install 'torch_xla[tpu]', or, to try on a host, "
            f"pip install torch_xla and set PJRT_DEVICE=CPU."
        ) from None
    return torch_xla


class TPUStrategy(MultiWorkerMirroredStrategy):
    """Synchronous training on XLA devices: one for each rank. Modules and tensors of the scope and of `run` are there.

    Gradients pass through host memory and MPI. Each optimizer's step ends XLA's graph, and XLA's random numbers are
    keyed by step as torch's are. Make the strategy before the first backward of the process, at which torch looks up
    the devices. It was run with PJRT_DEVICE=CPU, not on a TPU.

    >>> strategy = hpcdist.TPUStrategy(hpcdist.TPUClusterResolver())
    >>> with strategy.scope():
    ...     model = torch.nn.Linear(64, 10)

    Collective over all ranks.

    Args:
        tpu_cluster_resolver: a `TPUClusterResolver`; default: a new one.
        num_replicas: number of replicas, as for `MultiWorkerMirroredStrategy`.
        gradient_op: SUM or MEAN, as for `MultiWorkerMirroredStrategy`.

    Raises:
        ConfigurationError: on every rank alike, without torch_xla or an XLA device.
    """

    def __init__(
        self,
        tpu_cluster_resolver: ClusterResolver | None = None,
        *,
        num_replicas: int | None = None,
        gradient_op: ReduceOp | str | None = None,
    ) -> None:
        world = make_world()
        with world.agreed(world.role_comm):
            self._xla = load_xla("TPUStrategy")
        super().__init__(tpu_cluster_resolver, num_replicas=num_replicas, gradient_op=gradient_op)
        self._seed: int | None = None
        weakref.finalize(self, torch_hooks.after_any_step(self._after_step).remove)

    @property
    def device(self) -> torch.device:
        """This rank's XLA device."""
        device: torch.device = self._xla.device()
        return device

    @property
    def _placed_on(self) -> torch.device:
        return self.device

    def _choose_batch_device(self, device_of_rank: torch.device | None) -> None:
        """Leave batches on the host, where the program finds them."""

    def _call(
        self,
        replica: Replica,
        fn: Any,
        args: Any,
        kwargs: dict[str, Any],
    ) -> Any:
        self._key_random_numbers()
        return super()._call(replica, fn, args, kwargs)

    def _after_step(self, optimizer: Optimizer) -> None:
        self._xla.sync()
        self._key_random_numbers()

    def _key_random_numbers(self) -> None:
        """Give XLA the seed of torch's generator, whenever it has changed."""
        seed = torch.default_generator.initial_seed()
        if seed != self._seed:
            self._seed = seed
            self._xla.manual_seed(seed)


def experimental_connect_to_cluster(
    cluster_spec_or_resolver: Any,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Check the argument; ranks are connected when MPI starts.

    Args:
        cluster_spec_or_resolver: a ClusterSpec or a ClusterResolver.
        args: accepted for compatibility.
        kwargs: accepted for compatibility.

    Raises:
        UsageError: for anything else.
    """
    if not isinstance(cluster_spec_or_resolver, (ClusterSpec, ClusterResolver)):
        raise UsageError(
            f"experimental_connect_to_cluster: expected a ClusterSpec or a ClusterResolver, got "
            f"{type(cluster_spec_or_resolver).__name__}; pass TPUClusterResolver()."
        )


def initialize_tpu_system(cluster_resolver: ClusterResolver | None = None) -> tuple[str, ...]:
    """Return the names of the XLA devices of this process; torch_xla starts them by itself. Not collective.

    Raises:
        ConfigurationError: without torch_xla or an XLA device; on this rank only.
    """
    return (str(load_xla("initialize_tpu_system").device()),)

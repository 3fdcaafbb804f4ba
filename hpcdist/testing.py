"""For tests of programs that use hpcdist: strategies by name.

>>> @pytest.mark.parametrize("name", hpcdist.testing.STRATEGIES)
... def test_my_step(name):
...     strategy = hpcdist.testing.STRATEGIES[name]()

Run such tests by `mpirun -n 2 python -m pytest --with-mpi`, and on one rank. A collective raises its errors on all
ranks alike; a rank that fails alone ends the job after its report.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from hpcdist.strategy.base import Strategy
from hpcdist.strategy.central_storage import CentralStorageStrategy
from hpcdist.strategy.mirrored import MirroredStrategy
from hpcdist.strategy.multi_worker import MultiWorkerMirroredStrategy
from hpcdist.strategy.one_device import OneDeviceStrategy

#: Name -> function that makes a new strategy; all run on CPUs, without servers. As tf.distribute's
#: strategy_combinations. Those with a mirror on each rank need losses scaled by `compute_average_loss`.
#: `central_storage` and `mirrored` need one host.
STRATEGIES: Mapping[str, Callable[[], Strategy]] = MappingProxyType(
    {
        "default": Strategy,
        "one_device": lambda: OneDeviceStrategy("cpu"),
        "mirrored": MirroredStrategy,
        "central_storage": CentralStorageStrategy,
        "multi_worker": MultiWorkerMirroredStrategy,
        "multi_worker_with_8_replicas": lambda: MultiWorkerMirroredStrategy(num_replicas=8),
    }
)

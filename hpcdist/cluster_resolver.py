"""The path tf.distribute.cluster_resolver: aliases, resolved at first use."""

from typing import TYPE_CHECKING, Any

import hpcdist

if TYPE_CHECKING:
    from hpcdist import ClusterResolver as ClusterResolver
    from hpcdist import MPIClusterResolver as MPIClusterResolver
    from hpcdist import SimpleClusterResolver as SimpleClusterResolver
    from hpcdist import SlurmClusterResolver as SlurmClusterResolver
    from hpcdist import TFConfigClusterResolver as TFConfigClusterResolver
    from hpcdist import TPUClusterResolver as TPUClusterResolver
    from hpcdist import UnionResolver as UnionResolver

__all__ = [
    "ClusterResolver",
    "MPIClusterResolver",
    "SimpleClusterResolver",
    "SlurmClusterResolver",
    "TFConfigClusterResolver",
    "TPUClusterResolver",
    "UnionResolver",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(
            f"module 'hpcdist.cluster_resolver' has no attribute {name!r}; it has {', '.join(__all__)}"
        )
    found = globals()[name] = getattr(hpcdist, name)
    return found


def __dir__() -> list[str]:
    return [*globals(), *__all__]

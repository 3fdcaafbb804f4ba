"""The path tf.distribute.experimental: aliases, resolved at first use."""

from typing import TYPE_CHECKING, Any

import hpcdist

if TYPE_CHECKING:
    from hpcdist import CentralStorageStrategy as CentralStorageStrategy
    from hpcdist import CollectiveCommunication as CollectiveCommunication
    from hpcdist import CommunicationImplementation as CommunicationImplementation
    from hpcdist import CommunicationOptions as CollectiveHints
    from hpcdist import CommunicationOptions as CommunicationOptions
    from hpcdist import MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy
    from hpcdist import PreemptionCheckpointHandler as PreemptionCheckpointHandler
    from hpcdist import TerminationConfig as TerminationConfig
    from hpcdist import TPUStrategy as TPUStrategy
    from hpcdist import ValueContext as ValueContext

__all__ = [
    "CentralStorageStrategy",
    "CollectiveCommunication",
    "CollectiveHints",
    "CommunicationImplementation",
    "CommunicationOptions",
    "MultiWorkerMirroredStrategy",
    "PreemptionCheckpointHandler",
    "TPUStrategy",
    "TerminationConfig",
    "ValueContext",
]
#: Names that are others in hpcdist.
_RENAMED = {"CollectiveHints": "CommunicationOptions"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'hpcdist.experimental' has no attribute {name!r}; it has {', '.join(__all__)}")
    found = globals()[name] = getattr(hpcdist, _RENAMED.get(name, name))
    return found


def __dir__() -> list[str]:
    return [*globals(), *__all__]

"""What users choose about communication: the algorithm, packs, time limits, the wire between hosts."""

import enum
from dataclasses import dataclass
from typing import Any

from hpcdist.errors import ConfigurationError

#: What gradients may be written as between hosts; sums are always float32.
WIRE_DTYPES = ("bfloat16", "float16")


class CommunicationImplementation(enum.Enum):
    """Algorithms of all-reduce.

    AUTO: decided by size and placement. RING, NCCL: as in tf.distribute. MPI: the library's own Allreduce.
    SHARED_MEMORY: in one node. HIERARCHICAL: shared memory in each node, lanes across nodes. HALVING: recursive halving
    and doubling.
    """

    AUTO = "AUTO"
    RING = "RING"
    NCCL = "NCCL"
    MPI = "MPI"
    SHARED_MEMORY = "SHARED_MEMORY"
    HIERARCHICAL = "HIERARCHICAL"
    HALVING = "HALVING"

    @classmethod
    def parse(cls, name: Any) -> "CommunicationImplementation":
        """Return the member for a member, its name in any case, or None (AUTO).

        Raises:
            ConfigurationError: for anything else.
        """
        if name is None:
            return _AUTO
        text = str(name.value if isinstance(name, enum.Enum) else name).upper()
        if text not in cls.__members__:
            raise ConfigurationError(
                f"all_reduce: expected an implementation of {', '.join(cls.__members__)}, got {name!r}; name one."
            )
        return cls[text]


_AUTO = CommunicationImplementation.AUTO
#: The name that tf.distribute had before, and a short one.
CollectiveCommunication = Implementation = CommunicationImplementation


@dataclass(frozen=True)
class CommunicationOptions:
    """Choices for the all-reduce of gradients, as `tf.distribute.experimental.CommunicationOptions` and two of ours.

    Attributes:
        bytes_per_pack: largest bucket of gradients; 0: from the measured latency and bandwidth of the network.
        timeout_seconds: a step's all-reduce that takes longer ends the job; None: HPCDIST_TIMEOUT_S.
        implementation: see `CommunicationImplementation`; a name in any case will do.
        is_ordered: sum in an order fixed by replica numbers on any placement. None: where it costs no more bytes: on
            one host, and on hosts that hold aligned powers of two of replicas.
        wire_dtype: "bfloat16" or "float16" halves what gradients cost between hosts, but for the bucket that is
            complete last, which holds exact counts; sums stay float32. What rounding takes away is added at the next
            step, and forgotten by a restart. None: gradients travel as they are.

    Raises:
        ConfigurationError: a ValueError, for options that cannot be.
    """

    bytes_per_pack: int = 0
    timeout_seconds: float | None = None
    implementation: CommunicationImplementation | str = CommunicationImplementation.AUTO
    is_ordered: bool | None = None
    wire_dtype: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "implementation", CommunicationImplementation.parse(self.implementation))
        if self.bytes_per_pack < 0:
            _refuse("bytes_per_pack of 0 or more", self.bytes_per_pack, "leave it out to have it chosen")
        if self.timeout_seconds is not None and not 0 < self.timeout_seconds < float("inf"):
            _refuse("timeout_seconds above 0", self.timeout_seconds, "leave it out for HPCDIST_TIMEOUT_S")
        if not self.may_be_ordered and (self.wire_dtype is not None or self.is_ordered is not None):
            _refuse("AUTO or HIERARCHICAL with wire_dtype or is_ordered", self.implementation, "drop one")
        if self.wire_dtype not in (None, *WIRE_DTYPES):
            _refuse(f"wire_dtype of {', '.join(WIRE_DTYPES)} or None", self.wire_dtype, "name one of them")

    @property
    def may_be_ordered(self) -> bool:
        """Whether the algorithm lets the order of sums be chosen."""
        return self.implementation in (Implementation.AUTO, Implementation.HIERARCHICAL)


def _refuse(expected: str, got: object, advice: str) -> None:
    raise ConfigurationError(f"CommunicationOptions: expected {expected}, got {got!r}; {advice}.")

"""What users choose about communication: the algorithm, built in or written by the user, packs, limits, the wire."""

import abc
import enum
from dataclasses import dataclass
from typing import Any

from hpcdist.dtypes import HALF
from hpcdist.errors import ConfigurationError


class AllReduceAlgorithm(abc.ABC):
    """The base class of an all-reduce that you write. Pass an object of your subclass as the implementation.

    >>> class ByGather(hpcdist.AllReduceAlgorithm):
    ...     def all_reduce(self, array, comm, op):
    ...         array[...] = sum(comm.allgather(array))
    >>> hpcdist.all_reduce(numpy.ones(3), implementation=ByGather())

    Attributes:
        stands_for: the built-in implementation that this class only names; None for a class that has an algorithm.
            A subclass that overrides `all_reduce` has an algorithm.
    """

    stands_for: "CommunicationImplementation | None" = None

    @abc.abstractmethod
    def all_reduce(self, array: Any, comm: Any, op: Any) -> None:
        """Replace `array` by its reduction over the ranks of `comm`.

        Collective over `comm`, an mpi4py communicator that nothing else uses meanwhile. For gradients on several hosts
        the call is made in a background thread.

        Args:
            array: (n_elements,) numpy array in host memory, C-contiguous; overwritten. Gradients are float32 or
                float64.
            comm: the ranks of the strategy or of the call; `array` holds the sum over a rank's own replicas.
            op: the reduction by MPI's name: MPI.SUM for gradients, sums and means; MPI.MIN, MPI.MAX, MPI.PROD.
        """


class CommunicationImplementation(enum.Enum):
    """Algorithms of all-reduce.

    AUTO: chosen by size and placement; `route.py` has the table.
    RING, NCCL: as in tf.distribute.
    MPI: the library's own Allreduce.
    SHARED_MEMORY: in one host.
    HIERARCHICAL: shared memory in each host, lanes between hosts.
    HALVING: recursive halving and doubling.
    """

    AUTO = "AUTO"
    RING = "RING"
    NCCL = "NCCL"
    MPI = "MPI"
    SHARED_MEMORY = "SHARED_MEMORY"
    HIERARCHICAL = "HIERARCHICAL"
    HALVING = "HALVING"

    @classmethod
    def parse(cls, value: Any) -> "CommunicationImplementation | AllReduceAlgorithm":
        """Return the member for a member, its name in any case, or None (AUTO); an AllReduceAlgorithm as it is.

        Raises:
            ConfigurationError: for anything else.
        """
        if value is None:
            return _AUTO
        if isinstance(value, cls):
            return value
        if isinstance(value, AllReduceAlgorithm):
            return _named_by(value) or value
        if isinstance(value, enum.Enum):
            value = value.value
        text = str(value).upper()
        if text not in cls.__members__:
            raise ConfigurationError(
                f"all_reduce: expected an implementation of {', '.join(cls.__members__)}, or an AllReduceAlgorithm, "
                f"got {value!r}; name one."
            )
        return cls[text]


_AUTO = CommunicationImplementation.AUTO
#: The name that tf.distribute had before, and a short one.
CollectiveCommunication = Implementation = CommunicationImplementation


@dataclass(frozen=True)
class CommunicationOptions:
    """Choices for the all-reduce of gradients, as `tf.distribute.experimental.CommunicationOptions` and four of ours.

    >>> options = hpcdist.CommunicationOptions(bytes_per_pack=1 << 20, implementation="RING")
    >>> strategy = hpcdist.MultiWorkerMirroredStrategy(communication_options=options)

    Attributes:
        bytes_per_pack: bytes of the largest bucket of gradients; 0 chooses it from the measured latency and bandwidth
            of the network.
        timeout_seconds: time after which an all-reduce ends the job; None for HPCDIST_TIMEOUT_S.
        implementation: a `CommunicationImplementation`, its name in any case, or an `AllReduceAlgorithm`.
        is_ordered: whether sums are made in an order fixed by replica numbers, on any placement. None makes them so
            where this costs no more bytes: on one host, and on hosts that hold aligned powers of two of replicas.
        wire_dtype: dtype in which gradients travel between hosts. "bfloat16" or "float16" halves their bytes, except in
            the bucket that is complete last, which holds exact counts; sums stay float32. The rounding error is added
            at the next step, and lost at a restart. None for the gradients' own dtype.
        local_steps: number N of steps between averages, of all optimizers of the strategy together: a multiple of the
            steps of one iteration. Above 1, replicas step on their own gradients (local SGD), and weights, buffers and
            the state of optimizers are averaged every N steps. Saves and stops wait for the average; a save by the
            program itself and the end of an epoch of fit end the round. Not for GradScaler, mixed_float16 and LBFGS.
        first_local_step: number of the first local step (post-local SGD); gradients are summed before it.

    Raises:
        ConfigurationError: a ValueError, for options that do not fit together.
    """

    bytes_per_pack: int = 0
    timeout_seconds: float | None = None
    implementation: CommunicationImplementation | AllReduceAlgorithm | str = (
        CommunicationImplementation.AUTO
    )
    is_ordered: bool | None = None
    wire_dtype: str | None = None
    local_steps: int = 1
    first_local_step: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "implementation", CommunicationImplementation.parse(self.implementation)
        )
        if self.bytes_per_pack < 0:
            _refuse(
                "bytes_per_pack of 0 or more", self.bytes_per_pack, "leave it out to have it chosen"
            )
        if self.timeout_seconds is not None and not 0 < self.timeout_seconds < float("inf"):
            _refuse(
                "timeout_seconds above 0",
                self.timeout_seconds,
                "leave it out for HPCDIST_TIMEOUT_S",
            )
        if not self.may_be_ordered and (self.wire_dtype is not None or self.is_ordered is not None):
            _refuse(
                "AUTO or HIERARCHICAL with wire_dtype or is_ordered",
                self.implementation,
                "drop one",
            )
        if self.local_steps < 1 or self.first_local_step < 0:
            step_options = (self.local_steps, self.first_local_step)
            _refuse(
                "local_steps of 1 or more and first_local_step of 0 or more",
                step_options,
                "leave them out",
            )
        if self.wire_dtype not in (None, *HALF):
            _refuse(f"wire_dtype of {', '.join(HALF)} or None", self.wire_dtype, "name one of them")

    @property
    def may_be_ordered(self) -> bool:
        """Whether the algorithm lets the order of sums be chosen."""
        return self.implementation in (Implementation.AUTO, Implementation.HIERARCHICAL)


def _named_by(algorithm: AllReduceAlgorithm) -> CommunicationImplementation | None:
    """Return the built-in implementation that an object only names; None if its class has its own `all_reduce`."""
    for kind in type(algorithm).__mro__:
        if "stands_for" in vars(kind):
            named: CommunicationImplementation | None = vars(kind)["stands_for"]
            return named
        if "all_reduce" in vars(kind):
            return None
    return None


def _refuse(expected: str, actual: object, advice: str) -> None:
    raise ConfigurationError(
        f"CommunicationOptions: expected {expected}, got {actual!r}; {advice}."
    )

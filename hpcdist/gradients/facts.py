"""The facts that travel with every sum of gradients: numbers that each replica adds, and whose sums all ranks get."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from hpcdist.runtime.step_flags import N_NUMBERS

#: Numbers that must agree travel modulo these, so that sums of squares over thousands of replicas are exact in float32.
MODULI = (31, 29)
#: Number of numbers in `Facts`, and, with the step flags, behind the counts of gradients and buffers.
_N_FACTS = 6 + 2 * (1 + 2 * len(MODULI))
N_BEHIND_COUNTS = _N_FACTS + N_NUMBERS
#: Index of the weight of all replicas among all sums.
_WEIGHT = -N_BEHIND_COUNTS + 5


class Contribution(NamedTuple):
    """Numbers and tensors that one replica adds to a sum outside of the buckets.

    Attributes:
        is_touched: for each slot, whether the replica has a gradient.
        buffers: for each float buffer, its values if the replica has changed it.
        sparse: gradients of the slots that are in no bucket.
        weight: rows of the replica.
        doubtful_rows: number of rows that must be equal on all replicas, as gradients are weighted wrongly otherwise.
            None where nothing is in doubt.
        refusal: text that explains why the gradients cannot be weighted; None if they can.
        key: number that names the batch; None where it is not known.
        has_entry: whether a forward was seen that could begin the iteration.
        has_peeks: whether passes were begun whose batches were not used.
        has_crossed: whether the backward went through the sum of an all_reduce.
    """

    is_touched: Sequence[bool]
    buffers: Sequence[Tensor | None]
    sparse: Sequence[Tensor | None]
    weight: float
    doubtful_rows: int | None
    refusal: str | None
    key: int | None
    has_entry: bool
    has_peeks: bool
    has_crossed: bool

    def counts(self) -> list[float]:
        """Return flags: which gradients and buffers exist, and which gradients of sparse slots are dense."""
        are_changed = [buffer is not None for buffer in self.buffers]
        are_dense = [gradient is not None and not gradient.is_sparse for gradient in self.sparse]
        return [*self.is_touched, *are_changed, *are_dense]


class Facts(NamedTuple):
    """Facts of a backward that all ranks get beside its sums: sums over all replicas of numbers that each adds.

    Attributes:
        n_doubtful: number of replicas that may be weighted wrongly.
        n_refused: number of replicas that cannot be weighted.
        n_keyed: number of replicas that know which batch they have used.
        n_entered: number of replicas that have seen a forward which could begin the iteration.
        n_peeked: number of replicas that have begun passes whose batches were not used.
        weight: rows of all replicas.
        numbers: sum of the numbers of the backward, and sum of their squares.
        keys: for each modulus, the sum of the remainders of the batch's keys, and the sum of their squares.
        states: for each modulus, the same sums of digests of the state that must be equal on all ranks.
    """

    n_doubtful: float
    n_refused: float
    n_keyed: float
    n_entered: float
    n_peeked: float
    weight: float
    numbers: tuple[float, float]
    keys: tuple[tuple[float, float], ...]
    states: tuple[tuple[float, float], ...]

    @classmethod
    def decode(cls, values: Sequence[float]) -> "Facts":
        """Return the facts that `encode_facts` made into numbers."""
        n_doubtful, n_refused, n_keyed, n_entered, n_peeked, weight, *pairs = values
        numbers, *digests = zip(pairs[::2], pairs[1::2], strict=True)
        keys = tuple(digests[: len(MODULI)])
        states = tuple(digests[len(MODULI) :])
        return cls(
            n_doubtful,
            n_refused,
            n_keyed,
            n_entered,
            n_peeked,
            weight,
            numbers,
            keys,
            states,
        )

    @property
    def key(self) -> list[int] | None:
        """Remainders of the key of the batch; None if no replica knows it."""
        if not self.n_keyed:
            return None
        return [round(total / self.n_keyed) for total, _ in self.keys]

    @property
    def is_same_batch(self) -> bool:
        """Whether all replicas that know their batch have used the same batch."""
        return all(self.n_keyed * squares == total * total for total, squares in self.keys)

    def is_same_backward(self, n_replicas: int) -> bool:
        """Return whether all replicas are at a backward of the same number."""
        total, squares = self.numbers
        return n_replicas * squares == total * total

    def is_same_state(self, n_replicas: int) -> bool:
        """Return whether all replicas have the same digest of the state that must be equal."""
        return all(n_replicas * squares == total * total for total, squares in self.states)


def encode_facts(
    contribution: Contribution,
    backward_number: int,
    state: int = 0,
) -> list[float]:
    """Return the numbers that a replica adds to the facts of a backward.

    Args:
        contribution: contribution of the replica outside of the buckets.
        backward_number: number of this backward, from 1.
        state: digest of the state that must be equal on all ranks.
    """
    number = backward_number % MODULI[0]
    values: list[float] = [
        contribution.doubtful_rows is not None,
        contribution.refusal is not None,
        contribution.key is not None,
        contribution.has_entry,
        contribution.has_peeks,
        contribution.weight,
        number,
        number * number,
    ]
    for digest in (contribution.key or 0, state):
        for modulus in MODULI:
            remainder = digest % modulus
            values += (remainder, remainder * remainder)
    return values


def counts_in(totals: Sequence[float]) -> Sequence[float]:
    """Return the sums of `Contribution.counts` among all sums that travel with the gradients."""
    return totals[:-N_BEHIND_COUNTS]


def facts_in(totals: Sequence[float]) -> Facts:
    """Return the facts among all sums that travel with the gradients."""
    return Facts.decode(totals[-N_BEHIND_COUNTS:-N_NUMBERS])


def weight_in(totals: Sequence[float]) -> float:
    """Return the rows of all replicas among all sums that travel with the gradients."""
    return totals[_WEIGHT]


def flags_in(totals: Sequence[float]) -> Sequence[float]:
    """Return the sums of the step flags among all sums that travel with the gradients."""
    return totals[-N_NUMBERS:]

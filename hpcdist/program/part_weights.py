"""The number of rows by which a replica's gradients are weighted, from the parts that a backward may use. Pure.

With ReduceOp.MEAN the gradients of a batch are the sum over all replicas of n_r / N times the gradient of the mean over
the n_r rows of replica r, where N are the rows of all replicas. Parts of several batches combine in one backward, or
may be mistaken for each other, if they have the same fraction n_r / N on every replica.
"""

from collections.abc import Sequence
from typing import NamedTuple

from hpcdist.runtime.parts import Part


class Weight(NamedTuple):
    """The weight of a backward on one replica.

    Attributes:
        rows: rows of the replica; 1 where none are known.
        is_planned: whether the rows are known.
        total_rows: rows of all replicas; None where they are not known.
        key: number that must be the same on all replicas that have one. It names the batch, or is the number of rows
            that nobody has planned. None where neither is known.
        doubtful_rows: number that must be the same on all replicas, as gradients are weighted wrongly otherwise; None
            where nothing is in doubt.
        refusal: text that explains why gradients cannot be weighted; None if they can.
    """

    rows: float = 1.0
    is_planned: bool = False
    total_rows: int | None = None
    key: int | None = None
    doubtful_rows: int | None = None
    refusal: str | None = None

    def has_fraction_of(self, other_weight: "Weight") -> bool:
        """Return whether this replica has the same fraction of the rows of all replicas by both weights."""
        if self.total_rows is None or other_weight.total_rows is None:
            return self.rows == other_weight.rows
        return self.rows * other_weight.total_rows == other_weight.rows * self.total_rows


def weigh(
    parts: Sequence[Part],
    local_index: int,
    likely_rows: int | None = None,
) -> Weight:
    """Return the weight of a backward that uses one of these parts, or all of them.

    Args:
        parts: parts in any order; without any, all replicas weigh the same.
        local_index: number of the replica on this rank.
        likely_rows: rows of a batch that is no part; None where they are unknown, too.
    """
    if len(parts) == 1:
        only_part = parts[0]
        if only_part.rows is not None:
            return _weight_of(only_part, local_index)
    planned_parts = [part for part in parts if part.rows is not None]
    if not planned_parts:
        lengths = [part.likely_rows for part in parts if part.likely_rows is not None]
        if not lengths:
            return Weight(key=likely_rows)
        return Weight(key=_digest(lengths))
    planned_parts.sort(key=_order_of)
    weights = [_weight_of(part, local_index) for part in planned_parts]
    first_weight = weights[0]
    if all(first_weight.has_fraction_of(weight) for weight in weights):
        if len(planned_parts) < len(parts):  # unplanned parts may have another, unknown fraction
            doubtful_rows = int(first_weight.rows)
            return first_weight._replace(key=None, doubtful_rows=doubtful_rows)
        # parts are used in their order, most probably
        key = first_weight.key if len(weights) == 1 else None
        return Weight(first_weight.rows, True, first_weight.total_rows, key)
    is_known = all(weight.total_rows is not None for weight in weights)
    source_numbers = {part.source.number for part in planned_parts}
    if not is_known and len(source_numbers) == len(planned_parts):
        row_counts = [int(weight.rows) for weight in weights]
        return Weight(doubtful_rows=_digest(row_counts))
    return Weight(refusal=_refusal(weights))


def _order_of(part: Part) -> tuple[int, int]:
    """Return the key by which parts are sorted: by source, and in the order in which they were handed out."""
    return part.source.number, part.number


def _digest(rows: Sequence[int]) -> int:
    """Return a number that differs where rows differ: replicas with the same number weigh the same."""
    if len(rows) == 1:
        return rows[0]
    return hash(tuple(rows)) % (1 << 20)


def _weight_of(part: Part, local_index: int) -> Weight:
    assert part.rows is not None, "only planned parts are weighed"
    replica_rows = float(part.rows[local_index])
    return Weight(replica_rows, True, part.total_rows, part.key)


def _refusal(weights: Sequence[Weight]) -> str:
    fractions: set[str] = set()
    for weight in weights:
        total_rows = weight.total_rows or "an unknown number of"
        fractions.add(f"{weight.rows:g} of {total_rows}")
    sizes = ", ".join(sorted(fractions))
    return (
        f"backward: expected one part of a global batch since the last backward with ReduceOp.MEAN, got parts of "
        f"{sizes} rows, any of which may be meant; draw a batch when the last one is trained on, give the "
        f"model the tensors as they were drawn, evaluate under torch.no_grad(), or use drop_remainder=True."
    )

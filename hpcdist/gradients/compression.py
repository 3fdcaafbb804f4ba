"""Comm hooks that send less: PowerSGD and the largest elements, both with error feedback.

What one step leaves out is added to the gradients of the next, so it arrives late instead of never.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from hpcdist.collectives.calls import all_reduce
from hpcdist.collectives.group import group_of
from hpcdist.collectives.moves import all_gather
from hpcdist.errors import UsageError
from hpcdist.gradients.comm_hook import GradBucket


@dataclass
class PowerSGDState:
    """What `power_sgd_hook` keeps between steps: one gradient's memory for the errors. In no checkpoint.

    Attributes:
        matrix_approximation_rank: r; of a gradient of shape (n, m), (n + m) r values are sent instead of n m.
        start_step: steps that are summed in full before the first compressed one: early gradients change fast.
        min_compression_rate: gradients that would shrink by less are sent in full, as vectors are.
        random_seed: of the first approximation; equal on all ranks.
    """

    matrix_approximation_rank: int = 2
    start_step: int = 10
    min_compression_rate: float = 2.0
    random_seed: int = 0
    _steps: dict[int, int] = field(default_factory=dict, repr=False)
    _errors: dict[tuple[int, int], Tensor] = field(default_factory=dict, repr=False)
    _factors: dict[tuple[int, int], Tensor] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.matrix_approximation_rank < 1 or self.start_step < 0:
            raise UsageError(
                f"PowerSGDState: expected a matrix_approximation_rank of 1 or more and a start_step of 0 or more, got "
                f"{self.matrix_approximation_rank} and {self.start_step}."
            )


def power_sgd_hook(state: PowerSGDState, bucket: GradBucket) -> Tensor:
    """Return the sum of a bucket's gradients, each matrix of them approximated by one of low rank.

    A comm hook: `strategy.register_comm_hook(hpcdist.PowerSGDState(), hpcdist.power_sgd_hook)`.
    Collective: all ranks. It returns when the sum is there. Every rank multiplies the factors itself: the ranks need
    processors of one type, or their weights drift apart, which the next save finds.

    Cost: for each (n, m) gradient products of 4 n m r operations and an orthogonalization; three all-reduces per
        bucket. It pays where the network is slow: below about 1 Gbit/s.
    Source: Vogels, Karimireddy and Jaggi, PowerSGD: practical low-rank gradient compression for distributed
        optimization (NeurIPS 2019, arXiv 1905.13727), algorithms 1 and 2.
    """
    index, flat = bucket.index(), bucket.buffer()
    step = state._steps[index] = state._steps.get(index, 0) + 1
    if step <= state.start_step:
        all_reduce(flat)
        return flat
    matrices, others = _split(state, bucket)
    if others:
        for other, total in zip(others, _summed(others), strict=True):
            other.copy_(total)
    if matrices:
        for number, matrix in enumerate(matrices):
            if (error := state._errors.get((index, number))) is not None and error.shape == matrix.shape:
                matrix.add_(error)
        own = [matrix.clone() for matrix in matrices]
        _approximate(state, index, matrices)
        for number, (mine, matrix) in enumerate(zip(own, matrices, strict=True)):
            # of what all ranks together have left out each one keeps its part: its share of the approximation is 1/n
            left_out = mine.sub_(matrix, alpha=1 / group_of().size)
            state._errors[index, number] = left_out.nan_to_num_(0.0, 0.0, 0.0)  # an overflow must not be added for ever
    return flat


def _split(state: PowerSGDState, bucket: GradBucket) -> tuple[list[Tensor], list[Tensor]]:
    """Return the bucket's gradients that are compressed, as matrices, and the others; all of them views."""
    matrices, others = [], []
    for gradient in bucket.gradients():
        rows = gradient.shape[0] if gradient.dim() > 1 else 1
        columns = gradient.numel() // max(rows, 1)
        r = min(rows, columns, state.matrix_approximation_rank)
        is_small = (rows + columns) * r * state.min_compression_rate < rows * columns
        if gradient.dim() > 1 and is_small and gradient.is_contiguous():
            matrices.append(gradient.view(rows, columns))
        else:
            others.append(gradient)
    return matrices, others


def _approximate(state: PowerSGDState, index: int, matrices: list[Tensor]) -> None:
    """Replace matrices by approximations of their sums over all ranks, equal on all. Collective: all ranks."""
    right = [_factor(state, (index, number), matrix) for number, matrix in enumerate(matrices)]
    left = _summed([matrix @ factor for matrix, factor in zip(matrices, right, strict=True)])
    left = [_orthonormal(factor) for factor in left]
    right = _summed([matrix.T @ factor for matrix, factor in zip(matrices, left, strict=True)])
    for number, (matrix, p, q) in enumerate(zip(matrices, left, right, strict=True)):
        torch.mm(p, q.T, out=matrix)
        state._factors[index, number] = q  # a good first factor for the next step's, as gradients change slowly


def _factor(state: PowerSGDState, key: tuple[int, int], matrix: Tensor) -> Tensor:
    r = min(*matrix.shape, state.matrix_approximation_rank)
    known = state._factors.get(key)
    if known is not None and known.shape == (matrix.shape[1], r) and known.isfinite().all() and known.any():
        return _orthonormal(known)
    generator = torch.Generator().manual_seed(state.random_seed + 1009 * key[0] + key[1])
    drawn = torch.randn(matrix.shape[1], r, generator=generator, dtype=matrix.dtype).to(matrix.device)
    return _orthonormal(drawn)


def _orthonormal(factor: Tensor) -> Tensor:
    columns: Tensor = torch.linalg.qr(factor)[0]
    return columns


def _summed(factors: list[Tensor]) -> list[Tensor]:
    joined = torch.cat([factor.reshape(-1) for factor in factors])
    all_reduce(joined)
    parts = torch.split(joined, [factor.numel() for factor in factors])
    return [part.view_as(factor) for part, factor in zip(parts, factors, strict=True)]


@dataclass
class TopKState:
    """What `top_k_hook` keeps between steps: one gradient's memory for what was not sent. In no checkpoint.

    Attributes:
        ratio: part of the elements of each bucket that a rank sends, those that are farthest from 0; above 0, up to 1.
    """

    ratio: float = 0.01
    _unsent: dict[int, Tensor] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:
            raise UsageError(f"TopKState: expected a ratio above 0 and up to 1, got {self.ratio}.")


def top_k_hook(state: TopKState, bucket: GradBucket) -> Tensor:
    """Return the sum over all ranks of the elements of a bucket that are the largest on each.

    A comm hook: `strategy.register_comm_hook(hpcdist.TopKState(0.01), hpcdist.top_k_hook)`.
    Collective: all ranks. It returns when the sum is there.

    Cost: a selection, and an all-gather of 2 k values from each rank: what a rank receives grows with their number, so
        it pays for small ratios on few ranks.
    Source: Stich, Cordonnier and Jaggi, Sparsified SGD with memory (NeurIPS 2018, arXiv 1809.07599).
    """
    flat = bucket.buffer()
    unsent = state._unsent.get(bucket.index())
    values = flat.clone() if unsent is None or unsent.shape != flat.shape else flat + unsent
    n_sent = max(1, int(state.ratio * values.numel()))
    places = values.abs().topk(n_sent, sorted=False).indices
    sent = values[places]
    all_places, all_sent = all_gather(places), all_gather(sent)
    values[places] = 0
    state._unsent[bucket.index()] = values.nan_to_num_(0.0, 0.0, 0.0)
    flat.zero_()
    for theirs, their_places in zip(all_sent.split(n_sent), all_places.split(n_sent), strict=True):
        flat.index_add_(0, their_places, theirs)  # rank by rank: the same bits everywhere
    return flat

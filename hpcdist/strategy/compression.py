"""Comm hooks that send less: PowerSGD and the largest elements, both with error feedback.

Error feedback: the error of one step, the part of a gradient that was not sent, is added to the next gradient of the
same parameter, so it arrives late instead of never. The error keeps its size, whatever number of rows the next mean is
over. A GradScaler that changes its scale makes earlier errors count more or less by the same factor.
"""

from collections.abc import MutableMapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from hpcdist.collectives.calls import all_reduce
from hpcdist.collectives.group import group_of
from hpcdist.collectives.moves import all_gather
from hpcdist.errors import UsageError
from hpcdist.gradients.comm_hook import GradBucket


@dataclass
class PowerSGDState:
    """State of `power_sgd_hook` between steps; the errors take as much memory as the gradients. In no checkpoint.

    Attributes:
        matrix_approximation_rank: rank r of the factors; for a gradient of shape (n, m), (n + m) r values are sent
            instead of n m.
        start_step: number of sums in full before the first compressed sum, as early gradients change fast.
        min_compression_rate: least factor by which a gradient must shrink; other gradients are sent in full, as vectors
            are.
        random_seed: seed of the first approximation; equal on all ranks.
    """

    matrix_approximation_rank: int = 2
    start_step: int = 10
    min_compression_rate: float = 2.0
    random_seed: int = 0
    _steps: dict[int, int] = field(default_factory=dict, repr=False)
    _errors: MutableMapping[Tensor, Tensor] = field(
        default_factory=WeakTensorKeyDictionary, repr=False
    )
    _factors: MutableMapping[Tensor, Tensor] = field(
        default_factory=WeakTensorKeyDictionary, repr=False
    )

    def __post_init__(self) -> None:
        if self.matrix_approximation_rank < 1 or self.start_step < 0:
            raise UsageError(
                f"PowerSGDState: expected a matrix_approximation_rank of 1 or more and a start_step of 0 or more, got "
                f"{self.matrix_approximation_rank} and {self.start_step}; raise the one that is too small."
            )


def power_sgd_hook(state: PowerSGDState, bucket: GradBucket) -> Tensor:
    """Return the sum of a bucket's gradients, where matrices are replaced by approximations of low rank.

    A comm hook: `strategy.register_comm_hook(hpcdist.PowerSGDState(), hpcdist.power_sgd_hook)`.
    Collective over the ranks of the role. It returns when the sum is there. Every rank multiplies the factors itself:
    the ranks need processors of one type, or their weights drift apart, which the next save finds.

    Cost: for each (n, m) gradient three products of 2 n m r operations each, and an orthogonalization; three
        all-reduces per bucket. It pays where the network is slow: below about 1 Gbit/s.
    Source: Vogels, Karimireddy and Jaggi, PowerSGD: practical low-rank gradient compression for distributed
        optimization (NeurIPS 2019, arXiv 1905.13727), algorithms 1 and 2.
    """
    index = bucket.index()
    flat = bucket.buffer()
    step = state._steps.get(index, 0) + 1
    state._steps[index] = step
    if step <= state.start_step:
        all_reduce(flat)
        return flat
    matrices, vectors = _split(state, bucket)
    if vectors:
        for vector, total in zip(vectors, _summed(vectors), strict=True):
            vector.copy_(total)
    if matrices:
        for parameter, matrix in matrices:
            error = state._errors.get(parameter)
            if error is not None:
                matrix.add_(error, alpha=bucket.divisor())
        originals = [matrix.clone() for _, matrix in matrices]
        _approximate(state, index, matrices)
        for (parameter, matrix), original in zip(matrices, originals, strict=True):
            # of what all ranks together have left out each one keeps its part: its share of the approximation is 1/n
            left_out = original.sub_(matrix, alpha=1 / group_of().size).div_(bucket.divisor())
            # an overflow must not be added for ever
            state._errors[parameter] = left_out.nan_to_num_(0.0, 0.0, 0.0)
    return flat


def _split(
    state: PowerSGDState,
    bucket: GradBucket,
) -> tuple[list[tuple[Tensor, Tensor]], list[Tensor]]:
    """Return (parameter, gradient as a matrix) of gradients to compress, and the other gradients; all are views."""
    matrices: list[tuple[Tensor, Tensor]] = []
    vectors: list[Tensor] = []
    for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
        rows = gradient.shape[0] if gradient.dim() > 1 else 1
        columns = gradient.numel() // max(rows, 1)
        r = min(rows, columns, state.matrix_approximation_rank)
        is_small = (rows + columns) * r * state.min_compression_rate < rows * columns
        if gradient.dim() > 1 and is_small and gradient.is_contiguous():
            matrices.append((parameter, gradient.view(rows, columns)))
        else:
            vectors.append(gradient)
    return matrices, vectors


def _approximate(state: PowerSGDState, index: int, matrices: list[tuple[Tensor, Tensor]]) -> None:
    """Replace matrices by approximations of their sums over all ranks, equal on all ranks.

    Collective over the ranks of the role.
    """
    row_products: list[Tensor] = []
    for number, (parameter, matrix) in enumerate(matrices):
        factor = _factor(state, 1009 * index + number, parameter, matrix)
        row_products.append(matrix @ factor)
    row_factors: list[Tensor] = []
    column_products: list[Tensor] = []
    for product, (_, matrix) in zip(_summed(row_products), matrices, strict=True):
        factor = _orthonormal(product)
        row_factors.append(factor)
        column_products.append(matrix.T @ factor)
    column_factors = _summed(column_products)
    for (parameter, matrix), p, q in zip(matrices, row_factors, column_factors, strict=True):
        torch.mm(p, q.T, out=matrix)
        # a good first factor for the next step's matrix, as gradients change slowly
        state._factors[parameter] = q


def _factor(state: PowerSGDState, number: int, parameter: Tensor, matrix: Tensor) -> Tensor:
    """Return orthonormal columns to begin with: the last factor of the parameter, or random numbers.

    Args:
        state: has the factors and the seed.
        number: number of the matrix, which its random numbers are drawn by.
        parameter: parameter whose gradient the matrix is.
        matrix: (n, m) gradient; the factor is (m, r).
    """
    r = min(*matrix.shape, state.matrix_approximation_rank)
    factor = state._factors.get(parameter)
    if (
        factor is not None
        and factor.shape == (matrix.shape[1], r)
        and factor.isfinite().all()
        and factor.any()
    ):
        return _orthonormal(factor)
    generator = torch.Generator().manual_seed(state.random_seed + number)
    drawn = torch.randn(matrix.shape[1], r, generator=generator, dtype=matrix.dtype)
    return _orthonormal(drawn.to(matrix.device))


def _orthonormal(factor: Tensor) -> Tensor:
    columns: Tensor = torch.linalg.qr(factor)[0]
    return columns


def _summed(factors: list[Tensor]) -> list[Tensor]:
    """Return the sum of each tensor over all ranks. Collective over the ranks of the role."""
    joined = torch.cat([factor.reshape(-1) for factor in factors])
    all_reduce(joined)
    parts = torch.split(joined, [factor.numel() for factor in factors])
    return [part.view_as(factor) for part, factor in zip(parts, factors, strict=True)]


@dataclass
class TopKState:
    """State of `top_k_hook` between steps; the errors take as much memory as the gradients. In no checkpoint.

    Attributes:
        ratio: fraction of the elements of each bucket that a rank sends, the farthest from 0; above 0, up to 1.
    """

    ratio: float = 0.01
    _unsent: MutableMapping[Tensor, Tensor] = field(
        default_factory=WeakTensorKeyDictionary, repr=False
    )

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:
            raise UsageError(
                f"TopKState: expected a ratio above 0 and up to 1, got {self.ratio}; 0.01 is usual."
            )


def top_k_hook(state: TopKState, bucket: GradBucket) -> Tensor:
    """Return the sum over all ranks of the elements of a bucket that are the largest on each.

    A comm hook: `strategy.register_comm_hook(hpcdist.TopKState(0.01), hpcdist.top_k_hook)`.
    Collective over the ranks of the role. It returns when the sum is there.

    Cost: a selection, and all-gathers of k values and of their k places, which are int64, from each rank: a rank
        receives more bytes the more ranks there are, so it pays for small ratios on few ranks.
    Source: Stich, Cordonnier and Jaggi, Sparsified SGD with memory (NeurIPS 2018, arXiv 1809.07599).
    """
    parameters = bucket.parameters()
    gradients = bucket.gradients()
    flat = bucket.buffer()
    for parameter, gradient in zip(parameters, gradients, strict=True):
        unsent = state._unsent.get(parameter)
        if unsent is not None:
            gradient.add_(unsent, alpha=bucket.divisor())
    n_sent = max(1, int(state.ratio * flat.numel()))
    places = flat.abs().topk(n_sent, sorted=False).indices
    sent = flat[places]
    all_places = all_gather(places)
    all_sent = all_gather(sent)
    flat[places] = 0
    for parameter, gradient in zip(parameters, gradients, strict=True):
        state._unsent[parameter] = gradient.div(bucket.divisor()).nan_to_num_(0.0, 0.0, 0.0)
    flat.zero_()
    for values, places in zip(all_sent.split(n_sent), all_places.split(n_sent), strict=True):
        flat.index_add_(0, places, values)  # rank by rank: the same bits everywhere
    return flat

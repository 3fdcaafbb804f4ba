"""Comm hooks that send less: PowerSGD and the largest elements, both with error feedback.

What one step leaves out is added to the gradients of the next that reaches the same parameter, so it arrives late
instead of never. It keeps its size, whatever number of rows the next mean is over. A GradScaler that changes its scale
makes what was left out before count as much more or less.
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
    """What `power_sgd_hook` keeps between steps: one gradient's memory for the errors. In no checkpoint.

    Attributes:
        matrix_approximation_rank: r; of a gradient of shape (n, m), (n + m) r values are sent instead of n m.
        start_step: sums in full before the first compressed one: early gradients change fast.
        min_compression_rate: gradients that would shrink by less are sent in full, as vectors are.
        random_seed: of the first approximation; equal on all ranks.
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
    """Return the sum of a bucket's gradients, each matrix of them approximated by one of low rank.

    A comm hook: `strategy.register_comm_hook(hpcdist.PowerSGDState(), hpcdist.power_sgd_hook)`.
    Collective: all ranks. It returns when the sum is there. Every rank multiplies the factors itself: the ranks need
    processors of one type, or their weights drift apart, which the next save finds.

    Cost: for each (n, m) gradient three products of 2 n m r operations each, and an orthogonalization; three
        all-reduces per bucket. It pays where the network is slow: below about 1 Gbit/s.
    Source: Vogels, Karimireddy and Jaggi, PowerSGD: practical low-rank gradient compression for distributed
        optimization (NeurIPS 2019, arXiv 1905.13727), algorithms 1 and 2.
    """
    index = bucket.index()
    flat = bucket.buffer()
    step = state._steps[index] = state._steps.get(index, 0) + 1
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
    state: PowerSGDState, bucket: GradBucket
) -> tuple[list[tuple[Tensor, Tensor]], list[Tensor]]:
    """Return (parameter, gradient as a matrix) of those that are compressed, and the other gradients; all views."""
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
    """Replace matrices by approximations of their sums over all ranks, equal on all. Collective: all ranks."""
    columns: list[Tensor] = []
    for number, (parameter, matrix) in enumerate(matrices):
        columns.append(_factor(state, 1009 * index + number, parameter, matrix))
    products = _summed(
        [matrix @ factor for (_, matrix), factor in zip(matrices, columns, strict=True)]
    )
    rows = [_orthonormal(product) for product in products]
    columns = _summed(
        [matrix.T @ factor for (_, matrix), factor in zip(matrices, rows, strict=True)]
    )
    for (parameter, matrix), p, q in zip(matrices, rows, columns, strict=True):
        torch.mm(p, q.T, out=matrix)
        # a good first factor for the next step's, as gradients change slowly
        state._factors[parameter] = q


def _factor(state: PowerSGDState, number: int, parameter: Tensor, matrix: Tensor) -> Tensor:
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
    drawn = torch.randn(matrix.shape[1], r, generator=generator, dtype=matrix.dtype).to(
        matrix.device
    )
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
    Collective: all ranks. It returns when the sum is there.

    Cost: a selection, and all-gathers of k values and of their k places, which are int64, from each rank: what a rank
        receives grows with their number, so it pays for small ratios on few ranks.
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

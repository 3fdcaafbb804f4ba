"""Seeds and deterministic operations in one call each, as TensorFlow has them."""

import random

import numpy as np
import torch


def set_random_seed(seed: int) -> None:
    """Seed Python's, numpy's and torch's random numbers, as keras.utils.set_random_seed.

    Not collective; the same seed on all ranks. Initial weights are the chief's in any case, and inside a step torch's
    numbers are keyed by seed, step and replica; the numbers of Python and numpy are the same on all ranks.

    >>> hpcdist.set_random_seed(1)
    >>> values = torch.rand(2)
    >>> hpcdist.set_random_seed(1)
    >>> torch.equal(torch.rand(2), values)
    True
    """
    random.seed(seed)
    np.random.seed(seed % (1 << 32))
    torch.manual_seed(seed)


def enable_op_determinism() -> None:
    """Make operations of torch deterministic, or raise where they cannot be, as TensorFlow's function of this name.

    For GPUs: on CPUs torch's operations give the same bits on the same machine anyway, and so do hpcdist's sums. Not
    collective; all ranks. On CUDA set CUBLAS_WORKSPACE_CONFIG=:4096:8 in the batch script, too; torch says so.
    """
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False

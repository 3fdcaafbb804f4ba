"""Flat buckets in memory: the slots that gradients and buffers are copied to, and their sum over the replicas."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from hpcdist.collectives import mpi
from hpcdist.gradients.tensors import dtype_name
from hpcdist.mpi import MPI
from hpcdist.plan.buckets import plan_buckets

#: A bucket is begun anew above this size.
BUCKET_BYTES = 16 << 20
#: The dtype in which a gradient is summed.
SUM_DTYPES = {"float32": "float32", "float64": "float64", "float16": "float32", "bfloat16": "float32"}


class BucketSet:
    """One flat buffer per bucket, and one slot per tensor, all zero at first.

    Args:
        tensors: what needs a slot, in the order of the model. Half precision is summed in float32.
        n_counts: length of `counts`.

    Attributes:
        slots: flat tensors, one for each of `tensors`.
        counts: float32 tensor that is summed along with the slots.
    """

    def __init__(self, tensors: Sequence[Tensor], n_counts: int) -> None:
        sizes = [(tensor.numel(), SUM_DTYPES[dtype_name(tensor)]) for tensor in tensors]
        plan = plan_buckets([(n_counts, "float32"), *sizes], BUCKET_BYTES)
        self._buckets = [np.zeros(n_elements, dtype) for dtype, n_elements in plan.buckets]
        flat = [torch.from_numpy(bucket) for bucket in self._buckets]
        views = [flat[slot.bucket][slot.offset : slot.offset + slot.n_elements] for slot in plan.slots]
        self.counts, self.slots = views[0], views[1:]

    def all_reduce(self, comm: MPI.Comm) -> None:
        """Replace every bucket by its sum over all ranks. Collective: `comm`. Blocking."""
        for bucket in self._buckets:
            mpi.all_reduce(bucket, comm)

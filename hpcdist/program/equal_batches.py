"""Finds ranks that are fed the same rows, as by a plain DataLoader."""

from typing import Any

import torch
import xxhash
from torch import Tensor

from hpcdist.program.tensors import to_array

#: First bytes of a batch that are compared between ranks.
_COMPARED_BYTES = 1 << 20


def digest_of_batch(batch: Any) -> str:
    """Return a digest of the first tensor with rows in a batch; empty text when there is none."""
    if type(batch) is Tensor and batch.layout is torch.strided and batch.dim() > 0 and batch.numel() > 0:
        array = to_array(batch)[0].reshape(-1).view("u1")
        return xxhash.xxh3_64_hexdigest(array[:_COMPARED_BYTES].tobytes())
    items: Any = ()
    if isinstance(batch, dict):
        items = batch.values()
    elif isinstance(batch, (list, tuple)):
        items = batch
    return next(filter(None, (digest_of_batch(item) for item in items)), "")

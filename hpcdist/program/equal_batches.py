"""Finds ranks that are fed the same rows, as by a plain DataLoader."""

import logging
from typing import Any

import torch
import xxhash
from torch import Tensor

from hpcdist.program.tensors import to_array
from hpcdist.runtime.world import World

logger = logging.getLogger("hpcdist")

#: First bytes of a batch that are compared between ranks.
_COMPARED_BYTES = 1 << 20


def digest_of_batch(batch: Any) -> str:
    """Return a digest of the first tensor with rows in a batch; empty text when there is none."""
    if (
        type(batch) is Tensor
        and batch.layout is torch.strided
        and batch.dim() > 0
        and batch.numel() > 0
    ):
        array, _ = to_array(batch)
        batch_bytes = array.reshape(-1).view("u1")
        return xxhash.xxh3_64_hexdigest(batch_bytes[:_COMPARED_BYTES].tobytes())
    items: Any = ()
    if isinstance(batch, dict):
        items = batch.values()
    elif isinstance(batch, (list, tuple)):
        items = batch
    for item in items:
        digest = digest_of_batch(item)
        if digest:
            return digest
    return ""


def warn_of_equal_batches(batch: Any, world: World) -> None:
    """Warn when every rank of the role is fed the same rows. Collective over the ranks of the role."""
    comm = world.role_comm
    if comm.size == 1:
        return
    digest = digest_of_batch(batch)
    is_equal = world.all_equal(digest, comm)
    if is_equal and digest and comm.rank == 0:
        logger.warning(
            "strategy: expected each of %d ranks to be fed its own part of the batch, got the same first batch "
            "on all; if it comes from a plain DataLoader, use strategy.experimental_distribute_dataset.",
            comm.size,
        )

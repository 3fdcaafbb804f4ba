"""A distributed dataset whose batches are moved to a device, one ahead of the batch in use."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpcdist.data.distributed import DistributedDataset
from hpcdist.nest import map_nest


def on_device(nest: Any, device: torch.device) -> Any:
    """Return a nest with tensors on their way to a device in place of tensors and arrays; text stays an array."""

    def move(leaf: Any) -> Any:
        host = _as_tensor(leaf)
        if host is None:
            return leaf
        if device.type == "cuda" and host.device.type == "cpu" and not host.is_pinned():
            host = host.pin_memory()
        return host.to(device, non_blocking=True)

    return map_nest(move, nest)


def _as_tensor(leaf: Any) -> Tensor | None:
    """Return a tensor, or an array as a tensor on the host; None where torch has no such dtype."""
    if not isinstance(leaf, np.ndarray):
        return leaf if isinstance(leaf, Tensor) else None
    try:
        return torch.as_tensor(leaf, device="cpu")
    except TypeError:
        return None


class DeviceDataset:
    """The batches of a distributed dataset as tensors on a device, with the cursor of the batch that is in use.

    Copies start one batch ahead, from pinned memory and without waiting, so that a GPU computes meanwhile.

    Args:
        dataset: what is read.
        device: where its batches go.
    """

    def __init__(self, dataset: DistributedDataset, device: torch.device) -> None:
        self._dataset = dataset
        self._device = device
        self._poll, dataset.poll = dataset.poll, None  # when a batch is read, the one before has not been used
        self._before_ahead: tuple[dict[str, Any], int] | None = None  # cursor and epoch, without what is on its way

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dataset, name)

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of one pass: torch tensors on the device, in the nest of the source."""
        self._before_ahead = None
        batches = map(self._moved, self._dataset)
        current = next(batches, None)
        while current is not None:
            before_ahead = self._dataset.state_dict(), self._dataset.epoch
            following = next(batches, None)
            self._before_ahead = before_ahead
            yield current[0]
            if self._poll is not None:
                self._poll()
            current = following
        self._before_ahead = None

    def _moved(self, batch: Any) -> tuple[Any]:
        """Return a batch on its way to the device, in a tuple: a batch may be anything."""
        return (on_device(batch, self._device),)

    @property
    def position(self) -> int:
        """Global samples handed out so far, over all epochs and passes."""
        return int(self.state_dict()["position"])

    @property
    def epoch(self) -> int:
        """The epoch in progress; between passes, the next one."""
        return self._dataset.epoch if self._before_ahead is None else self._before_ahead[1]

    def state_dict(self) -> dict[str, Any]:
        """Return the cursor after the batch that was handed out last."""
        return self._dataset.state_dict() if self._before_ahead is None else self._before_ahead[0]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a cursor."""
        self._before_ahead = None
        self._dataset.load_state_dict(state)

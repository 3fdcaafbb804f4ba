"""Buckets on a GPU: which streams fill them, and sums in pinned memory of the host where no NCCL makes them."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


class ProducerStreams:
    """The streams on which gradients were taken into a bucket while backward runs.

    Autograd computes each part of a backward on the stream of its forward, so that a model that computes on several
    streams fills a bucket from several; a sum is queued behind the current one only.

    Args:
        device: of the bucket; of the host, there are no streams.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: list[torch.cuda.Stream] = []

    def note(self) -> None:
        """Note that the current stream has taken a gradient."""
        if self._device.type == "cuda":
            stream = torch.cuda.current_stream(self._device)
            if stream not in self._streams:
                self._streams.append(stream)

    def order_sum(self) -> None:
        """Let what is queued next on the current stream wait for all of them; expect the next backward."""
        if len(self._streams) > 1:
            current = torch.cuda.current_stream(self._device)
            for stream in self._streams:
                if stream != current:
                    current.wait_stream(stream)
        self._streams = []


class DeviceStaging:
    """Pinned host memory and a stream, through which the buckets of one device are summed one after the other.

    Args:
        device: GPU of the buckets.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None  # made at the first sum
        self._pinned: dict[torch.dtype, Tensor] = {}

    def behind_producer(
        self, bucket: Tensor
    ) -> Callable[[Callable[[npt.NDArray[np.generic]], None]], None]:
        """Return a function that sums a bucket, in this thread or another, behind what is queued for it now.

        Args:
            bucket: flat tensor on the device, overwritten by its sum. The function returns when the sum is there.

        Returns:
            A function of one argument: what replaces a host array of the bucket's size by its sum.
        """
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream = self._stream
        produced = torch.cuda.current_stream(self._device).record_event()

        def run(reduce_on_host: Callable[[npt.NDArray[np.generic]], None]) -> None:
            host = self._pinned_like(bucket)
            with torch.cuda.stream(stream):
                stream.wait_event(produced)
                host.copy_(bucket, non_blocking=True)
                stream.synchronize()
                reduce_on_host(host.numpy())
                bucket.copy_(host, non_blocking=True)
                stream.synchronize()

        return run

    def _pinned_like(self, bucket: Tensor) -> Tensor:
        """Return pinned memory of a bucket's size and dtype; the next bucket gets the same."""
        pinned = self._pinned.get(bucket.dtype)
        if pinned is None or pinned.numel() < bucket.numel():
            pinned = torch.empty(bucket.numel(), dtype=bucket.dtype, pin_memory=True)
            self._pinned[bucket.dtype] = pinned
        return pinned[: bucket.numel()]

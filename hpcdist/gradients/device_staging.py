"""Buckets on a GPU: the streams that fill them, and sums in pinned memory of the host where no NCCL makes them."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

#: Replaces a host array by its sum over the ranks.
ReduceOnHost = Callable[[npt.NDArray[np.generic]], None]


class ProducerStreams:
    """The streams on which gradients were taken into a bucket while backward runs.

    Autograd computes each part of a backward on the stream of its forward, so a model that computes on several streams
    fills a bucket from several streams. A sum is queued behind the current stream only.

    Args:
        device: device of the bucket. The host has no streams.
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
        """Let the next work on the current stream wait for all noted streams; expect the next backward."""
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

    def behind_producer(self, bucket: Tensor) -> Callable[[ReduceOnHost], None]:
        """Return a function that sums a bucket, in this thread or another, behind the work queued for it now.

        Args:
            bucket: flat tensor on the device, overwritten by its sum. The returned function returns when the sum is in
                the bucket.

        Returns:
            A function whose argument is a function that replaces a host array of the bucket's size by its sum.
        """
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream = self._stream
        produced = torch.cuda.current_stream(self._device).record_event()

        def run(reduce_on_host: ReduceOnHost) -> None:
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
        """Return pinned memory of a bucket's size and dtype; the next bucket of the dtype gets the same memory."""
        n_elements = bucket.numel()
        pinned = self._pinned.get(bucket.dtype)
        if pinned is None or pinned.numel() < n_elements:
            pinned = torch.empty(n_elements, dtype=bucket.dtype, pin_memory=True)
            self._pinned[bucket.dtype] = pinned
        return pinned[:n_elements]

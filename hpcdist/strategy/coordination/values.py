"""Handles in a coordinator's program for objects on workers: results that come later, and resources of each worker."""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hpcdist.errors import UsageError
from hpcdist.nest import map_nest
from hpcdist.ps import pickles
from hpcdist.ps.messages import Bytes

#: Longest wait before a signal to the program is seen.
LOOK_S = 0.2


class RemoteValue:
    """The future result of a scheduled function. `ClusterCoordinator.schedule` makes it; thread-safe."""

    def __init__(self) -> None:
        self._is_there = threading.Event()
        self._payload: Bytes | None = None
        self._error: BaseException | None = None

    def get(self) -> Any:
        """Wait for the function, and return its result: tensors are on the host, without gradients.

        Not collective. It waits as long as the function runs, and as long as those that are before it in a queue.

        Raises:
            ClosureCancelledError: if the function was cancelled, as another one had failed.
            Exception: the error that the function raised.
        """
        while not self._is_there.wait(LOOK_S):
            pass
        if self._error is not None:
            raise self._error
        assert self._payload is not None, "set before the event"
        return pickles.loads(self._payload)

    def fetch(self) -> Any:
        """Do what `get` does, and return tensors as numpy arrays; bfloat16, which numpy lacks, becomes float32."""
        return map_nest(_to_numpy, self.get())

    def set_result(self, payload: Bytes) -> None:
        """Set the value, as a pickle."""
        self._payload = payload
        self._is_there.set()

    def set_error(self, error: BaseException) -> None:
        """Let `get` raise from now on."""
        self._error = error
        self._is_there.set()

    def __repr__(self) -> str:
        return f"RemoteValue({self._state})"

    @property
    def _state(self) -> str:
        if not self._is_there.is_set():
            return "not there yet"
        if self._error is not None:
            return "failed"
        return "there"


class PerWorkerValues:
    """One value on each worker, which a function makes there at its first use; a new worker makes it again.

    As an argument of a scheduled function, or in an object that it uses, it is the value of the worker that runs the
    function. `ClusterCoordinator.create_per_worker_resource` and `iter(create_per_worker_dataset(...))` make it.

    Args:
        make: function that is called on each worker, and returns the value.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make


class PerWorkerIterator(PerWorkerValues):
    """An iterator on each worker: functions that it is passed to call `next` on their worker's."""

    def __iter__(self) -> "PerWorkerIterator":
        return self

    def __next__(self) -> Any:
        """Raise: the iterators are on workers.

        Raises:
            NotImplementedError: always, as in TensorFlow.
        """
        raise NotImplementedError(
            "next: expected a call in a scheduled function, got one on the coordinator; pass the iterator to schedule."
        )

    get_next = __next__


class PerWorkerDataset:
    """A dataset on each worker; `iter` returns one iterator for each, to be passed to scheduled functions.

    Args:
        make: function that is called on each worker, and returns the dataset.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make

    def build(self) -> PerWorkerValues:
        """Return the datasets themselves."""
        return PerWorkerValues(self.make)

    def __iter__(self) -> PerWorkerIterator:
        return PerWorkerIterator(_IteratorOf(self.make))


class _IteratorOf:
    """Makes a dataset, and returns an iterator of it."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make

    def __call__(self) -> Any:
        dataset = self._make()
        if not hasattr(dataset, "__iter__"):
            raise UsageError(
                f"create_per_worker_dataset: expected a function that returns a dataset, got {type(dataset).__name__}; "
                f"return what can be iterated."
            )
        return iter(dataset)


def _to_numpy(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    if leaf.dtype is torch.bfloat16:  # which numpy lacks
        return leaf.float().numpy()
    return leaf.numpy()

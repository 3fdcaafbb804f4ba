"""What distributed datasets hand out, and the iterator that hands it out."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpcdist.data.options import InputOptions
from hpcdist.data.prefetch import fetched
from hpcdist.errors import DataError
from hpcdist.nest import Nest, leaves

OnBatch = Callable[[list[int] | None], None]
Wrap = Callable[[list[Nest]], Any]
_NOTHING = object()


class OptionalElement:
    """An element, or the end of the data, as in tf.experimental.Optional."""

    def __init__(self, value: Any = _NOTHING) -> None:
        self._value = value

    def has_value(self) -> bool:
        """Return whether there is an element."""
        return self._value is not _NOTHING

    def get_value(self) -> Any:
        """Return the element.

        Raises:
            DataError: when there is none.
        """
        if not self.has_value():
            raise DataError("get_value: expected an element, got the end of the data; ask has_value() first.")
        return self._value


class DistributedIterator:
    """An iterator over the parts of this rank's replicas.

    Args:
        elements: what is yielded.
        element_spec: returns what elements look like.
        poll: called before each of them is looked for.
    """

    def __init__(
        self, elements: Iterator[Any], element_spec: Callable[[], Nest], poll: Callable[[], None] | None = None
    ) -> None:
        self._elements = elements if poll is None else _polled(elements, poll)
        self._element_spec = element_spec

    def __iter__(self) -> "DistributedIterator":
        return self

    def __next__(self) -> Any:
        return next(self._elements)

    def get_next(self) -> Any:
        """Return the next element.

        Raises:
            StopIteration: at the end of the data; on every rank at the same step.
        """
        return next(self._elements)

    def get_next_as_optional(self) -> OptionalElement:
        """Return the next element, or one without a value at the end of the data; on every rank at the same step."""
        return OptionalElement(next(self._elements, _NOTHING))

    @property
    def element_spec(self) -> Nest:
        """What elements look like: the nest of a part with a TensorSpec for every array."""
        return self._element_spec()


def _polled(elements: Iterator[Any], poll: Callable[[], None]) -> Iterator[Any]:
    while True:
        poll()
        if (element := next(elements, _NOTHING)) is _NOTHING:
            return
        yield element


@dataclass(frozen=True)
class HandOut:
    """What happens to the parts of a step on their way to the caller.

    Attributes:
        on_batch: called with the number of rows of every local part, and with None at the end of a pass.
        wrap: makes what is yielded out of the list of parts; without it, the only part is.
        options: of the input.
    """

    on_batch: OnBatch | None = None
    wrap: Wrap | None = None
    options: InputOptions = field(default_factory=InputOptions)

    def check(self, n_local: int) -> None:
        """Raise DataError when there are several local replicas and nothing that joins their parts."""
        if n_local != 1 and self.wrap is None:
            raise DataError(
                f"distribute: expected wrap for the parts of {n_local} replicas of one rank, got None; pass what joins "
                f"them."
            )

    def hand(self, parts: Sequence[Nest]) -> Any:
        """Return what is yielded for the parts of one step."""
        if self.on_batch:
            self.on_batch([len(leaves(part)[0]) for part in parts])
        if self.options.experimental_fetch_to_device:
            parts = [fetched(part) for part in parts]
        return self.wrap(list(parts)) if self.wrap else parts[0]

    def end(self) -> None:
        """Say that a pass is over."""
        if self.on_batch:
            self.on_batch(None)

    def n_ahead(self, n_asked: int) -> int:
        """Return how many batches are read ahead when the dataset asks for so many."""
        if not self.options.experimental_fetch_to_device:
            return n_asked
        return max(n_asked, self.options.experimental_per_replica_buffer_size)

"""How elements travel between hosts. Inside a host and in sums they keep their dtype."""

from typing import Any, Protocol

import numpy.typing as npt

Array = npt.NDArray[Any]


class Wire(Protocol):
    """Encodes elements for the network, and decodes them."""

    def encode(self, values: Array, key: tuple[int, ...]) -> Array:
        """Return the array to send for `values`, a contiguous array; `key` names them, the same at every step."""

    def empty(self, like: Array) -> Array:
        """Return a buffer for the received encoding of `like.size` elements; `like` itself if it can serve."""

    def decode(self, received: Array, values: Array) -> None:
        """Write the received elements into `values`, if they are not there already."""


class PlainWire:
    """Elements travel in their own dtype."""

    def encode(self, values: Array, key: tuple[int, ...]) -> Array:
        """Return `values`."""
        return values

    def empty(self, like: Array) -> Array:
        """Return `like`."""
        return like

    def decode(self, received: Array, values: Array) -> None:
        """Do nothing: `values` itself was received."""


PLAIN = PlainWire()

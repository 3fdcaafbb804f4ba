"""What the draws know of a register: dtype and shape of each replica's value, so that most calls fit."""

from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Form:
    """A value of every replica, or a plain one.

    Attributes:
        shapes: of each replica's value; of a plain value, as many equal ones.
        dtype: of all of them.
        is_plain: whether it is one value, the same for all.
        is_rounded: whether it was divided, so that sums of it depend on their order.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    is_plain: bool = False
    is_rounded: bool = False

    @property
    def rank(self) -> int:
        return len(self.shapes[0])

    @property
    def is_float(self) -> bool:
        return self.dtype.startswith("float")

    @property
    def is_even(self) -> bool:
        """Whether all replicas have the same shape."""
        return len(set(self.shapes)) == 1

    @property
    def is_empty(self) -> bool:
        """Whether no replica has an element: a collective on it would hang."""
        return all(0 in shape for shape in self.shapes)

    def fits_along(self, axis: int) -> bool:
        """Whether shapes differ along one axis only."""
        return len({shape[:axis] + shape[axis + 1 :] for shape in self.shapes}) == 1

    def without(self, axis: Any) -> "Form":
        """Return the form after a sum over an axis; None: over all."""
        if axis is None:
            return replace(self, shapes=((),) * len(self.shapes))
        axes = set()
        for axis_index in axis if isinstance(axis, (tuple, list)) else (axis,):
            axes.add(axis_index % self.rank)
        reduced_shapes = tuple(tuple(n for i, n in enumerate(shape) if i not in axes) for shape in self.shapes)
        return replace(self, shapes=reduced_shapes)

    def joined(self, axis: int) -> "Form":
        """Return the form after a gather along an axis."""
        axis %= self.rank
        first = self.shapes[0]
        total = sum(shape[axis] for shape in self.shapes)
        return replace(self, shapes=((*first[:axis], total, *first[axis + 1 :]),) * len(self.shapes))


def leaves_with_paths(name: str, nest: Any) -> dict[str, Form]:
    """Return the form of each leaf of a nest by its reference."""
    if isinstance(nest, Form):
        return {name: nest}
    if isinstance(nest, dict):
        items = nest.items()
    else:
        items = enumerate(nest or ())
    forms = {}
    for part, child in items:
        forms.update(leaves_with_paths(f"{name}.{part}", child))
    return forms

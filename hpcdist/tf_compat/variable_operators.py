"""Use of a variable as a tensor: operators, torch functions, conversions."""

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from hpcdist.errors import UsageError

Operator = Callable[..., Any]


def _reading(function: Operator) -> Operator:
    """Return a method that applies an operator to the variable's value, and to operands on its right."""

    def method(self: Any, *operands: Any) -> Any:
        return function(self.read_value(), *map(_operand, operands))

    return method


def _reading_reversed(function: Operator) -> Operator:
    """Return a method that applies an operator to an operand on the left and the variable's value on the right."""

    def method(self: Any, left_operand: Any) -> Any:
        return function(_operand(left_operand), self.read_value())

    return method


def _converting(kind: Operator) -> Operator:
    """Return a method that makes a Python number of the value."""
    return lambda self: kind(self.read_value().detach())


def _refusing(sign: str, instead: str) -> Operator:
    """Return a method that refuses an in-place operator: it would replace the variable by a tensor."""

    def method(self: Any, operand: Any) -> Any:
        raise UsageError(
            f"Variable: expected variable.{instead} for {self.name!r}, got variable {sign} value, which would "
            f"rebind the name to a tensor; call the method."
        )

    return method


def _operand(value: Any) -> Any:
    """Return a variable's value, and an array as a tensor; anything else as it is."""
    if isinstance(value, Readable):
        return value.read_value()
    if isinstance(value, np.ndarray):
        return torch.as_tensor(value)
    return value


class Readable(ABC):
    """An object with a `read_value()` that expressions, torch functions and numpy call.

    Each use reads the value: collective where `read_value` is.
    """

    name: str
    __array_priority__ = 100  # numpy leaves `array + variable` to `__radd__`

    @abstractmethod
    def read_value(self) -> Tensor:
        """Return a copy of the value."""

    __add__ = _reading(operator.add)
    __radd__ = _reading_reversed(operator.add)
    __sub__ = _reading(operator.sub)
    __rsub__ = _reading_reversed(operator.sub)
    __mul__ = _reading(operator.mul)
    __rmul__ = _reading_reversed(operator.mul)
    __truediv__ = _reading(operator.truediv)
    __rtruediv__ = _reading_reversed(operator.truediv)
    __floordiv__ = _reading(operator.floordiv)
    __rfloordiv__ = _reading_reversed(operator.floordiv)
    __mod__ = _reading(operator.mod)
    __rmod__ = _reading_reversed(operator.mod)
    __pow__ = _reading(operator.pow)
    __rpow__ = _reading_reversed(operator.pow)
    __matmul__ = _reading(operator.matmul)
    __rmatmul__ = _reading_reversed(operator.matmul)
    __and__ = _reading(operator.and_)
    __rand__ = _reading_reversed(operator.and_)
    __or__ = _reading(operator.or_)
    __ror__ = _reading_reversed(operator.or_)
    __xor__ = _reading(operator.xor)
    __rxor__ = _reading_reversed(operator.xor)
    __neg__ = _reading(operator.neg)
    __abs__ = _reading(operator.abs)
    __invert__ = _reading(operator.invert)
    __lt__ = _reading(operator.lt)
    __le__ = _reading(operator.le)
    __gt__ = _reading(operator.gt)
    __ge__ = _reading(operator.ge)
    __eq__ = _reading(operator.eq)
    __ne__ = _reading(operator.ne)
    # as torch's: == compares elements, while sets and dicts go by identity
    __hash__ = object.__hash__
    __getitem__ = _reading(operator.getitem)
    __float__ = _converting(float)
    __int__ = _converting(int)
    __bool__ = _converting(bool)
    __complex__ = _converting(complex)
    __index__ = _converting(operator.index)

    __iadd__ = _refusing("+=", "assign_add(value)")
    __isub__ = _refusing("-=", "assign_sub(value)")
    __imul__ = _refusing("*=", "assign(variable * value)")
    __itruediv__ = _refusing("/=", "assign(variable / value)")
    __ifloordiv__ = _refusing("//=", "assign(variable // value)")
    __imod__ = _refusing("%=", "assign(variable % value)")
    __ipow__ = _refusing("**=", "assign(variable ** value)")
    __imatmul__ = _refusing("@=", "assign(variable @ value)")
    __iand__ = _refusing("&=", "assign(variable & value)")
    __ior__ = _refusing("|=", "assign(variable | value)")
    __ixor__ = _refusing("^=", "assign(variable ^ value)")

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.read_value())

    @classmethod
    def __torch_function__(
        cls,
        function: Operator,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call a function of torch with values in place of variables."""
        args, kwargs = tree_map(_operand, (args, kwargs or {}))
        return function(*args, **kwargs)

    def numpy(self) -> Any:
        """Return the result of `read_value` as an array on the host."""
        return self.read_value().detach().cpu().numpy()

    def __array__(
        self,
        dtype: Any = None,
        copy: bool | None = None,
    ) -> Any:
        return np.asarray(self.numpy(), dtype)

    def __dlpack__(self, **options: Any) -> Any:
        return self.read_value().__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.read_value().__dlpack_device__()

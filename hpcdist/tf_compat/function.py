"""`hpcdist.function`: a decorator with the arguments of tf.function that leaves a function as it is."""

from collections.abc import Callable
from typing import Any, TypeVar, overload

Function = TypeVar("Function", bound=Callable[..., Any])


@overload
def function(func: Function) -> Function: ...
@overload
def function(func: None = None, **options: Any) -> Callable[[Function], Function]: ...
def function(func: Any = None, **options: Any) -> Any:
    """Return a function as it is, so that the guides' `@tf.function` steps run unchanged, with or without arguments.

    torch executes eagerly, and a step that calls `strategy.run` or `reduce` communicates: tracing it would not pay.
    Compile the model itself, by torch.compile.

    Args:
        func: function that is decorated.
        options: options of tf.function, such as jit_compile or input_signature: accepted and ignored.
    """
    if func is None:
        return lambda decorated: decorated
    return func

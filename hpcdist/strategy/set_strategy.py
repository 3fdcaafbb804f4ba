"""A strategy for all code of the process."""

from contextlib import nullcontext

from hpcdist.strategy import context
from hpcdist.strategy.base import Strategy, get_strategy


def experimental_set_strategy(strategy: Strategy | None) -> None:
    """Enter a strategy's scope for all code that follows, in every thread; None leaves it again.

    Raises:
        RuntimeError: inside a strategy's scope or run.
    """
    if context.is_inside():
        raise RuntimeError(
            f"experimental_set_strategy: expected a call outside every strategy's scope and run, must not be called "
            f"inside one, got the scope of {type(get_strategy()).__name__}; leave it first."
        )
    if strategy is None or type(strategy) is Strategy:  # the pass-through one is what is left without any
        context.enter_everywhere(None, nullcontext())
    else:
        context.enter_everywhere(strategy, strategy._entering())

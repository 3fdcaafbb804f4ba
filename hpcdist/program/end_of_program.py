"""At the end of the program, a last look whether all ranks hold the same parameters and settings of optimizers.

Programs that never save are not compared otherwise, but for slices; see `drift.py`.
"""

import logging
import weakref

import numpy as np

from hpcdist.program.drift import StateDigests, odd_ranks
from hpcdist.runtime.world import World

logger = logging.getLogger("hpcdist")

#: What is compared at the end, for each world.
_watched: "weakref.WeakKeyDictionary[World, weakref.WeakSet[StateDigests]]" = (
    weakref.WeakKeyDictionary()
)


def watch(world: World, states: StateDigests) -> None:
    """Compare states when all ranks have left their programs. Not collective, but the same on all ranks of the role."""
    if world not in _watched:
        _watched[world] = weakref.WeakSet()
        world.call_before_free(_Comparison(world))
    _watched[world].add(states)


class _Comparison:
    """Compares what is left at the end. Collective over the ranks of the role.

    Args:
        world: held weakly, as it holds this.
    """

    def __init__(self, world: World) -> None:
        self._world = weakref.ref(world)

    def __call__(self) -> None:
        world = self._world()
        if world is None or world.role_comm.size == 1:
            return
        states = [state for state in _watched[world] if not state.is_reported]
        settings = sum(state.digest_of_settings() % (1 << 31) for state in states)
        parameters = sum(state.digest_of_all() % (1 << 31) for state in states)
        is_changed = any(state.is_changed_since_step for state in states)
        n_optimizers = sum(state.n_steppers for state in states)
        n_parameters = sum(len(state.parameters()) for state in states)
        of_rank = np.array([n_optimizers, settings, n_parameters, parameters, is_changed], np.int64)
        everyones = np.empty((world.role_comm.size, len(of_rank)), np.int64)
        world.wait(world.role_comm.Iallgather(of_rank, everyones))
        if world.role_comm.rank != 0:
            return
        # where ranks have freed other objects, sums say nothing
        if not np.ptp(everyones[:, 0]):
            _warn("the settings of optimizers", odd_ranks(everyones[:, 1].tolist()))
        # somebody may have loaded the best weights for a last evaluation
        is_any_changed = everyones[:, 4].any()
        if not np.ptp(everyones[:, 2]) and not is_any_changed:
            _warn("parameters", odd_ranks(everyones[:, 3].tolist()))


def _warn(subject: str, ranks: list[int]) -> None:
    if ranks:
        logger.warning(
            "end of the program: expected %s to be equal on all ranks, got others on rank %s: they have drifted apart; "
            "look for schedules that are fed by local losses, and for code that changes parameters on some ranks.",
            subject,
            ", ".join(map(str, ranks[:8])),
        )

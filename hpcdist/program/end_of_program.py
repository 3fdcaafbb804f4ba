"""At the end of the program, a last look whether all ranks hold the same parameters and settings of optimizers.

Ranks of programs that never save are otherwise compared only by slices; see `drift.py`.
"""

import logging
import weakref

import numpy as np

from hpcdist.program.drift import StateDigests, odd_ranks
from hpcdist.runtime.world import World

logger = logging.getLogger("hpcdist")

#: The states that are compared at the end, for each world, which is of a lower layer and does not know them.
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
    """Compares the states that exist at the end. Collective over the ranks of the role.

    Args:
        world: world whose ranks are compared; held weakly, as it holds this object.
    """

    def __init__(self, world: World) -> None:
        self._world = weakref.ref(world)

    def __call__(self) -> None:
        world = self._world()
        if world is None:
            return
        comm = world.role_comm
        # inside a round of local steps ranks are meant to differ
        if comm.size == 1 or world.step_flags.is_in_round:
            return
        states = [state for state in _watched[world] if not state.is_reported]
        limit = 1 << 31  # so that sums of digests fit
        settings = sum(state.digest_of_settings() % limit for state in states)
        parameters = sum(state.digest_of_all() % limit for state in states)
        is_changed = any(state.is_changed_since_step for state in states)
        n_optimizers = sum(state.n_steppers for state in states)
        n_parameters = sum(len(state.parameters()) for state in states)
        facts = [n_optimizers, settings, n_parameters, parameters, is_changed]
        row_of_rank = np.array(facts, np.int64)
        rows = np.empty((comm.size, len(facts)), np.int64)
        world.wait(comm.Iallgather(row_of_rank, rows))
        if comm.rank != 0:
            return
        optimizer_counts, settings_sums, parameter_counts, parameter_sums, changes = rows.T
        # where ranks have freed different objects, sums say nothing
        if not np.ptp(optimizer_counts):
            _warn("the settings of optimizers", odd_ranks(settings_sums.tolist()))
        # the program may have loaded the best weights for a last evaluation
        if not np.ptp(parameter_counts) and not changes.any():
            _warn("parameters", odd_ranks(parameter_sums.tolist()))


def _warn(subject: str, ranks: list[int]) -> None:
    """Log the ranks that differ in a subject, if there are any."""
    if ranks:
        first_ranks = ", ".join(map(str, ranks[:8]))
        logger.warning(
            "end of the program: expected %s to be equal on all ranks, got others on rank %s: they have drifted apart; "
            "look for schedules that are fed by local losses, and for code that changes parameters on some ranks.",
            subject,
            first_ranks,
        )

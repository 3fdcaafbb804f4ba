"""The same kind of training through a CheckpointManager, on one rank. Importing this starts MPI."""

import functools

import numpy as np

import hpcdist
from hpcdist.checkpoint.store import Saved, Store
from hpcdist.resilience import manager as manager_module

N_STEPS = 6


def run(path, disk, tell):
    """Train as far as `disk` allows; call `tell` with the each checkpoint once `wait` has returned."""
    manager_module.Store = functools.partial(Store, disk=disk)
    weights, step = np.linspace(-1, 1, 300), np.zeros((), np.int64)
    manager = hpcdist.CheckpointManager(hpcdist.Checkpoint(weights=weights, step=step), path, max_to_keep=2)
    manager.restore_or_initialize()
    while step < N_STEPS:
        step += 1
        weights[:] = weights * 0.9 + np.sin(np.arange(weights.size) * int(step))
        manager.save(int(step), blocking=int(step) % 2 == 0)
        manager.wait()
        tell(Saved(manager.attempt, int(step)))
    manager.end_attempt()

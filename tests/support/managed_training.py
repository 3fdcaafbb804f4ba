"""The same kind of training through a handler, a CheckpointManager and a MetricsFile, on one rank.

Importing this starts MPI. Every operation on the disk goes through the given one: files of checkpoints, the ledger,
`decision.json`, the records.
"""

import functools
import re

import numpy as np

import hpcdist
from hpcdist.checkpoint.store import Saved, Store
from hpcdist.run import record as record_module
from hpcdist.run.decision import DecisionFile
from hpcdist.saving import manager as manager_module

N_STEPS = 6


def weights_after(weights, step):
    return weights * 0.9 + np.sin(np.arange(weights.size) * step)


def start_weights():
    return np.linspace(-1, 1, 300)


def run(path, disk, tell):
    """Train as far as `disk` allows; call `tell` with each checkpoint that is durable and was read back."""
    manager_module.Store = functools.partial(Store, disk=disk)
    record_module.DecisionFile = functools.partial(DecisionFile, disk=disk)
    weights = start_weights()
    step = np.zeros((), np.int64)
    metrics = hpcdist.MetricsFile(path.parent / "metrics.jsonl", disk=disk)
    checkpoint = hpcdist.Checkpoint(weights=weights, step=step, metrics=metrics)
    manager = hpcdist.CheckpointManager(checkpoint, path, max_to_keep=2)

    def take_step():
        step[...] += 1
        weights[:] = weights_after(weights, int(step))

    with hpcdist.PreemptionCheckpointHandler(None, manager, save_every_steps=1) as handler:
        while handler.step < N_STEPS:
            handler.run(take_step)
            metrics.write(handler.step, total=float(weights.sum()))
            handler.poll()
            manager.wait()
            tell(saved_at(manager.latest_path))
    tell(saved_at(manager.latest_path))


def saved_at(path):
    """Return which checkpoint a path is of."""
    step, attempt = re.search(r"step-(\d+)-(\d+)\.h5$", path).groups()
    return Saved(int(attempt), int(step))

"""A training without ranks that saves, prunes and restores, and a disk that is watched.

What is killed, loses its power or has a disk that fails in the tests of checkpoints is this program.
"""

import functools
from pathlib import Path

import numpy as np

from hpcdist.checkpoint.durable import Disk
from hpcdist.checkpoint.image import FileImage
from hpcdist.checkpoint.layout import lay_out
from hpcdist.checkpoint.retention import Retention
from hpcdist.checkpoint.store import Saved, Store
from hpcdist.checkpoint.tree import NamedArray
from hpcdist.run.decision import suspects
from hpcdist.run.ledger import Launch, Ledger

OPERATIONS = [name for name, item in vars(Disk).items() if callable(item)]
N_STEPS = 8
KEPT = Retention(2, keep_best="loss")
#: Two jobs: who dies on a checkpoint in both suspects it.
LAUNCHES = [Launch(job, ("n1",), None, is_vouched=False) for job in ("7", "8")]


class WatchedDisk(Disk):
    """A disk whose every operation is carried out by `watch`."""

    def watch(self, name, act, *arguments):
        return act(*arguments)


def _watched(name):
    @functools.wraps(getattr(Disk, name))
    def operation(self, *arguments):
        return self.watch(name, functools.partial(getattr(Disk, name), self), *arguments)

    return operation


for _name in OPERATIONS:
    setattr(WatchedDisk, _name, _watched(_name))


class Training:
    """Saves every second step, and the last one twice; keeps two checkpoints, and the best one.

    Args:
        path: of the checkpoints.
        disk: the seam.
        tell: called with a checkpoint as soon as it is committed.
        retention: what is kept.
    """

    def __init__(self, path, disk=None, tell=lambda saved: None, retention=KEPT):
        self.store = Store(path, disk)
        self.ledger = Ledger(self.store)
        self.tell = tell
        self.retention = retention
        self.image = FileImage()
        self.step = 0
        self.weights = np.linspace(-1, 1, 300)

    def run(self):
        self.ledger.begin(LAUNCHES[0])
        self.store.run_id()
        self.restore(suspects(self.ledger.attempts()[:-1]))
        while self.step < N_STEPS:
            self.take_step()
            if self.step % 2 == 0:
                self.save()
        self.save()
        self.ledger.end("finished")
        return self

    def restore(self, skipped):
        latest_checkpoint = self.store.read_latest(skipped, lambda saved: self.ledger.restore(saved.step))
        if latest_checkpoint is not None:
            self.step = latest_checkpoint.index.state["step"]
            self.weights = latest_checkpoint.arrays[0].values.copy()
            self.store.resume_from(latest_checkpoint.saved)
        self.ledger.resume(self.step if latest_checkpoint else -1)

    def take_step(self):
        self.step += 1
        self.weights = self.weights * 0.9 + np.sin(np.arange(self.weights.size) * self.step)

    def save(self, prunes=True):
        arrays = [NamedArray("weights", "float64", self.weights)]
        facts = {"step": self.step, "time_s": 0.0, "metrics": {"loss": abs(self.step - 3.9)}, "written": {}}
        lay_out(self.image, facts, {"step": self.step}, arrays)  # the best is in the middle
        newest = Saved(self.store.attempt, self.step)
        self.store.path_of(self.step)
        self.store.commit(self.step, self.image)
        self.tell(newest)
        if prunes:
            self.store.verify_and_prune(newest, self.retention)
        self.store.note("commit", step=self.step)


def newest_saved(path):
    """Return the latest checkpoint that verifies, or None where there is none."""
    latest_checkpoint = Store(path).read_latest()
    if latest_checkpoint is None:
        return None
    return latest_checkpoint.saved


def make_fresh(path):
    """Return the newest checkpoint in a folder that is not there yet."""
    return None


def make_broken(path):
    """Leave what four attempts that died left; return the newest sound checkpoint.

    The newest checkpoint is damaged, two attempts died on the one before, a file is half written, and a line is torn.
    """
    first = Training(path)
    first.ledger.begin(LAUNCHES[0])
    for _ in range(6):
        first.take_step()
        if first.step % 2 == 0:
            first.save(prunes=False)
    for launch in LAUNCHES:
        died = Ledger(Store(path))
        died.begin(launch)
        died.resume(4)
    damage(path / str(Saved(1, 6)))
    (path / f".{Saved(3, 6)}.tmp-00000000-0123456789abcdef").write_bytes(b"half")
    Store(path).begin()
    (path / "attempts" / "0004.jsonl").write_text('{"event": "be')
    return Saved(1, 4)


#: What is there when the program starts.
STARTS = {"fresh": make_fresh, "broken": make_broken}


def damage(path: Path) -> None:
    """Flip a bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)

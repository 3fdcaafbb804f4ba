"""A training without ranks that saves, prunes and restores, and a disk that is watched.

What is killed, loses its power or has a disk that fails in the tests of checkpoints is this program.
"""

import functools
from pathlib import Path

import numpy as np

from hpcdist.checkpoint.durable import Disk
from hpcdist.checkpoint.folder import CheckpointFolder
from hpcdist.checkpoint.generations import Place, crashed_twice, folder_name
from hpcdist.checkpoint.image import FileImage
from hpcdist.checkpoint.layout import lay_out
from hpcdist.checkpoint.retention import Retention
from hpcdist.checkpoint.tree import NamedArray

OPERATIONS = [name for name, item in vars(Disk).items() if callable(item)]
N_STEPS = 8
KEPT = Retention(2, keep_best="loss")


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
        tell: called with the place of a checkpoint as soon as it is committed.
        retention: what is kept.
    """

    def __init__(self, path, disk=None, tell=lambda place: None, retention=KEPT):
        self.folder = CheckpointFolder(path, disk)
        self.tell, self.retention = tell, retention
        self.image = FileImage()
        self.step, self.weights = 0, np.linspace(-1, 1, 300)

    def run(self):
        self.folder.begin()
        self.folder.run_id()
        restored = self.restore(crashed_twice(self.folder.fruitless_attempts()))
        self.folder.note_attempt(restored, has_ended=False)
        while self.step < N_STEPS:
            self.take_step()
            if self.step % 2 == 0:
                self.save()
        self.save()
        self.folder.note_attempt(restored, has_ended=True)
        return self

    def restore(self, suspects):
        found = self.folder.read_latest(suspects)
        if found is None:
            return None
        self.step, self.weights = found.state["step"], found.arrays[0].values.copy()
        self.folder.resume_from(found.place)
        return str(found.place)

    def take_step(self):
        self.step += 1
        self.weights = self.weights * 0.9 + np.sin(np.arange(self.weights.size) * self.step)

    def save(self, prunes=True):
        arrays = [NamedArray("weights", "float64", self.weights)]
        lay_out(self.image, {"step": self.step}, arrays)
        path = self.folder.new_data_path(self.step)
        metrics = {"loss": abs(self.step - 3.9)}  # the best is in the middle
        newest = self.folder.commit(self.step, path, self.image, {}, metrics=metrics)
        self.tell(Place(self.folder.generation, self.step))
        if prunes:
            self.folder.prune(newest, self.retention)


def final_bits(path):
    """Return the state and the bytes that the latest checkpoint holds, or None where there is none."""
    found = CheckpointFolder(path).read_latest()
    return None if found is None else (found.state, [array.values.tobytes() for array in found.arrays])


def newest_place(path):
    """Return the place of the latest checkpoint that verifies, or None where there is none."""
    found = CheckpointFolder(path).read_latest()
    return None if found is None else found.place


def make_fresh(path):
    """Return the place of the newest checkpoint in a folder that is not there yet."""
    return None


def make_broken(path):
    """Leave what four attempts that died left; return the place of the newest sound checkpoint.

    The newest checkpoint is damaged, two attempts died on the one before, and files are half written.
    """
    first = Training(path)
    first.folder.begin()
    for _ in range(6):
        first.take_step()
        if first.step % 2 == 0:
            first.save(prunes=False)
    for _ in range(2):
        died = CheckpointFolder(path)
        died.begin()
        died.note_attempt("gen-0001/step-00000004", has_ended=False)
    own = path / folder_name(1)
    damage(own / "step-00000006.h5")
    (own / "step-00000008.h5").write_bytes(b"not named by a manifest")
    (path / folder_name(3) / "step-00000006.h5.tmp-1").write_bytes(b"half")
    CheckpointFolder(path).begin()
    return Place(1, 4)


#: What is there when the program starts.
STARTS = {"fresh": make_fresh, "broken": make_broken}


def damage(path: Path) -> None:
    """Flip a bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)

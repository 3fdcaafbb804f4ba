"""Count the Python frames of hpcdist that a gradient, a batch, a save and an epoch of fit pass through.

mpirun -n 2 python benchmarks/walks.py             (rank 0 prints)
mpirun -n 2 python benchmarks/walks.py --names     (also each function entered, with how often)

A reader has to keep these frames in mind, and each frame takes about a tenth of a microsecond of a training step.
"""

import inspect
import os
import sys
import tempfile
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from command_line import parser_of
from torch import nn

import hpcdist
from hpcdist.runtime.mpi import MPI

PACKAGE = f"{Path(hpcdist.__file__).parent}{os.sep}"
N_STEPS = 5
#: The function that reads another rank's cell while this rank waits. Its calls are not counted: a slower machine makes
#: more of them.
POLL = "runtime/node_memory.py:<lambda>"


class Walk:
    """Frames of hpcdist entered on this thread while recording."""

    def __init__(self):
        self.entered = Counter()
        self.deepest_iterators = []
        self._stack = []

    @contextmanager
    def recording(self):
        """Count the frames of a block."""
        sys.setprofile(self._see)
        try:
            yield
        finally:
            sys.setprofile(None)

    def _see(self, frame, event, _argument):
        code = frame.f_code
        if not code.co_filename.startswith(PACKAGE):
            return
        file = Path(code.co_filename).relative_to(PACKAGE)
        name = f"{file}:{code.co_name}"
        if name == POLL:
            return
        if event == "call":
            is_generator = bool(code.co_flags & inspect.CO_GENERATOR)
            is_iterator = is_generator or code.co_name == "__next__"
            self._stack.append(name if is_iterator else None)
            self.entered[name] += 1
            iterators = [entry for entry in self._stack if entry]
            if len(iterators) > len(self.deepest_iterators):
                self.deepest_iterators = iterators
        elif event == "return" and self._stack:
            self._stack.pop()


def mlp(n_hidden):
    """Return the guides' MLP with more or fewer hidden layers, of 2 parameters each."""
    layers = [nn.Linear(784, 256), nn.ReLU()]
    for _ in range(n_hidden):
        layers += [nn.Linear(256, 256), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(256, 10))


def frames_of_steps(strategy, n_hidden):
    """Return (walk, parameters) of training steps after the plan has been made."""
    with strategy.scope():
        model = mlp(n_hidden)
        optimizer = torch.optim.Adam(model.parameters())
    rows = torch.randn(32, 784)
    labels = torch.zeros(32, dtype=torch.int64)
    walk = Walk()
    for step in range(2 + N_STEPS):
        outputs = model(rows)
        loss = nn.functional.cross_entropy(outputs, labels)
        optimizer.zero_grad()
        if step < 2:
            loss.backward()
            optimizer.step()
            continue
        with walk.recording():
            loss.backward()
            optimizer.step()
    parameters = list(model.parameters())
    return walk, len(parameters)


def walk_a_gradient():
    """Return (walk, frames that a further parameter adds to a step, frames of a step, parameters)."""
    strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op=hpcdist.ReduceOp.MEAN)
    small, n_small = frames_of_steps(strategy, 1)
    large, n_large = frames_of_steps(strategy, 9)
    small_total = small.entered.total() / N_STEPS
    large_total = large.entered.total() / N_STEPS
    n_further = n_large - n_small
    per_parameter = (large_total - small_total) / n_further
    return small, per_parameter, small_total, n_small


def walk_a_batch():
    """Return the walk of batches of a distributed dataset that maps, shuffles and batches."""
    strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op=hpcdist.ReduceOp.MEAN)
    rows = np.zeros((512, 8), np.float32)
    labels = np.zeros(512, np.int64)
    dataset = hpcdist.Dataset.from_tensor_slices((rows, labels))
    dataset = dataset.map(add_one)
    dataset = dataset.shuffle(512, seed=1)
    dataset = dataset.batch(64)
    distributed = strategy.experimental_distribute_dataset(dataset)
    batches = iter(distributed)
    next(batches)
    walk = Walk()
    with walk.recording():
        for _ in range(N_STEPS):
            next(batches)
    return walk


def add_one(row, label):
    """Change a row, as the function of a dataset's map."""
    return row + 1, label


def walk_a_save():
    """Return the walks of a save and of a restore of a checkpoint, on the calling thread."""
    strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op=hpcdist.ReduceOp.MEAN)
    with strategy.scope():
        model = mlp(1)
        optimizer = torch.optim.Adam(model.parameters())
    rows = torch.randn(8, 784)
    labels = torch.zeros(8, dtype=torch.int64)
    loss = nn.functional.cross_entropy(model(rows), labels)
    loss.backward()
    optimizer.step()
    with tempfile.TemporaryDirectory() as name:
        folder = MPI.COMM_WORLD.bcast(name)
        checkpoint = hpcdist.Checkpoint(model=model, optimizer=optimizer)
        manager = hpcdist.CheckpointManager(checkpoint, folder)
        manager.save(1)
        save = Walk()
        restore = Walk()
        with save.recording():
            manager.save(2, blocking=True)
        with restore.recording():
            manager.restore_or_initialize()
        MPI.COMM_WORLD.Barrier()
    return save, restore


def walk_an_epoch():
    """Return the walk of an epoch of fit, after another one."""
    strategy = hpcdist.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = hpcdist.Model(mlp(1))
        model.compile("adam", nn.CrossEntropyLoss(), metrics=["accuracy"])
    rows = np.zeros((32 * N_STEPS, 784), np.float32)
    labels = np.zeros(len(rows), np.int64)
    model.fit(rows, labels, batch_size=32, verbose=0)
    walk = Walk()
    with walk.recording():
        model.fit(rows, labels, batch_size=32, verbose=0)
    return walk


def report(title, walk, per, with_names):
    """Print one walk.

    Args:
        title: text before the numbers.
        walk: the walk.
        per: number of steps, batches or saves in it.
        with_names: whether to print each function.
    """
    n_frames = round(walk.entered.total() / per, 1)
    files = {name.partition(":")[0] for name in walk.entered}
    n_files = len(files)
    n_functions = len(walk.entered)
    print(f"{title}: {n_frames} frames of {n_functions} functions in {n_files} files")
    if with_names:
        for name, count in walk.entered.most_common():
            n_entered = count / per
            print(f"    {n_entered:8.1f}  {name}")


def main():
    parser = parser_of(__doc__)
    parser.add_argument(
        "--names",
        action="store_true",
        help="print each function entered, and how often",
    )
    args = parser.parse_args()
    gradient, per_parameter, total, n_parameters = walk_a_gradient()
    batch = walk_a_batch()
    save, restore = walk_a_save()
    epoch = walk_an_epoch()
    if MPI.COMM_WORLD.rank == 0:
        print(f"a gradient: {per_parameter:.1f} frames for each further parameter and step")
        each = round(total / n_parameters, 1)
        title = f"a step of {n_parameters} parameters ({each} each)"
        report(title, gradient, N_STEPS, args.names)
        n_iterators = len(batch.deepest_iterators)
        report(f"a batch ({n_iterators} nested iterators)", batch, N_STEPS, args.names)
        report("a save", save, 1, args.names)
        report("a restore", restore, 1, args.names)
        report(f"an epoch of fit ({N_STEPS} steps)", epoch, 1, args.names)


if __name__ == "__main__":
    main()

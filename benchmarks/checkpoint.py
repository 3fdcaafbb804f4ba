"""Time checkpoints on one rank: hpcdist beside a plain write, torch.save, safetensors and torch's async_save.

python benchmarks/checkpoint.py --out out/checkpoint
python benchmarks/checkpoint.py --training --out out/checkpoint     (what a save every 10 s costs a training)

Every contender writes a new file of the same float32 values into --folder, which should be on the disk of interest,
and forces it to the disk. Removing the file, and work in the background, is not timed. The file of every block of
hpcdist is verified.
"""

import itertools
import os
import shutil
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from command_line import add_report_options, parser_of
from gloo import start_gloo
from measure import Environment, cpu_s
from models import adam, batches, build, train_step
from report import compare
from torch import nn

import hpcdist
from hpcdist.runtime.process import make_world

RAW = "write and fsync"
#: Sizes of the layers of the model that is saved, as parts of the whole: large and small layers.
SHARES = (0.4, 0.2, 0.1, 0.1, 0.05, 0.05, *[0.1 / 50] * 50)


def parse_args():
    parser = parser_of(__doc__)
    add_report_options(parser, "checkpoint", n_rounds=6)
    parser.add_argument(
        "--folder",
        type=Path,
        help="where files are written; default: a temporary folder",
    )
    parser.add_argument("--megabytes", type=int, default=400)
    parser.add_argument(
        "--training",
        action="store_true",
        help="train with and without a save every --seconds",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=10.0,
        help="between two saves of --training",
    )
    return parser.parse_args()


def make_model(megabytes):
    """Return a module of random float32 parameters of this size."""
    generator = torch.Generator().manual_seed(0)
    parameters = nn.ParameterList()
    for share in SHARES:
        n_elements = int(share * megabytes * 250_000)
        values = torch.randn(n_elements, generator=generator)
        parameters.append(nn.Parameter(values))
    return parameters


def sync(path):
    """Force a file to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def write_raw(model, path):
    with open(path, "wb", buffering=0) as file:
        for parameter in model:
            remaining = parameter.detach().numpy().view("u1").data
            while remaining:  # a call writes at most 2 GiB
                remaining = remaining[file.write(remaining) :]
        os.fsync(file.fileno())


def write_torch(model, path):
    torch.save(model.state_dict(), path)
    sync(path)


def write_safetensors(model, path):
    from safetensors.torch import save_file

    save_file(model.state_dict(), path)
    sync(path)


class Files:
    """Names for new files, and blocks that write one file each."""

    def __init__(self, folder):
        self._folder = folder
        self._numbers = itertools.count()

    def block(self, write, model):
        """Return the time of writing a file; then remove it."""
        number = next(self._numbers)
        path = self._folder / f"file-{number}"
        seconds = timed(lambda: write(model, path))
        path.unlink()
        return seconds


def timed(act):
    """Return wall seconds and CPU-seconds of a function."""
    cpu_before = cpu_s()
    started = time.perf_counter()
    act()
    taken_s = time.perf_counter() - started
    return taken_s, cpu_s() - cpu_before


class Saves:
    """hpcdist's saves of a model, one step each."""

    def __init__(self, model, folder):
        self._manager = hpcdist.CheckpointManager(
            hpcdist.Checkpoint(model=model), folder, max_to_keep=1
        )
        self._steps = itertools.count(1)

    def block(self, blocking):
        """Return the time that the training thread waits; then wait until the file is written and verified."""
        step = next(self._steps)
        seconds = timed(lambda: self._manager.save(step, blocking=blocking))
        self._manager.wait()
        return seconds


def async_save(model, folder):
    """Return the time that the training thread waits in torch's async_save; then await its end, and remove the file."""
    path = folder / "dcp"
    pending = []

    def save():
        state = model.state_dict()
        future = dcp.async_save(state, checkpoint_id=path)
        pending.append(future)

    seconds = timed(save)
    pending[0].result()
    shutil.rmtree(path)
    return seconds


class Copies:
    """Plain copies of a model's parameters in memory, by one thread for each core: the least stall."""

    def __init__(self, model):
        self._arrays = []
        self._copies = []
        for parameter in model:
            array = parameter.detach().numpy()
            self._arrays.append(array)
            self._copies.append(array.copy())
        self._n_threads = len(os.sched_getaffinity(0))
        self._threads = ThreadPoolExecutor(self._n_threads)

    def block(self):
        """Return the time of a copy of all parameters."""
        return timed(self._copy_all)

    def _copy_all(self):
        numbers = range(self._n_threads)
        for _ in self._threads.map(self._copy, numbers):
            pass

    def _copy(self, number):
        """Copy the share of a thread."""
        for copy, array in zip(self._copies, self._arrays, strict=True):
            share = -(-array.size // self._n_threads)
            start = number * share
            stop = start + share
            np.copyto(copy[start:stop], array[start:stop])


def is_installed(name):
    """Return whether a module can be imported; print a line if not."""
    try:
        __import__(name)
    except ImportError:
        print(f"{name} is not installed: left out")
        return False
    return True


def time_writes(model, folder, n_rounds):
    files = Files(folder)
    saves = Saves(model, folder / "writes")
    contenders = {
        RAW: partial(files.block, write_raw, model),
        "torch.save and fsync": partial(files.block, write_torch, model),
        "hpcdist, until durable": partial(saves.block, blocking=True),
    }
    if is_installed("safetensors"):
        contenders["safetensors and fsync"] = partial(files.block, write_safetensors, model)
    for block in contenders.values():
        block()
    return compare("write", contenders, [RAW], n_rounds)


def time_stalls(model, folder, n_rounds):
    saves = Saves(model, folder / "stalls")
    until = "hpcdist, until durable"
    contenders = {
        until: partial(saves.block, blocking=True),
        "hpcdist, in the background": partial(saves.block, blocking=False),
        "torch async_save": partial(async_save, model, folder),
        "a copy in memory": Copies(model).block,
    }
    for block in contenders.values():
        block()
    return compare("stall of the training thread", contenders, [until], n_rounds)


class Training:
    """Blocks of training steps of one model, with or without a save at the start of each block."""

    def __init__(self, folder, seconds):
        self._model = build("wide")
        self._data = batches(64, 0, 1)
        self._optimizer = adam(self._model)
        checkpoint = hpcdist.Checkpoint(model=self._model, optimizer=self._optimizer)
        self._manager = hpcdist.CheckpointManager(checkpoint, folder, max_to_keep=1)
        self._steps = itertools.count(1)
        self._train(20)
        wall_s, _ = timed(lambda: self._train(50))
        self._n_steps = int(seconds / wall_s * 50)

    def _train(self, n_steps):
        for number in range(n_steps):
            batch = self._data[number % len(self._data)]
            train_step(self._model, self._optimizer, batch)

    def block(self, with_save):
        """Return the time of a block."""

        def run():
            if with_save:
                self._manager.save(next(self._steps), blocking=False)
            self._train(self._n_steps)

        seconds = timed(run)
        self._manager.wait()
        return seconds


def time_training(folder, n_rounds, seconds):
    training = Training(folder / "training", seconds)
    without = "no save"
    contenders = {
        without: partial(training.block, with_save=False),
        f"a save every {seconds:g} s": partial(training.block, with_save=True),
    }
    return compare("training", contenders, [without], n_rounds)


def main():
    args = parse_args()
    comm = make_world().role_comm
    torch.set_num_threads(1)
    environment = Environment(comm)
    folder = Path(tempfile.mkdtemp(prefix="hpcdist-checkpoint-", dir=args.folder))
    try:
        with start_gloo(comm):
            if args.training:
                training = time_training(folder, args.rounds, args.seconds)
                cases = [training]
            else:
                model = make_model(args.megabytes)
                writes = time_writes(model, folder, args.rounds)
                stalls = time_stalls(model, folder, args.rounds)
                cases = [writes, stalls]
    finally:
        shutil.rmtree(folder)
    environment.publish(cases, args.out, "checkpoint", "checkpoint")


if __name__ == "__main__":
    main()

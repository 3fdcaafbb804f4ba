"""Scripts as users write them, drawn at random: data, a loop, what it does at each step, and how the attempt ends.

Every script is run unbroken, and in attempts that are stopped or killed at random steps. It must end with the bits of
the unbroken run, which must have the weights of one process on the global batch; or it is refused, and then it must
pass once the cure that the message names is applied. `EXPECTED_REFUSALS` says beforehand what may be refused.

    mpirun -n 2 python tests/support/loops.py --scripts 100 --seed 1
"""

import argparse
import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import asdict, dataclass, replace

import numpy as np
import torch
from torch import nn

import hpcdist
from hpcdist.data.distributed_loader import has_own_sampler
from hpcdist.data.sampler_order import SamplerOrder, drawn_seed
from hpcdist.errors import HpcdistError
from hpcdist.runtime.mpi import MPI
from hpcdist.runtime.process import call_when_done, make_world

DATA = (
    "dataset",
    "loader",
    "weighted loader",
    "bucket loader",
    "stream",
    "worker stream",
    "own loader",
    "own loader, torch's sampler",
    "index",
    "generator",
)
#: Kinds of data that `experimental_distribute_dataset` divides.
DISTRIBUTED = DATA[:6]
#: Workers of loaders that have any.
N_WORKERS = 2
#: How the workers of loaders are started; None reads in the rank itself.
WORKERS = ("none", "fork", "persistent", "forkserver")
LOOPS = (
    "plain",
    "draws ahead",
    "prefetcher",
    "deep prefetcher",
    "peek",
    "break",
    "islice",
    "zip",
    "accumulation",
    "gan",
    "lbfgs",
    "casts",
)
STEPS = ("plain", "clipping", "amp", "schedule", "ema")
EPOCH_ENDS = ("nothing", "schedule", "validation", "plateau", "plateau with gradients")
MODELS = ("linear", "dropout", "batch norm")
#: Where random numbers are drawn beside the model's, and from which library.
NUMBERS = ("none", "rows", "collate", "loop")
LIBRARIES = ("numpy", "python", "torch", "own")
#: Kinds of data and loop of which a refusal is expected, by what a script has, and the cure that the message names.
EXPECTED_REFUSALS = {
    ("data", "own loader, torch's sampler"): "distribute",
    ("data", "index"): "poll",
    ("data", "generator"): "poll",
    ("loop", "islice"): "take",
    ("loop", "casts"): "as drawn",
    ("loop", "zip"): "drop",
}
N_STEPS_TO_BREAK = 23


@dataclass(frozen=True)
class Script:
    """What a script is made of.

    `left_out`: whether the Checkpoint lacks what drives the optimizer. `cure`: what a message has told the user to
    change.
    """

    data: str
    loop: str
    step: str
    epoch_end: str
    model: str
    n_rows: int
    batch: int
    seed: int
    workers: str = "none"
    numbers: str = "none"
    library: str = "numpy"
    left_out: bool = False
    cure: str = ""

    @property
    def is_distributed(self):
        """Whether the strategy divides the batches."""
        return self.data in DISTRIBUTED or self.cure in ("distribute", "take")

    @property
    def n_epochs(self):
        """Enough for the steps within which a script is refused that cannot be saved."""
        if self.loop == "islice":
            return 14
        if self.may_be_refused:
            return 8
        return 3

    @property
    def is_global(self):
        """Whether one process on the global batch has the same weights, but for rounding."""
        return self.model == "linear" and self.numbers == "none"

    @property
    def drivers(self):
        """Return the variables of what drives the optimizer."""
        names = {"schedule": ["schedule"], "ema": ["ema"], "amp": ["scaler"]}.get(self.step, [])
        has_epochs = self.epoch_end == "schedule" or self.epoch_end.startswith("plateau")
        if has_epochs:
            return [*names, "epochs"]
        return names

    @property
    def may_be_refused(self):
        """Return the cures of refusals that are expected."""
        return {cure for (part, kind), cure in EXPECTED_REFUSALS.items() if getattr(self, part) == kind}


def draw(seed):
    """Return a script."""
    random_numbers = random.Random(seed)
    data = random_numbers.choices(DATA, (8, 8, 6, 6, 5, 6, 10, 1, 1, 1))[0]
    loop = random_numbers.choices(LOOPS, (6, 6, 6, 4, 4, 4, 1, 4, 6, 6, 4, 1))[0]
    step = random_numbers.choice(STEPS)
    epoch_end = random_numbers.choice(EPOCH_ENDS)
    model = random_numbers.choices(MODELS, (3, 1, 1))[0]
    batch = random_numbers.choice((6, 8, 12))
    n_rows = batch * random_numbers.choice((3, 4)) + random_numbers.choice((0, 0, 1, 2, 5))
    if loop == "lbfgs":
        step = "plain"
        model = "linear"
    if loop in ("gan", "zip") and data in ("index", "generator"):
        data = "dataset"
    if loop == "zip" and data in ("weighted loader", "bucket loader", "stream", "worker stream"):
        data = "loader"
    if loop == "zip":
        batch = random_numbers.choice((6, 12))  # divided into the same fractions as the others' 12
        n_rows = batch * random_numbers.choice((3, 4)) + random_numbers.choice((0, 0, 0, 1, 5))
    if data in ("own loader, torch's sampler", "index", "generator") and loop in ("accumulation", "islice"):
        loop = "plain"
    if model == "batch norm":
        # no replica has a single row
        batch = 12
        n_rows = 12 * random_numbers.choice((3, 4))
    if data.startswith("own") or data in ("index", "generator"):
        n_rows = n_rows // 12 * 12 + 12  # the same rows on 1, 2 and 3 ranks: a sampler gives some twice
        batch = 6
    if data in ("bucket loader", "worker stream"):
        model = "linear" if model == "batch norm" else model
    if data in ("stream", "worker stream") and loop in (
        "islice",
        "peek",
    ):  # nobody knows where a pass ends that was left
        loop = "plain"
    workers = random_numbers.choices(WORKERS, (20, 8, 8, 1))[0]
    if data in ("dataset", "stream", "index", "generator"):
        workers = "none"
    if data == "worker stream" and workers == "none":
        workers = "fork"
    numbers = random_numbers.choices(NUMBERS, (6, 3, 1, 3))[0]
    library = random_numbers.choice(LIBRARIES)
    if data in ("index", "generator") and numbers != "none":
        numbers = "loop"
    if numbers == "collate" and not ("loader" in data or data == "worker stream"):
        numbers = "rows"
    if numbers == "loop" and library == "own":  # a generator of the program's own, which it would have to save
        library = "numpy"
    if numbers == "rows" and library == "own" and data == "worker stream":  # each worker draws all rows
        library = "numpy"
    script = Script(data, loop, step, epoch_end, model, n_rows, batch, seed, workers, numbers, library)
    return replace(script, left_out=bool(script.drivers) and random_numbers.random() < 0.12)


# -- the text of a script --------------------------------------------------------------------------------------------


def text_of(script):
    """Return the script's source. `job` is what the harness gives it, as a cluster gives a file and a signal."""
    indent = "        "
    lines = [*_head(script), "with handler:", *_first_lines(script)]
    lines += [f"    for epoch in range({_first_epoch(script)}, {script.n_epochs}):"]
    lines += [indent + line for line in [*_pass(script), *_epoch_end(script)]]
    return "\n".join(lines) + "\n"


def _head(script):
    checkpoint_arguments = ["model=model", "optimizer=optimizer", "strategy=strategy"]
    lines = ["strategy = job.strategy()", "with strategy.scope():", f"    model = job.model({script.model!r})"]
    if script.loop == "gan":
        lines += ["    other = job.model('linear')"]
        lines += ["    other_optimizer = torch.optim.SGD(other.parameters(), lr=0.05)"]
        checkpoint_arguments += ["other=other", "other_optimizer=other_optimizer"]
    if script.loop == "lbfgs":
        kind = "LBFGS(model.parameters(), lr=0.02, max_iter=2"
    else:
        kind = "SGD(model.parameters(), lr=0.05, momentum=0.9"
    lines += [f"    optimizer = torch.optim.{kind})"]
    lines += _data_lines(script, checkpoint_arguments)
    if script.step == "schedule":
        lines += ["schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)"]
        checkpoint_arguments += ["schedule=schedule"]
    if script.step == "ema":
        lines += ["ema = torch.optim.swa_utils.AveragedModel(model)"]
        checkpoint_arguments += ["ema=ema"]
    if script.step == "amp":
        lines += ["scaler = torch.amp.GradScaler('cpu', init_scale=4.0)"]
        checkpoint_arguments += ["scaler=scaler"]
    if script.epoch_end == "schedule":
        lines += ["epochs = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)"]
        checkpoint_arguments += ["epochs=epochs"]
    if script.epoch_end.startswith("plateau"):
        lines += [
            "epochs = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.9, patience=0, threshold=10.0)"
        ]
        checkpoint_arguments += ["epochs=epochs"]
    if script.epoch_end in ("validation", "plateau", "plateau with gradients"):
        lines += ["validation = strategy.experimental_distribute_dataset(job.validation())"]
    if script.left_out:
        left_out = script.drivers[0]
        checkpoint_arguments = [item for item in checkpoint_arguments if not item.startswith(f"{left_out}=")]
    lines += [f"checkpoint = hpcdist.Checkpoint({', '.join(checkpoint_arguments)})"]
    lines += ["handler = job.handler(checkpoint)"]
    return lines


def _data_lines(script, checkpoint_arguments):
    if script.is_distributed:
        if script.data in DISTRIBUTED:
            kind = script.data
        else:
            kind = "loader"
        checkpoint_arguments += ["data=batches"]
        lines = [f"batches = strategy.experimental_distribute_dataset(job.{kind.replace(' ', '_')}())"]
    elif script.data == "own loader":
        checkpoint_arguments += ["data=sampler"]
        lines = ["sampler = hpcdist.DistributedSampler(job.tensors(), shuffle=False)"]
        lines += ["batches = job.own_loader(sampler)"]
    elif script.data == "own loader, torch's sampler":
        lines = ["batches = job.own_loader(job.torch_sampler())"]
    elif script.data == "index":
        lines = ["batches = job.index_loop()"]
    else:
        lines = ["batches = job.generator()"]
    if script.loop == "zip":
        lines += ["others = strategy.experimental_distribute_dataset(job.others())"]
        checkpoint_arguments += ["others=others"]
    return lines


def _first_epoch(script):
    if script.is_distributed:
        return "batches.epoch"
    if script.data == "own loader":
        return "sampler.epoch"
    return "job.first_epoch(handler)"


def _first_lines(script):
    if script.loop == "accumulation":
        return ["    n_accumulated = 0"]
    return []


def _pass(script):
    """Return the lines of one epoch's loop over batches."""
    source = "batches"
    if not (script.is_distributed or script.data == "own loader"):
        source = "job.rest(batches, handler, epoch)"
    lines = ["model.train()"]
    if script.data == "own loader" and not script.is_distributed:
        lines += ["sampler.set_epoch(epoch)"]
    body = _step(script)
    if script.loop == "draws ahead":
        lines += [
            f"iterator = iter({source})",
            "batch = next(iterator, None)",
            "while batch is not None:",
            "    x, y = batch",
        ]
        lines += ["    optimizer.zero_grad()", f"    loss = {_loss(script)}", "    batch = next(iterator, None)"]
        return lines + ["    " + line for line in _after_loss(script)]
    if script.loop == "peek":
        lines += [f"first = next(iter({source}), None)"]
    header = {
        "prefetcher": f"for x, y in job.ahead({source}, 1):",
        "deep prefetcher": f"for x, y in job.ahead({source}, 3):",
        "islice": "for x, y in batches.take(2):"
        if script.cure == "take"
        else f"for x, y in itertools.islice({source}, 2):",
        "zip": f"for (x, y), (u,) in zip({source}, others):",
        "casts": f"for x, y in job.ahead({source}, 1):",
    }.get(script.loop, f"for x, y in {source}:")
    lines += [header]
    if script.loop == "casts" and script.cure != "as drawn":
        lines += ["    x = x + 0"]
    if script.numbers == "loop":
        lines += [f"    noise = 1 + 0.1 * job.draw_{script.library}()"]
    lines += ["    " + line for line in body]
    if script.loop == "break":
        lines += [f"    if handler.step >= {N_STEPS_TO_BREAK}:", "        break"]
        lines += [f"if handler.step >= {N_STEPS_TO_BREAK}:", "    break"]
    return lines


def _loss(script):
    is_noisy = script.numbers == "loop" and script.loop != "draws ahead"
    if is_noisy:
        return "noise * job.loss(model, x, y)"
    return "job.loss(model, x, y)"


def _step(script):
    """Return the lines of one iteration, which begins with a batch x, y."""
    if script.loop == "lbfgs":
        lines = [
            "def closure():",
            "    optimizer.zero_grad()",
            f"    loss = {_loss(script)}",
            "    loss.backward()",
        ]
        return [*lines, "    return loss", "optimizer.step(closure)", *_end_of_step(script)]
    if script.loop == "gan":
        lines = ["optimizer.zero_grad()", f"loss = {_loss(script)}"]
        lines += [*_backward(script), *_optimizer_step(script)]
        lines += ["other_optimizer.zero_grad()", "job.loss(other, x, y).backward()", "other_optimizer.step()"]
        return lines + _end_of_step(script)
    if script.loop == "accumulation":
        lines = [f"loss = {_loss(script)} / 2", *_backward(script), "n_accumulated += 1"]
        inner = [*_optimizer_step(script), "optimizer.zero_grad()", *_end_of_step(script)]
        return [*lines, "if n_accumulated % 2 == 0:", *("    " + line for line in inner)]
    lines = ["optimizer.zero_grad()", f"loss = {_loss(script)}"]
    if script.loop == "zip":
        lines += ["loss = loss + 0.1 * job.penalty(model, u)"]
    return lines + _after_loss(script)


def _after_loss(script):
    return [*_backward(script), *_optimizer_step(script), *_end_of_step(script)]


def _backward(script):
    if script.step == "amp":
        return ["scaler.scale(loss).backward()"]
    return ["loss.backward()"]


def _optimizer_step(script):
    if script.step == "clipping":
        return ["nn.utils.clip_grad_norm_(model.parameters(), 0.1)", "optimizer.step()"]
    if script.step == "amp":
        return ["scaler.step(optimizer)", "scaler.update()"]
    if script.step == "schedule":
        return ["optimizer.step()", "schedule.step()"]
    if script.step == "ema":
        return ["optimizer.step()", "ema.update_parameters(model)"]
    return ["optimizer.step()"]


def _end_of_step(script):
    lines = ["job.harm(handler)"]
    if script.cure == "poll":
        return [*lines, "handler.poll()"]
    return lines


def _epoch_end(script):
    if script.epoch_end == "nothing":
        return []
    if script.epoch_end == "schedule":
        return ["epochs.step()"]
    lines = ["model.eval()", "total = 0.0"]
    if script.epoch_end == "plateau with gradients":
        grad = "torch.enable_grad()"
    else:
        grad = "torch.no_grad()"
    lines += [f"with {grad}:", "    for x, y in validation:", "        total += job.sum_of_losses(model, x, y)"]
    lines += ["job.harm_in_validation(handler)", "total = job.sum_over_ranks(total)"]
    if script.epoch_end.startswith("plateau"):
        return [*lines, "epochs.step(total)"]
    return lines


# -- how it is run -----------------------------------------------------------------------------------------------------


def _normal(*shape, generator):
    """Return random numbers in float64, so that rounding does not grow to a difference."""
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


class Killed(BaseException):
    """Ends an attempt on all ranks as a kill does: nothing is saved."""


class Job:
    """What a script is given: data, a strategy, and the moment at which it is stopped or killed.

    Args:
        script: see there.
        folder: of the run; None trains in one process on the global batch, by plain torch.
        end: None, or ("stop", "kill" or "SIGKILL", step, rank): a kill is an error on all ranks, SIGKILL a real one.
    """

    def __init__(self, script, folder=None, end=None):
        self.script = script
        self.folder = folder
        self.end = end
        self.comm = MPI.COMM_WORLD
        self.is_plain = folder is None
        self.is_polled = script.cure == "poll" or self.is_plain
        self.n_batches = self._n_optimizer_steps()
        self.steps = 0

    def _n_optimizer_steps(self):
        return -(-self.script.n_rows // self.script.batch)

    # data

    def tensors(self):
        generator = torch.Generator().manual_seed(self.script.seed)
        x = _normal(self.script.n_rows, 4, generator=generator)
        y = _normal(self.script.n_rows, 1, generator=generator)
        rows = torch.utils.data.TensorDataset(x, y)
        if self.script.numbers == "rows":
            return NoisyRows(rows, self)
        return rows

    @staticmethod
    def draw_numpy():
        return float(np.random.randn())

    @staticmethod
    def draw_python():
        return random.random()

    @staticmethod
    def draw_torch():
        return float(torch.rand((), dtype=torch.float64))

    def dataset(self):
        tensors = self.tensors()
        if self.script.numbers == "rows":
            rows = hpcdist.Dataset.from_tensor_slices(tuple(tensors.rows.tensors)).map(tensors.with_noise)
        else:
            rows = hpcdist.Dataset.from_tensor_slices(tuple(tensors.tensors))
        return rows.batch(self.script.batch, drop_remainder=self.script.cure == "drop")

    def loader(self):
        drop_last = self.script.cure == "drop"
        return self._loader(batch_size=self.script.batch, drop_last=drop_last)

    def _loader(self, rows=None, **settings):
        """Return a DataLoader with the script's workers."""
        if self.script.workers != "none" and not self.is_plain:
            is_persistent = self.script.workers == "persistent"
            method = "fork" if is_persistent else self.script.workers
            settings.update(num_workers=N_WORKERS, multiprocessing_context=method, persistent_workers=is_persistent)
        if self.script.numbers == "collate":
            settings.update(collate_fn=NoisyJoin(self))
        return torch.utils.data.DataLoader(self.tensors() if rows is None else rows, **settings)

    def weighted_loader(self):
        n_rows = self.script.n_rows
        sampler = torch.utils.data.WeightedRandomSampler(torch.arange(n_rows) + 1.0, n_rows)
        return self._loader(batch_size=self.script.batch, sampler=sampler)

    def bucket_loader(self):
        return self._loader(batch_sampler=BucketSampler(self.script.n_rows, self.script.batch))

    def stream(self):
        return torch.utils.data.DataLoader(StreamOfRows(self.tensors()), batch_size=self.script.batch)

    def worker_stream(self):
        """Return a loader over a stream, which half of the scripts cut by worker themselves."""
        rows = self.tensors()
        if self.is_plain:
            return self._shared_batches(rows)
        kind = CutStream if self.script.seed % 2 else StreamOfRows
        return self._loader(kind(rows), batch_size=self.script.batch)

    def _shared_batches(self, rows):
        """Return what the workers of all ranks read together at each step."""
        n_shares = self.comm.size * N_WORKERS
        part_rows = -(-self.script.batch // self.comm.size)
        steps = []
        for rank in range(self.comm.size):
            workers = []
            for worker in range(N_WORKERS):
                share = list(range(worker * self.comm.size + rank, self.script.n_rows, n_shares))
                workers.append([share[start : start + part_rows] for start in range(0, len(share), part_rows)])
            in_turn = itertools.chain.from_iterable(itertools.zip_longest(*workers))
            parts = [part for part in in_turn if part]
            for number, part in enumerate(parts):
                if number == len(steps):
                    steps.append([])
                steps[number] += part
        return [rows[step] for step in steps]

    def others(self):
        generator = torch.Generator().manual_seed(self.script.seed + 1)
        n_rows = self.script.n_rows
        batch = self.script.batch
        if self.script.cure == "drop":
            n_batches = n_rows // batch
        else:
            n_batches = -(-n_rows // batch)
        rows = _normal(n_batches * 12, 4, generator=generator)
        return hpcdist.Dataset.from_tensor_slices((rows,)).batch(12)

    def validation(self):
        generator = torch.Generator().manual_seed(self.script.seed + 2)
        x = _normal(15, 4, generator=generator)
        y = _normal(15, 1, generator=generator)
        return hpcdist.Dataset.from_tensor_slices((x, y)).batch(5)

    def own_loader(self, sampler):
        size = self.script.batch // self.n_ranks
        return self._loader(batch_size=size, sampler=sampler)

    def torch_sampler(self):
        return torch.utils.data.distributed.DistributedSampler(self.tensors(), self.n_ranks, self.rank, shuffle=False)

    def index_loop(self):
        tensors = self.tensors()
        x, y = tensors.tensors
        batch = self.script.batch
        rank = self.rank
        n_ranks = self.n_ranks
        starts = range(0, self.script.n_rows, batch)
        return [
            (x[start + rank : start + batch : n_ranks], y[start + rank : start + batch : n_ranks]) for start in starts
        ]

    def generator(self):
        return self.index_loop()

    def first_epoch(self, handler):
        """Return the epoch that the last step was in, as a script that counts its own steps does."""
        if self.is_polled:
            return max(handler.step - 1, 0) // self.n_batches
        return 0

    def rest(self, batches, handler, epoch):
        """Return the batches of an epoch that the steps so far have left."""
        if self.is_polled:
            n_used = max(handler.step - epoch * self.n_batches, 0)
        else:
            n_used = 0
        return itertools.islice(batches, n_used, None)

    @staticmethod
    def ahead(batches, n_ahead):
        """Yield batches, each once `n_ahead` more were drawn."""
        waiting = []
        for batch in batches:
            waiting.append(batch)
            if len(waiting) > n_ahead:
                yield waiting.pop(0)
        yield from waiting

    # model

    @property
    def n_ranks(self):
        if self.is_plain:
            return 1
        return self.comm.size

    @property
    def rank(self):
        if self.is_plain:
            return 0
        return self.comm.rank

    def strategy(self):
        if self.is_plain:
            return PlainStrategy()
        return hpcdist.MultiWorkerMirroredStrategy(gradient_op="mean")

    def model(self, kind):
        torch.manual_seed(self.script.seed)
        layers = [nn.Linear(4, 8)]
        if kind == "batch norm":
            layers.append(nn.BatchNorm1d(8))
        layers.append(nn.Tanh())
        if kind == "dropout":
            layers.append(nn.Dropout(0.3))
        return nn.Sequential(*layers, nn.Linear(8, 1)).double()

    @staticmethod
    def loss(model, x, y):
        if len(x):
            return nn.functional.mse_loss(model(x), y)
        return model(x).sum() * 0

    @staticmethod
    def penalty(model, u):
        return model(u).square().mean()

    @staticmethod
    def sum_of_losses(model, x, y):
        return float((model(x) - y).square().sum().detach())

    def sum_over_ranks(self, total):
        return round(total if self.is_plain else self.comm.allreduce(total), 4)

    # the end of an attempt

    def handler(self, checkpoint):
        if self.is_plain:
            return PlainHandler()
        return hpcdist.PreemptionCheckpointHandler(
            None, checkpoint, os.path.join(self.folder, "checkpoints"), save_every_steps=3
        )

    def harm(self, handler):
        """End the attempt here if it is time."""
        self.steps += 1
        if self.is_plain:
            handler.step += 1
        if self.end is None or handler.step != self.end[1]:
            return
        kind, _, rank = self.end
        if kind == "kill":
            raise Killed
        if self.comm.rank == rank % self.comm.size:
            os.kill(os.getpid(), signal.SIGKILL if kind == "SIGKILL" else signal.SIGTERM)

    def harm_in_validation(self, handler):
        """Stop in the validation after the step at which the end comes, if it is asked for."""


class PlainStrategy:
    """Stands for a strategy in plain torch: one process, the global batch."""

    scope = staticmethod(contextlib.nullcontext)

    @staticmethod
    def experimental_distribute_dataset(data):
        return PlainBatches(data)


class NoisyRows(torch.utils.data.Dataset):
    """Rows whose inputs are scaled by a number that is drawn for each."""

    def __init__(self, rows, job):
        self.rows = rows
        self.generator = np.random.default_rng(1)
        if job.script.library == "own":
            self.draw = self.draw_own
        else:
            self.draw = getattr(Job, f"draw_{job.script.library}")

    def draw_own(self):
        return float(self.generator.random())

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, row):
        return self.with_noise(*self.rows[row])

    def with_noise(self, x, y):
        return x * (1 + 0.1 * self.draw()), y


class NoisyJoin:
    """Joins rows, and scales the inputs by a number that is drawn for the batch."""

    def __init__(self, job):
        if job.script.library == "own":
            library = "numpy"
        else:
            library = job.script.library
        self.draw = getattr(Job, f"draw_{library}")

    def __call__(self, rows):
        x, y = torch.utils.data.default_collate(rows)
        return x * (1 + 0.1 * self.draw()), y


class BucketSampler(torch.utils.data.Sampler):
    """Batches of rows with neighbouring numbers, of two sizes, in an order that torch draws."""

    def __init__(self, n_rows, batch):
        self.n_rows = n_rows
        self.batch = batch

    def __iter__(self):
        batches = [list(range(0, self.batch // 2))]
        for start in range(self.batch // 2, self.n_rows, self.batch):
            batches.append(list(range(start, min(start + self.batch, self.n_rows))))
        for number in torch.randperm(len(batches)).tolist():
            yield batches[number]


class StreamOfRows(torch.utils.data.IterableDataset):
    """The rows of a dataset, one by one."""

    def __init__(self, items):
        self.items = items

    def __iter__(self):
        return iter(self.items)


class CutStream(StreamOfRows):
    """The rows that a worker is to read, one by one."""

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        return itertools.islice(iter(self.items), info.id, None, info.num_workers)


class PlainBatches:
    """The global batches of a dataset or loader in their order."""

    epoch = 0

    def __init__(self, data):
        self._data = data
        self._n_passes = 0
        self._seed = None
        if isinstance(data, torch.utils.data.DataLoader) and has_own_sampler(data):
            self._seed = drawn_seed(data)

    def __iter__(self):
        batches = self._data
        if self._seed is not None:
            order = SamplerOrder(self._data, self._seed, self._n_passes)
            order.draw(1000)
            batches = map(self._joined, order.batches)
        for batch in batches:
            yield tuple(map(torch.as_tensor, batch))
        self._n_passes += 1

    def take(self, count):
        return list(self)[:count]

    def _joined(self, rows):
        return self._data.collate_fn([self._data.dataset[row] for row in rows])


class PlainHandler:
    """Stands for a handler: counts steps."""

    def __init__(self):
        self.step = 0

    def poll(self):
        """Nothing is saved."""

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None


def run(script, folder=None, end=None):
    """Run one attempt; return how it ended ("done", "stopped", "killed" or an error) and what it left."""
    job = Job(script, folder, end)
    space = {"job": job, "torch": torch, "nn": nn, "hpcdist": hpcdist}
    exec("import itertools", space)
    if job.is_plain:
        space["hpcdist"] = _PlainModule
    hpcdist.set_random_seed(script.seed)
    outcome = "done"
    error = ""
    try:
        exec(compile(text_of(script), f"<script {script.seed}>", "exec"), space)
    except SystemExit as leaving:
        if leaving.code == 75:
            outcome = "stopped"
        else:
            outcome = f"exit {leaving.code}"
    except Killed:
        outcome = "killed"
    except HpcdistError as refusal:
        outcome = "refused"
        error = f"{type(refusal).__name__}: {refusal}"
    except Exception:
        outcome = "failed"
        error = traceback.format_exc()
    handler = space.get("handler")
    if handler is not None and not job.is_plain:
        handler._manager.wait() if outcome == "killed" else None
        handler.close()
        call_when_done(None)
    n_steps = 0 if handler is None else handler.step
    state = state_of(space)
    space.clear()  # loaders in cycles would wait for their workers when they are collected
    return outcome, error, state, n_steps


def state_of(space):
    """Return what the modules of a script hold, by the names of both."""
    state = {}
    for name in ("model", "ema", "other"):
        if name in space:
            state.update({f"{name} {key}": value.clone() for key, value in space[name].state_dict().items()})
    return state


def run_as_program(seed, folder, end, result_path):
    """Run one attempt as a program of its own, which ends as it ends; rank 0 writes what a finished one leaves."""
    script = draw(seed)
    space = {"job": Job(script, folder, end), "torch": torch, "nn": nn, "hpcdist": hpcdist, "itertools": itertools}
    hpcdist.set_random_seed(script.seed)
    exec(compile(text_of(script), f"<script {script.seed}>", "exec"), space)
    if MPI.COMM_WORLD.rank == 0:
        torch.save({"steps": space["handler"].step, **state_of(space)}, result_path)


class _PlainModule:
    """Stands for hpcdist in the plain run."""

    Checkpoint = dict

    @staticmethod
    def DistributedSampler(data, shuffle):
        return _PlainSampler(data)


class _PlainSampler(torch.utils.data.SequentialSampler):
    epoch = 0

    def set_epoch(self, epoch):
        """The order is always the same."""


def check(script, folder, random_numbers):
    """Return (what a script did, why it is wrong or empty). Collective: all ranks."""
    comm = MPI.COMM_WORLD
    outcome, error, unbroken, n_steps = run(script, os.path.join(folder, "unbroken"))
    if outcome == "refused":
        return _check_refusal(script, error, folder, random_numbers)
    if outcome != "done":
        return outcome, f"unbroken run: {outcome}: {error}"
    if script.is_global:
        _, plain_error, plain, _ = run(script)
        if plain_error:
            return "failed", f"plain torch: {plain_error}"
        for name, value in plain.items():
            if not torch.allclose(value, unbroken[name], rtol=1e-8, atol=1e-9):
                return "ran", f"{name} differs from one process by {(value - unbroken[name]).abs().max():.2e}"
    resumed_folder = os.path.join(folder, "resumed")
    first = 0
    for _ in range(3):
        step = random_numbers.randint(first + 1, max(n_steps, first + 1))
        kind = random_numbers.choice(("stop", "kill"))
        end = comm.bcast((kind, step, random_numbers.randrange(comm.size)))
        outcome, error, resumed, n_resumed = run(script, resumed_folder, end)
        if outcome in ("refused", "failed") or outcome.startswith("exit"):
            return outcome, f"attempt that ends by {end}: {outcome}: {error}"
        if outcome == "done":
            break
        first = step if outcome == "stopped" else first
    else:
        outcome, error, resumed, n_resumed = run(script, resumed_folder)
    if outcome != "done":
        return outcome, f"last attempt: {outcome}: {error}"
    if n_resumed != n_steps:
        return "ran", f"{n_resumed} steps after restarts, {n_steps} unbroken"
    for name, value in unbroken.items():
        if not torch.equal(value, resumed[name]):
            return "ran", f"{name} differs after restarts by {(value - resumed[name]).abs().max():.2e}"
    return "ran", ""


def _check_refusal(script, error, folder, random_numbers):
    if script.left_out and "write Checkpoint(..., " in error:
        _, why = check(replace(script, left_out=False), os.path.join(folder, "added"), random_numbers)
        return "refused", f"cured by what was left out: {why}" if why else ""
    if not script.may_be_refused or script.cure:
        return "refused", f"refused: {error}"
    wanted = {
        "poll": "handler.poll()",
        "take": "batches.take(",
        "distribute": "experimental_distribute_dataset",
        "as drawn": "the tensors as they were drawn",
        "drop": "drop_remainder=True",
    }
    named = [cure for cure in sorted(script.may_be_refused) if wanted[cure] in error]
    if not named:
        return "refused", f"refused without one of the cures {sorted(script.may_be_refused)}: {error}"
    _, why = check(replace(script, cure=named[0]), os.path.join(folder, "cured"), random_numbers)
    return "refused", f"cured by {named[0]}: {why}" if why else ""


def main():
    """Run scripts, and print what went wrong and how many ran."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--scripts", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int)
    parser.add_argument(
        "--attempt", metavar="RESULT", help="run the script --only once, in --folder, by loop_processes"
    )
    parser.add_argument("--folder")
    parser.add_argument("--end", nargs=3, metavar=("KIND", "STEP", "RANK"))
    options = parser.parse_args()
    if options.attempt:
        end = options.end and (options.end[0], int(options.end[1]), int(options.end[2]))
        run_as_program(options.only, options.folder, end, options.attempt)
        return
    comm = MPI.COMM_WORLD
    started = time.monotonic()
    world = make_world()
    counts = {}
    wrong = []
    if options.only:
        seeds = [options.only]
    else:
        seeds = range(options.seed, options.seed + options.scripts)
    for seed in seeds:
        script = draw(seed)
        folder = comm.bcast(tempfile.mkdtemp() if comm.rank == 0 else None)
        outcome, why = check(script, folder, random.Random(seed))
        comm.barrier()
        if comm.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
        whys = comm.allgather(why)
        counts[outcome] = counts.get(outcome, 0) + 1
        if any(whys):
            wrong.append(seed)
            if comm.rank == 0:
                print(json.dumps(asdict(script)), "\n   ", next(filter(None, whys)).replace("\n", "\n    "), flush=True)
                if options.only:
                    print(text_of(script))
        del script
    if comm.rank == 0:
        print(f"{world.size} ranks, seeds {seeds}: {counts}, wrong: {wrong}, {time.monotonic() - started:.0f} s")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()

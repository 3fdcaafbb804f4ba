"""Random loops with ReduceOp.MEAN: each backward has the gradient of one process on the global batches, or is refused.

A loop draws from one or two datasets of any length and batch size, ahead by any number of batches, leaves batches out,
peeks, evaluates with gradients, accumulates, and gives the model what it drew, a view of it, or a copy.

    mpirun -n 2 python tests/support/weighed_loops.py --loops 1000 --seed 1
"""

import argparse
import contextlib
import random
import sys
import time
from collections import Counter

import torch
from mpi4py import MPI
from torch import nn

import hpcdist
from hpcdist.errors import GradientError
from hpcdist.runtime.process import make_world

FORMS = ("as drawn", "view", "copy", "part in a dict")
N_BACKWARDS = 12


class Source:
    """A distributed dataset, and the global batches that its parts belong to."""

    def __init__(self, strategy, random_numbers, number):
        self.n_rows = random_numbers.randint(1, 40)
        self.batch = random_numbers.randint(1, 14)
        self.form = random_numbers.choice(FORMS)
        generator = torch.Generator().manual_seed(number)
        self.rows = torch.randn(self.n_rows, 3, generator=generator, dtype=torch.float64)
        dataset = hpcdist.Dataset.from_tensor_slices(self.rows).batch(self.batch)
        self.batches = strategy.experimental_distribute_dataset(dataset)
        self.iterator = iter(self.batches)
        self.n_drawn = 0
        self.waiting = []

    def draw(self):
        """Draw a part; begin again at the end."""
        part = next(self.iterator, None)
        if part is None:
            self.iterator = iter(self.batches)
            self.n_drawn = 0
            part = next(self.iterator)
        start = self.n_drawn * self.batch
        self.n_drawn += 1
        self.waiting.append((part, self.rows[start : start + self.batch]))

    def peek(self):
        """Look at the first batch of a pass, and begin it again."""
        if self.n_drawn == 0:
            next(iter(self.batches))
            self.iterator = iter(self.batches)


def formed(part, form):
    """Return a part as a program may give it to the model."""
    return {"as drawn": part, "view": part[:].view(part.shape), "copy": part.clone()}.get(form, part)


class Model(nn.Module):
    """Takes rows, also in a dict."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 1).double()

    def forward(self, rows):
        return self.linear(rows["rows"] if isinstance(rows, dict) else rows).square()


def mean_of(model, rows, form):
    """Return the mean over a replica's rows; NaN must not come of a part without rows."""
    if form == "part in a dict":
        inputs = {"rows": rows}
    else:
        inputs = formed(rows, form)
    losses = model(inputs)
    if len(rows):
        return losses.mean()
    return losses.sum()


def run(seed):
    """Return how many backwards were right, and why one was wrong or the loop refused. Collective: all ranks."""
    random_numbers = random.Random(seed)
    strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op="mean")
    torch.manual_seed(seed)
    with strategy.scope():
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    plain = Model()
    sources = [Source(strategy, random_numbers, number) for number in range(random_numbers.choice((1, 1, 2)))]
    n_ahead = random_numbers.choice((0, 0, 1, 2, 5))
    n_right = 0
    plain.load_state_dict(model.state_dict())
    for _ in range(N_BACKWARDS):
        used = random_numbers.sample(sources, random_numbers.randint(1, len(sources)))
        for source in used:
            if random_numbers.random() < 0.1:
                source.peek()
            while len(source.waiting) <= n_ahead:
                source.draw()
            if random_numbers.random() < 0.1:
                source.waiting.pop(0)
                source.draw()
        if random_numbers.random() < 0.1:
            with contextlib.nullcontext() if random_numbers.random() < 0.3 else torch.no_grad():
                model(used[0].waiting[0][0])
        parts = [(source, *source.waiting.pop(0)) for source in used]
        loss = sum(mean_of(model, part, source.form) for source, part, _ in parts)
        if random_numbers.random() < 0.3:
            used[0].draw()  # between the forward and the backward, as in nanoGPT
        is_accumulated = random_numbers.random() < 0.2
        try:
            with strategy.no_sync() if is_accumulated else contextlib.nullcontext():
                loss.backward()
        except GradientError:
            return n_right, "refused"
        sum(mean_of(plain, rows, "as drawn") for _, _, rows in parts).backward()
        if is_accumulated:
            continue
        if n_right == 0:
            plain.load_state_dict(model.state_dict())
        for parameter, expected in zip(model.parameters(), plain.parameters(), strict=True):
            if not torch.allclose(parameter.grad, expected.grad, rtol=1e-9, atol=1e-12):
                difference = (parameter.grad - expected.grad).abs().max()
                return n_right, f"differs by {difference:.2e}: {[(s.n_rows, s.batch, s.form) for s in used]}, {n_ahead}"
        n_right += 1
        optimizer.step()
        model.zero_grad()
        plain.zero_grad()
        if random_numbers.random() < 0.1:
            backward_twice(model, plain, parts)
            model.zero_grad()
            plain.zero_grad()
    return n_right, ""


def backward_twice(model, plain, parts):
    """Nothing is compared: a second forward of the same parts must not make later ones wrong."""
    for source, part, rows in parts[:1]:
        with contextlib.suppress(GradientError):
            mean_of(model, part, source.form).backward()
        mean_of(plain, rows, "as drawn").backward()


def main():
    """Run loops, and print which backwards were wrong."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--loops", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    comm = MPI.COMM_WORLD
    started = time.monotonic()
    counts = Counter()
    n_right = 0
    make_world()
    for seed in range(options.seed, options.seed + options.loops):
        n, why = run(seed)
        whys = comm.allgather(why)
        n_right += n
        if len({bool(reason == "refused") for reason in whys}) > 1:
            why = f"refused on some ranks only: {whys}"
        outcome = "wrong" if any(whys) else "right"
        if why == "refused":
            key = "refused"
        else:
            key = outcome
        counts[key] += 1
        if why not in ("", "refused"):
            print(f"seed {seed} on rank {comm.rank}: {why}", flush=True)
    if comm.rank == 0:
        print(f"{comm.size} ranks: {dict(counts)}, {n_right} backwards were right, {time.monotonic() - started:.0f} s")
    sys.exit(counts["wrong"] > 0)


if __name__ == "__main__":
    main()

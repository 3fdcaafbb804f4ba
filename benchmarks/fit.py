"""Time an epoch of `Model.fit` beside a loop by hand that computes the same loss and metrics.

mpirun -n 2 python benchmarks/fit.py

Both train the guides' MLP on the same arrays, by the same optimizer, with a mean loss and an accuracy of
hpcdist.metrics. Epochs of both are timed in turn. The ratio of the medians is printed, and beside it the ratio of the
loop to itself.
"""

import statistics
import time

import torch
from command_line import parser_of
from models import MODELS, adam, batches, build
from torch.nn.functional import cross_entropy

import hpcdist

BATCH = 64
#: A row of the table: a contender, milliseconds of a step, and the ratio.
ROW = "{:14} {:.3f} ms a step, {:.3f} of the loop by hand"


def parse_args():
    parser = parser_of(__doc__)
    parser.add_argument("--model", choices=MODELS, default="mlp")
    parser.add_argument("--rounds", type=int, default=20, help="pairs of epochs")
    parser.add_argument(
        "--repeat",
        type=int,
        default=1,
        help="an epoch has this many times 32 steps",
    )
    return parser.parse_args()


class ByHand:
    """The loop that a user would write."""

    def __init__(self, strategy, dataset, model):
        with strategy.scope():
            self._model = build(model)
            self._optimizer = adam(self._model)
            self._loss = hpcdist.metrics.Mean()
            self._accuracy = hpcdist.metrics.SparseCategoricalAccuracy()
        self._strategy = strategy
        self._batches = strategy.experimental_distribute_dataset(dataset)

    def _step(self, images, labels):
        self._optimizer.zero_grad()
        outputs = self._model(images)
        losses = cross_entropy(outputs, labels, reduction="none")
        loss = hpcdist.compute_average_loss(losses, global_batch_size=BATCH)
        loss.backward()
        self._optimizer.step()
        self._loss.update_state(losses.detach())
        self._accuracy.update_state(labels, outputs.detach())

    def epoch(self):
        """Train for an epoch; return loss and accuracy."""
        for batch in self._batches:
            self._strategy.run(self._step, args=batch)
        loss = float(self._loss.result())
        accuracy = float(self._accuracy.result())
        self._loss.reset_state()
        self._accuracy.reset_state()
        return loss, accuracy


class ByFit:
    """The same training by compile and fit."""

    def __init__(self, strategy, dataset, model):
        loss = hpcdist.losses.SparseCategoricalCrossentropy(from_logits=True)
        with strategy.scope():
            self._model = hpcdist.Model(build(model))
            self._model.compile(adam(self._model), loss, metrics=["accuracy"])
        self._batches = strategy.experimental_distribute_dataset(dataset)

    def epoch(self):
        """Train for an epoch; return loss and accuracy."""
        fitted = self._model.fit(self._batches, verbose=0)
        (loss,) = fitted.history["loss"]
        (accuracy,) = fitted.history["accuracy"]
        return loss, accuracy


def all_rows(n_repeats):
    """Return the images and labels of all batches together, repeated."""
    pairs = batches(BATCH, 0, 1) * n_repeats
    images, labels = zip(*pairs, strict=True)
    return torch.cat(images), torch.cat(labels)


def main():
    args = parse_args()
    torch.set_flush_denormal(True)  # Adam on memorized labels meets denormals, which are slow
    strategy = hpcdist.MultiWorkerMirroredStrategy()
    images, labels = all_rows(args.repeat)
    n_steps = len(images) // BATCH
    dataset = hpcdist.Dataset.from_tensor_slices((images, labels))
    dataset = dataset.batch(BATCH)
    contenders = {
        "by hand": ByHand(strategy, dataset, args.model),
        "fit": ByFit(strategy, dataset, args.model),
    }
    times = {"by hand": [], "fit": [], "by hand again": []}
    for number in range(args.rounds + 1):
        for name in times:
            contender = contenders[name.removesuffix(" again")]
            strategy.barrier()
            started = time.perf_counter()
            contender.epoch()
            taken_s = time.perf_counter() - started
            if number:  # the first epoch makes everything
                times[name].append(taken_s / n_steps)
    if strategy.is_chief:
        by_hand = statistics.median(times["by hand"])
        for name, step_times in times.items():
            median = statistics.median(step_times)
            row = ROW.format(name, 1e3 * median, median / by_hand)
            print(row)


if __name__ == "__main__":
    main()

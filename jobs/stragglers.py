"""Train on workers some of whose steps take six times as long, at random: what a bounded staleness gains.

mpirun -n 5 python jobs/stragglers.py --roles 'ps:1,worker:*' --max-staleness 4
mpirun -n 5 python jobs/stragglers.py --roles 'ps:1,worker:*' --synchronous
mpirun -n 4 python jobs/stragglers.py --strategy all-reduce

A sleep stands in for the computing of a step, so that workers can share cores.
"""

import argparse
import itertools
import random
import time

import torch
from images import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

import hpcdist


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--strategy", choices=["ps", "all-reduce"], default="ps")
    parser.add_argument("--roles", help="of the ranks; default: TF_CONFIG or HPCDIST_ROLES")
    parser.add_argument(
        "--max-staleness",
        type=int,
        help="steps that a worker may be ahead of others; default: no limit",
    )
    parser.add_argument(
        "--synchronous", action="store_true", help="let servers sum the gradients of all workers"
    )
    parser.add_argument(
        "--compute-s", type=float, default=0.02, help="seconds that a step computes"
    )
    parser.add_argument(
        "--stalls",
        type=float,
        default=0.1,
        help="share of the steps that take six times as long",
    )
    parser.add_argument("--steps", type=int, default=400, help="of each worker")
    parser.add_argument(
        "--batch", type=int, default=64, help="rows of one step on all workers together"
    )
    return parser.parse_args()


def make_strategy(args):
    resolver = hpcdist.MPIClusterResolver(roles=args.roles) if args.roles else None
    if args.strategy == "all-reduce":
        return hpcdist.MultiWorkerMirroredStrategy(resolver)
    return hpcdist.ParameterServerStrategy(resolver, None, args.max_staleness, args.synchronous)


def main():
    args = parse_args()
    strategy = make_strategy(args)  # ps ranks serve in it, and end there
    torch.manual_seed(1)
    train, test = load_digits()
    with strategy.scope():
        model = nn.Sequential(
            nn.Flatten(),
            nn.Linear(64, 128),
            nn.ReLU(),
            nn.Linear(128, 10),
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
        accuracy = hpcdist.metrics.SparseCategoricalAccuracy()
    dataset = hpcdist.Dataset.from_tensor_slices(train).shuffle(seed=1)
    dataset = dataset.batch(args.batch).repeat()
    batches = iter(strategy.experimental_distribute_dataset(dataset))
    stall_draws = random.Random(strategy.rank)

    def train_step(images, labels):
        optimizer.zero_grad()
        scores = model(images)
        losses = cross_entropy(scores, labels, reduction="none")
        loss = hpcdist.compute_average_loss(losses, global_batch_size=args.batch)
        loss.backward()
        compute_s = args.compute_s
        if stall_draws.random() < args.stalls:
            compute_s *= 6
        time.sleep(compute_s)
        optimizer.step()

    @torch.no_grad()
    def test_step(images, labels):
        scores = model(images)
        accuracy.update_state(labels, scores)

    first_batch = next(batches)
    strategy.run(train_step, args=first_batch)
    strategy.barrier()
    started = time.perf_counter()
    n_timed_steps = args.steps - 1
    for batch in itertools.islice(batches, n_timed_steps):
        strategy.run(train_step, args=batch)
    strategy.barrier()
    seconds = time.perf_counter() - started
    if args.strategy == "ps":
        strategy.refresh()  # all workers evaluate the same values
    strategy.run(test_step, args=test)
    test_accuracy = float(accuracy.result())
    if strategy.is_chief:
        rate = n_timed_steps / seconds
        results = f"{rate:.1f} steps/s of each worker, accuracy {test_accuracy:.4f}"
        if args.strategy == "ps":
            staleness = strategy.statistics()["staleness"]
            if staleness:
                results += f", values up to {max(staleness)} updates old"
        print(results, flush=True)


if __name__ == "__main__":
    main()

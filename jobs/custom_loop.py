"""A training and a test step of one's own, run on every replica; the custom training loop of the tf.distribute guides.

python jobs/custom_loop.py --replicas 8
mpirun -n 4 python jobs/custom_loop.py --replicas 8      the same losses and accuracies, to the last bit

Eight replicas on one process are also how a program is debugged before it goes to a cluster.
"""

import argparse

import torch
from images import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

import hpcdist


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--replicas",
        type=int,
        help="replicas of the job on any number of ranks; default: one per rank",
    )
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument(
        "--batch", type=int, default=64, help="rows of one step on all replicas together"
    )
    return parser.parse_args()


def main():
    args = parse_args()
    torch.manual_seed(1)
    strategy = hpcdist.MultiWorkerMirroredStrategy(num_replicas=args.replicas)
    train, test = load_digits()
    train_set = hpcdist.Dataset.from_tensor_slices(train).shuffle(seed=1)
    train_set = train_set.batch(args.batch)
    test_set = hpcdist.Dataset.from_tensor_slices(test)
    test_set = test_set.batch(args.batch)
    train_batches = strategy.experimental_distribute_dataset(train_set)
    test_batches = strategy.experimental_distribute_dataset(test_set)

    with strategy.scope():
        model = nn.Sequential(
            nn.Conv2d(1, 16, 3),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Flatten(),
            nn.Dropout(0.2),
            nn.Linear(16 * 36, 10),
        )
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        test_loss = hpcdist.metrics.Mean()
        train_accuracy = hpcdist.metrics.SparseCategoricalAccuracy()
        test_accuracy = hpcdist.metrics.SparseCategoricalAccuracy()

    def train_step(images, labels):
        optimizer.zero_grad()
        scores = model(images)
        losses = cross_entropy(scores, labels, reduction="none")
        loss = hpcdist.compute_average_loss(losses, global_batch_size=args.batch)
        loss.backward()
        optimizer.step()
        train_accuracy.update_state(labels, scores)
        return loss.detach()

    @torch.no_grad()
    def test_step(images, labels):
        scores = model(images)
        losses = cross_entropy(scores, labels, reduction="none")
        test_loss.update_state(losses)
        test_accuracy.update_state(labels, scores)

    for epoch in range(args.epochs):
        model.train()
        total = 0.0
        n_batches = 0
        for batch in train_batches:
            replica_losses = strategy.run(train_step, args=batch)
            loss = strategy.reduce("sum", replica_losses, axis=None)
            total += loss.item()
            n_batches += 1
        model.eval()
        for batch in test_batches:
            strategy.run(test_step, args=batch)
        results = [total / n_batches]
        for metric in (train_accuracy, test_loss, test_accuracy):
            results.append(float(metric.result()))
            metric.reset_state()
        if strategy.is_chief:
            text = "loss {:.6f}  accuracy {:.4f}  test loss {:.6f}  test accuracy {:.4f}"
            scores = text.format(*results)
            number = epoch + 1
            print(f"epoch {number}  {scores}", flush=True)


if __name__ == "__main__":
    main()

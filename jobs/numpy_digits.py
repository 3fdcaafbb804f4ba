"""Train without torch: softmax regression in numpy, gradients summed by all_reduce, exact restarts.

python jobs/numpy_digits.py
mpirun -n 4 python jobs/numpy_digits.py --run-dir runs/numpy

Kill it at any time; the same command resumes it. On any number of ranks the weights are equal up to rounding.
"""

import argparse
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

import hpcdist


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument(
        "--batch", type=int, default=64, help="rows of one step on all ranks together"
    )
    parser.add_argument("--rate", type=float, default=0.5)
    parser.add_argument("--run-dir", type=Path, default=Path("runs/numpy"))
    return parser.parse_args()


def with_bias(images):
    """Return images with one more column, of ones, whose weights are the bias."""
    n_images = len(images)
    ones = np.ones((n_images, 1))
    return np.concatenate([images, ones], axis=1)


def gradient_and_loss(weights, images, labels):
    """Return the sums over rows of the gradient, (n_pixels + 1, 10), and of the loss."""
    inputs = with_bias(images)
    logits = inputs @ weights
    logits -= logits.max(axis=1, keepdims=True)
    probabilities = np.exp(logits)
    probabilities /= probabilities.sum(axis=1, keepdims=True)
    rows = np.arange(len(labels))
    chances = probabilities[rows, labels]
    losses = -np.log(chances)
    probabilities[rows, labels] -= 1
    gradient = inputs.T @ probabilities
    return gradient, losses.sum()


def main():
    args = parse_args()
    strategy = hpcdist.MultiWorkerMirroredStrategy()
    images, labels = load_digits(return_X_y=True)
    images = images / 16
    dataset = hpcdist.Dataset.from_tensor_slices((images, labels))
    dataset = dataset.shuffle(seed=1)
    dataset = dataset.batch(args.batch)
    batches = strategy.experimental_distribute_dataset(dataset)
    _, n_pixels = images.shape
    weights = np.zeros((n_pixels + 1, 10))

    checkpoint = hpcdist.Checkpoint(weights=weights, data=batches, strategy=strategy)
    folder = args.run_dir / "checkpoints"
    manager = hpcdist.CheckpointManager(checkpoint, folder)
    schedule = hpcdist.SaveSchedule(every_steps=50)
    handler = hpcdist.PreemptionCheckpointHandler(
        strategy.cluster_resolver, manager, schedule=schedule
    )

    def train_step(images, labels):
        gradient, loss = gradient_and_loss(weights, images, labels)
        sums = np.array([loss, len(labels)])
        hpcdist.grouped_all_reduce([gradient, sums])  # ranks without rows take part too
        total_loss, n_rows = sums
        mean_gradient = gradient / n_rows
        weights[...] -= args.rate * mean_gradient
        return total_loss / n_rows

    with handler:  # saves periodically, on a stop request, and at the end
        while batches.epoch < args.epochs:
            losses = [handler.run(train_step, *batch) for batch in batches]
            if strategy.is_chief and losses:
                epoch = batches.epoch
                mean_loss = np.mean(losses)
                print(f"epoch {epoch}  loss {mean_loss:.4f}", flush=True)
    if strategy.is_chief:
        inputs = with_bias(images)
        logits = inputs @ weights
        predictions = logits.argmax(1)
        accuracy = np.mean(predictions == labels)
        print(f"accuracy {accuracy:.4f}  checkpoint {handler.latest_path}")


if __name__ == "__main__":
    main()

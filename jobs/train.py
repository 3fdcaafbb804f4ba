"""Train an image classifier on all ranks; kill it at any time and start it again the same way to go on.

python jobs/train.py
mpirun -n 4 python jobs/train.py --run-dir runs/digits
srun --mpi=pmi2 python jobs/train.py --model cnn --data /datasets/mnist      (in an sbatch script)

Default data: the 1,797 handwritten digits that come with scikit-learn. The run folder holds checkpoints/, metrics.jsonl
and train.log; the last checkpoint has the final weights.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from images import load_digits, load_mnist
from torch import nn
from torch.nn.functional import cross_entropy

import hpcdist


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="mlp")
    parser.add_argument("--data", type=Path, help="folder with MNIST's four IDX files, gzipped or not")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch", type=int, default=64, help="global batch: rows of one step on all ranks together")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--run-dir", type=Path, default=Path("runs/train"))
    parser.add_argument("--save-every", type=int, default=100, metavar="STEPS")
    return parser.parse_args()


def build_mlp(height, width):
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(height * width, 256),
        nn.ReLU(),
        nn.Linear(256, 256),
        nn.ReLU(),
        nn.Linear(256, 10),
    )


def build_cnn(height, width):
    pooled = ((height - 2) // 2) * ((width - 2) // 2)
    return nn.Sequential(
        nn.Conv2d(1, 32, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(32 * pooled, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


MODELS = {"mlp": build_mlp, "cnn": build_cnn}


def train_step(model, optimizer, images, labels, global_batch):
    """Take one step and return this rank's part of its loss."""
    optimizer.zero_grad()
    losses = cross_entropy(model(images), labels, reduction="none")
    loss = hpcdist.compute_average_loss(losses, global_batch_size=global_batch)
    loss.backward()
    optimizer.step()
    return loss.detach()


@torch.no_grad()
def evaluate(strategy, model, batches, n_images):
    """Return the part of all test images that the model gets right."""
    model.eval()
    right = sum((model(images).argmax(1) == labels).sum().item() for images, labels in batches)
    model.train()
    return strategy.reduce("sum", right, axis=None) / n_images


class Log:
    """What the chief prints and keeps: train.log, and metrics.jsonl with one line per epoch."""

    def __init__(self, folder, is_chief, first_epoch):
        self.folder, self.is_chief = folder, is_chief
        metrics = folder / "metrics.jsonl"
        if is_chief and metrics.exists():  # drop epochs that are about to run again
            lines = [line for line in metrics.read_text().splitlines() if json.loads(line)["epoch"] < first_epoch]
            metrics.write_text("".join(f"{line}\n" for line in lines))

    def say(self, text, metrics=None):
        """Print a line and keep it; `metrics` is kept for machines."""
        if self.is_chief:
            print(text, flush=True)
            append(self.folder / "train.log", text)
            if metrics:
                append(self.folder / "metrics.jsonl", json.dumps(metrics))


def append(path, line):
    with open(path, "a") as file:
        file.write(line + "\n")


def main():
    args = parse_args()
    strategy = hpcdist.MultiWorkerMirroredStrategy()
    torch.manual_seed(args.seed)
    train, test = load_mnist(args.data) if args.data else load_digits()

    with strategy.scope():
        model = MODELS[args.model](*train[0].shape[2:])
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    dataset = hpcdist.Dataset.from_tensor_slices(train).shuffle(seed=args.seed).batch(args.batch)
    batches = strategy.experimental_distribute_dataset(dataset)
    test_batches = strategy.experimental_distribute_dataset(hpcdist.Dataset.from_tensor_slices(test).batch(512))

    last_loss = np.zeros(1)
    checkpoint = hpcdist.Checkpoint(
        model=model, optimizer=optimizer, data=batches, strategy=strategy, last_loss=last_loss
    )
    manager = hpcdist.CheckpointManager(checkpoint, args.run_dir / "checkpoints")
    path = manager.restore_or_initialize()
    step = checkpoint.step
    log = Log(args.run_dir, strategy.is_chief, batches.epoch)
    log.say(f"{strategy.num_replicas_in_sync} replicas; " + (f"going on from {path}" if path else "new run"))

    for epoch in range(batches.epoch, args.epochs):
        for images, labels in batches:
            loss = train_step(model, optimizer, images, labels, args.batch)
            step += 1
            if step % args.save_every == 0:
                last_loss[0] = strategy.reduce("sum", loss, axis=None)
                path = manager.save(step)
        if step > checkpoint.step:  # else this epoch's last step was saved, and so was its loss
            last_loss[0] = strategy.reduce("sum", loss, axis=None)
        accuracy = evaluate(strategy, model, test_batches, len(test[1]))
        log.say(
            f"epoch {epoch + 1}/{args.epochs}  step {step}  loss {last_loss[0]:.4f}  test accuracy {accuracy:.4f}",
            {"epoch": epoch, "step": step, "loss": last_loss[0], "test_accuracy": accuracy},
        )
    if step > checkpoint.step:
        path = manager.save(step)
    log.say(f"test accuracy {evaluate(strategy, model, test_batches, len(test[1])):.4f}  checkpoint {path}")


if __name__ == "__main__":
    main()

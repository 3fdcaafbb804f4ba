"""Train a network on handwritten digits. Stop it or kill it at any time: the same command resumes it.

mpirun -n 2 python loop.py
"""

import argparse
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from sklearn.utils import shuffle
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import OneCycleLR

import hpcdist

GLOBAL_BATCH = 64  # rows of a step, on all ranks together
SEED = 1
SCRIPT = Path(__file__)
# what the run resumes from: remove the folder to train anew
RUN_DIR = Path("runs", SCRIPT.stem)


def parse_args():
    summary, _, _ = __doc__.partition("\n")
    parser = argparse.ArgumentParser(description=summary)
    # the schedule is as long: another number needs a new run folder
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--run-dir", type=Path, default=RUN_DIR)
    return parser.parse_args()


def load_data():
    """Return (images, labels) to train on, and (images, labels) to validate on.

    Put your own data here. Each rank loads all rows, and takes its part of each batch.
    """
    images, labels = load_digits(return_X_y=True)
    images, labels = shuffle(images, labels, random_state=SEED)
    images = torch.tensor(images, dtype=torch.float32) / 16
    labels = torch.tensor(labels)
    train = images[:1500], labels[:1500]
    validation = images[1500:], labels[1500:]
    return train, validation


def build_model():
    """Return the network. Put yours here."""
    return nn.Sequential(
        nn.Linear(64, 256),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(256, 10),
    )


def main():
    args = parse_args()
    hpcdist.set_random_seed(SEED)
    train, validation = load_data()

    # What is made in the scope is equal on all ranks, and sums its gradients over them.
    strategy = hpcdist.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = build_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        mean_loss = hpcdist.metrics.Mean()
        accuracy = hpcdist.metrics.SparseCategoricalAccuracy()

    rows = hpcdist.Dataset.from_tensor_slices(train)
    rows = rows.shuffle(seed=SEED).batch(GLOBAL_BATCH)
    batches = strategy.experimental_distribute_dataset(rows)
    validation_rows = hpcdist.Dataset.from_tensor_slices(validation)
    validation_rows = validation_rows.batch(GLOBAL_BATCH)
    validation_batches = strategy.experimental_distribute_dataset(validation_rows)
    n_steps = args.epochs * len(batches)
    schedule = OneCycleLR(optimizer, max_lr=1e-2, total_steps=n_steps)

    # All that training changes is in the checkpoint, so that a restart goes on with the same bits.
    progress = {"data": batches, "schedule": schedule, "mean_loss": mean_loss}
    checkpoint = hpcdist.Checkpoint(model=model, optimizer=optimizer, strategy=strategy, **progress)
    folder = args.run_dir / "checkpoints"
    manager = hpcdist.CheckpointManager(checkpoint, folder, keep_best="accuracy", best_mode="max")
    # Restores the newest checkpoint. It saves every 50 steps, and when the job is asked to stop.
    handler = hpcdist.PreemptionCheckpointHandler(None, manager, save_every_steps=50)

    def train_step(images, labels):
        optimizer.zero_grad()
        outputs = model(images)
        losses = cross_entropy(outputs, labels, reduction="none")
        loss = hpcdist.compute_average_loss(losses, global_batch_size=GLOBAL_BATCH)
        loss.backward()
        optimizer.step()
        schedule.step()
        mean_loss.update_state(losses.detach())

    @torch.no_grad()
    def evaluate():
        """Return the share of the rows that are right, of all ranks."""
        accuracy.reset_state()
        model.eval()
        for images, labels in validation_batches:
            outputs = model(images)
            accuracy.update_state(labels, outputs)
        model.train()
        return float(accuracy.result())

    with handler:
        for epoch in range(batches.epoch, args.epochs):  # the epoch in which the run was stopped
            for images, labels in batches:
                train_step(images, labels)
            loss = float(mean_loss.result())
            validation_accuracy = evaluate()
            mean_loss.reset_state()
            # the best checkpoint stays, as best.h5
            manager.save(handler.step, {"accuracy": validation_accuracy})
            if strategy.is_chief:  # one rank prints
                number = epoch + 1
                scores = f"loss {loss:.4f}  accuracy {validation_accuracy:.4f}"
                print(f"epoch {number}/{args.epochs}  {scores}")

    hpcdist.load_checkpoint(manager.best_path, model=model)
    validation_accuracy = evaluate()
    if strategy.is_chief:
        best_path = args.run_dir / "best.pt"
        torch.save(model.state_dict(), best_path)
        print(f"best accuracy {validation_accuracy:.4f}, of the weights in {best_path}")


if __name__ == "__main__":
    main()

"""Train a network on handwritten digits, by a script for torch DDP that was changed where comments name DDP.

mpirun -n 2 python ddp.py
"""

import argparse
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from sklearn.utils import shuffle
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

import hpcdist

BATCH = 64  # DDP: rows of a step on one rank; here on all ranks together
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
    """Return a dataset to train on, and one to validate on. Put your own data here."""
    images, labels = load_digits(return_X_y=True)
    images, labels = shuffle(images, labels, random_state=SEED)
    images = torch.tensor(images, dtype=torch.float32) / 16
    labels = torch.tensor(labels)
    train = TensorDataset(images[:1500], labels[:1500])
    validation = TensorDataset(images[1500:], labels[1500:])
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
    # DDP: dist.init_process_group("gloo"). Losses are means over rows, as in DDP.
    strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op="mean")
    hpcdist.set_random_seed(SEED)
    train, validation = load_data()
    loader = DataLoader(train, batch_size=BATCH, shuffle=True, num_workers=2)
    validation_loader = DataLoader(validation, batch_size=BATCH)
    # DDP: DistributedSampler(train), and set_epoch in each epoch
    loader = strategy.experimental_distribute_dataset(loader)
    validation_loader = strategy.experimental_distribute_dataset(validation_loader)

    with strategy.scope():  # DDP: DistributedDataParallel(model)
        model = build_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    n_steps = args.epochs * len(loader)
    schedule = OneCycleLR(optimizer, max_lr=1e-2, total_steps=n_steps)

    # All that training changes is in the checkpoint, so that a restart goes on with the same bits.
    checkpoint = hpcdist.Checkpoint(
        model=model, optimizer=optimizer, schedule=schedule, data=loader, strategy=strategy
    )
    folder = args.run_dir / "checkpoints"
    manager = hpcdist.CheckpointManager(checkpoint, folder, keep_best="accuracy", best_mode="max")
    # Restores the newest checkpoint. It saves every 50 steps, and when the job is asked to stop.
    handler = hpcdist.PreemptionCheckpointHandler(None, manager, save_every_steps=50)

    def train_step(images, labels):
        optimizer.zero_grad()
        outputs = model(images)
        loss = cross_entropy(outputs, labels)
        loss.backward()  # sums gradients over the ranks, as DDP does
        nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        schedule.step()

    @torch.no_grad()
    def evaluate():
        """Return the share of the rows that are right, of all ranks."""
        model.eval()
        n_right = torch.zeros(1)
        for images, labels in validation_loader:
            outputs = model(images)
            is_right = outputs.argmax(1) == labels
            n_right += is_right.sum().cpu()
        model.train()
        hpcdist.all_reduce(n_right)  # DDP: dist.all_reduce(n_right)
        n_rows = len(validation)
        return n_right.item() / n_rows

    with handler:
        for epoch in range(loader.epoch, args.epochs):  # the epoch in which the run was stopped
            for images, labels in loader:
                train_step(images, labels)
            accuracy = evaluate()
            manager.save(handler.step, {"accuracy": accuracy})  # the best one stays, as best.h5
            if strategy.is_chief:  # DDP: dist.get_rank() == 0
                number = epoch + 1
                print(f"epoch {number}/{args.epochs}  accuracy {accuracy:.4f}")

    hpcdist.load_checkpoint(manager.best_path, model=model)
    accuracy = evaluate()
    if strategy.is_chief:
        best_path = args.run_dir / "best.pt"
        torch.save(model.state_dict(), best_path)
        print(f"best accuracy {accuracy:.4f}, of the weights in {best_path}")


if __name__ == "__main__":
    main()

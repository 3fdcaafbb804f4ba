"""Train a CNN on handwritten digits in one process, as many scripts do. `own_script.py` is the same, restartable.

python jobs/own_script_plain.py --epochs 4
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from images import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch", type=int, default=48)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--run-dir", type=Path, default=Path("runs/own_script"))
    return parser.parse_args()


class Digits(Dataset):
    """Pictures of digits; for training, moved by up to a pixel, with noise."""

    def __init__(self, images, labels, is_augmented):
        self.images = images.numpy()
        self.labels = labels.numpy()
        self.is_augmented = is_augmented

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, row):
        image = self.images[row]
        if self.is_augmented:
            shift = np.random.randint(-1, 2, size=2)
            noise = np.random.randn(*image.shape)
            image = np.roll(image, shift, axis=(1, 2))
            image = image + 0.1 * noise.astype(np.float32)
        label = self.labels[row]
        return image, label


def build(learning_rate):
    """Return a model and its optimizer."""
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(128, 10),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.01)
    return model, optimizer


@torch.no_grad()
def accuracy_of(model, batches):
    """Return the share of pictures whose digit the model finds."""
    model.eval()
    n_right = 0
    for images, labels in batches:
        predictions = model(images).argmax(1)
        is_right = predictions == labels
        n_right += int(is_right.sum())
    return n_right / len(batches.dataset)


def main():
    args = parse_args()
    run_dir = args.run_dir
    torch.manual_seed(args.seed)
    np.random.seed(args.seed)
    train_rows, test_rows = load_digits()
    train_digits = Digits(*train_rows, is_augmented=True)
    test_digits = Digits(*test_rows, is_augmented=False)
    loader = DataLoader(
        train_digits,
        batch_size=args.batch,
        shuffle=True,
        num_workers=args.workers,
        persistent_workers=args.workers > 0,
    )
    test_loader = DataLoader(test_digits, batch_size=180)
    model, optimizer = build(learning_rate=3e-3)
    n_steps = args.epochs * len(loader)
    schedule = CosineAnnealingLR(optimizer, n_steps)
    scaler = torch.amp.GradScaler("cpu")
    moving_mean = get_ema_multi_avg_fn(0.98)
    ema = AveragedModel(model, multi_avg_fn=moving_mean, use_buffers=True)
    best = torch.zeros(())
    writer = SummaryWriter(run_dir / "tensorboard")

    def train_epoch(epoch):
        model.train()
        for images, labels in tqdm(loader, desc=f"epoch {epoch}", disable=None):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                outputs = model(images)
                loss = cross_entropy(outputs, labels)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
            ema.update_parameters(model)
            writer.add_scalar("loss", loss.item(), schedule.last_epoch)

    def train():
        for epoch in range(args.epochs):
            train_epoch(epoch)
            accuracy = accuracy_of(ema, test_loader)
            writer.add_scalar("accuracy", accuracy, epoch)
            if accuracy > best:
                best.fill_(accuracy)
                torch.save(ema.state_dict(), run_dir / "best.pt")

    train()
    writer.close()
    best_accuracy = best.item()
    last_accuracy = accuracy_of(ema, test_loader)
    print(f"best accuracy {best_accuracy:.4f}, at the end {last_accuracy:.4f}")


if __name__ == "__main__":
    main()

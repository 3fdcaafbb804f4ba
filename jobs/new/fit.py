"""Train a network on handwritten digits by compile and fit, as with Keras. The same command resumes it after a stop.

mpirun -n 2 python fit.py
"""

import argparse
from pathlib import Path

from sklearn.datasets import load_digits
from sklearn.utils import shuffle
from torch import nn

import hpcdist
from hpcdist.callbacks import (
    BackupAndRestore,
    CSVLogger,
    EarlyStopping,
    LearningRateScheduler,
    ModelCheckpoint,
)

GLOBAL_BATCH = 64  # rows of a step, on all ranks together
SEED = 1
SCRIPT = Path(__file__)
# what the run resumes from: remove the folder to train anew
RUN_DIR = Path("runs", SCRIPT.stem)


def parse_args():
    summary, _, _ = __doc__.partition("\n")
    parser = argparse.ArgumentParser(description=summary)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--run-dir", type=Path, default=RUN_DIR)
    return parser.parse_args()


def load_data():
    """Return (images, labels) to train on, and (images, labels) to validate on.

    Put your own data here. Each rank loads all rows, and takes its part of each batch.
    """
    images, labels = load_digits(return_X_y=True)
    images, labels = shuffle(images, labels, random_state=SEED)
    images = images.astype("float32") / 16
    train = images[:1500], labels[:1500]
    validation = images[1500:], labels[1500:]
    return train, validation


def build_model():
    """Return the network. Put yours here, of torch's layers."""
    layers = [nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.2), nn.Linear(256, 10)]
    return hpcdist.Model(nn.Sequential(*layers))


def learning_rate_of(epoch, learning_rate):
    """Return the learning rate of an epoch: three epochs at the first one, then a tenth less in each."""
    if epoch < 3:
        return learning_rate
    return 0.9 * learning_rate


def main():
    args = parse_args()
    hpcdist.set_random_seed(SEED)
    train, validation = load_data()

    # What is made in the scope is equal on all ranks, and sums its gradients over them.
    strategy = hpcdist.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = build_model()
        loss = hpcdist.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer="adam", loss=loss, metrics=["accuracy"])

    best_path = args.run_dir / "best.h5"
    callbacks = [
        # saves every 50 steps, and when the job is asked to stop; fit continues there
        BackupAndRestore(args.run_dir, save_freq=50, delete_checkpoint=False),
        LearningRateScheduler(learning_rate_of),
        ModelCheckpoint(best_path, monitor="val_accuracy", save_best_only=True),
        EarlyStopping(monitor="val_accuracy", patience=5),
        CSVLogger(args.run_dir / "log.csv"),
    ]
    options = {"batch_size": GLOBAL_BATCH, "epochs": args.epochs, "callbacks": callbacks}
    model.fit(*train, validation_data=validation, **options)

    model.load_weights(best_path)
    _, accuracy = model.evaluate(*validation, batch_size=GLOBAL_BATCH, verbose=0)
    if strategy.is_chief:  # one rank prints
        print(f"best accuracy {accuracy:.4f}, of the weights in {best_path}")


if __name__ == "__main__":
    main()

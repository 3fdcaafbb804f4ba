"""The Keras guide to distributed training, but for the imports: compile, fit, evaluate; then fault tolerance.

mpirun -n 2 python jobs/keras_guide.py --folder runs/guide

The training function runs twice, as in the guide: the second call finds the checkpoint of the first one and goes on
from there. On two ranks, with scikit-learn's digits, it prints

    Creating a new model
    epoch 1/1  ...
    Restoring from runs/guide/ckpt/ckpt-1.keras
    epoch 2/2  ...
    test accuracy 0.9
"""

import argparse
import os

import torch
from images import load_digits
from torch import nn

import hpcdist
from hpcdist.callbacks import ModelCheckpoint

BATCH = 32


def get_compiled_model():
    """Make a simple network of two layers, and compile it."""
    network = nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, 256),
        nn.ReLU(),
        nn.Linear(256, 256),
        nn.ReLU(),
        nn.Linear(256, 10),
    )
    model = hpcdist.Model(network)
    model.compile(
        optimizer="adam",
        loss=hpcdist.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["sparse_categorical_accuracy"],
    )
    return model


def get_dataset():
    """Return (rows to train on, to validate, to test)."""
    (x, y), test = load_digits()
    train_rows = (x[:-200], y[:-200])
    val_rows = (x[-200:], y[-200:])
    train_dataset = hpcdist.Dataset.from_tensor_slices(train_rows).shuffle(seed=1)
    train_dataset = train_dataset.batch(BATCH)
    val_dataset = hpcdist.Dataset.from_tensor_slices(val_rows)
    val_dataset = val_dataset.batch(BATCH)
    test_dataset = hpcdist.Dataset.from_tensor_slices(test)
    return train_dataset, val_dataset, test_dataset.batch(BATCH)


def make_or_restore_model(checkpoint_dir):
    """Restore the latest model, or make a new one if there is no checkpoint."""
    names = os.listdir(checkpoint_dir)
    checkpoints = [checkpoint_dir + "/" + name for name in names]
    if checkpoints:
        latest_checkpoint = max(checkpoints, key=os.path.getctime)
        print_once("Restoring from " + latest_checkpoint)
        return hpcdist.load_model(latest_checkpoint)
    print_once("Creating a new model")
    return get_compiled_model()


def print_once(text):
    """Print a line, on the chief alone."""
    if hpcdist.get_strategy().is_chief:
        print(text, flush=True)


def run_training(checkpoint_dir, first_epoch, epochs):
    """Train from the latest checkpoint; return the model."""
    strategy = hpcdist.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = make_or_restore_model(checkpoint_dir)
        filepath = checkpoint_dir + "/ckpt-{epoch}.keras"
        callbacks = [ModelCheckpoint(filepath=filepath, save_freq="epoch")]
        train_dataset, val_dataset, _ = get_dataset()
        model.fit(
            train_dataset,
            initial_epoch=first_epoch,
            epochs=epochs,
            callbacks=callbacks,
            validation_data=val_dataset,
            verbose=2,
        )
    return model


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", default="runs/guide")
    parser.add_argument("--epochs", type=int, default=1, help="of each call")
    args = parser.parse_args()
    checkpoint_dir = args.folder + "/ckpt"
    os.makedirs(checkpoint_dir, exist_ok=True)
    hpcdist.barrier()
    torch.manual_seed(1)
    run_training(checkpoint_dir, 0, args.epochs)
    model = run_training(checkpoint_dir, args.epochs, 2 * args.epochs)
    _, _, test_dataset = get_dataset()
    _, accuracy = model.evaluate(test_dataset, verbose=0)
    model.print_once(f"test accuracy {accuracy:.2g}")


if __name__ == "__main__":
    main()

"""Images for the jobs: scikit-learn's digits, MNIST's files, and a small convolutional network for both."""

import numpy as np
import torch
from torch import nn

import hpcdist

#: Numbers of digits to train on, and to test on.
SPLIT = [1437, 360]


def load_digits():
    """Return ((images, labels) to train on, (images, labels) to test on); images are (n, 1, height, width) in 0..1."""
    from sklearn.datasets import load_digits as bundled

    digits = bundled()
    n_images = len(digits.target)
    order = np.random.RandomState(0).permutation(n_images)
    pixels = digits.images[order] / 16
    images = torch.tensor(pixels, dtype=torch.float32)
    images = images.unsqueeze(1)
    labels = torch.tensor(digits.target[order])
    train_images, test_images = images.split(SPLIT)
    train_labels, test_labels = labels.split(SPLIT)
    return (train_images, train_labels), (test_images, test_labels)


def load_mnist(folder):
    """Return the same as load_digits, from MNIST's files."""
    try:
        parts = hpcdist.datasets.mnist.load_data(folder)
    except hpcdist.errors.DataError as error:
        raise SystemExit(str(error)) from None
    tensors = []
    for images, labels in parts:
        pixels = torch.from_numpy(images).unsqueeze(1)
        labels = torch.from_numpy(labels)
        tensors.append((pixels / 255, labels.long()))
    return tensors


def build_cnn(height, width):
    """Return a network of one convolution and two linear layers, for 10 classes of images of this size."""
    pooled_height = (height - 2) // 2
    pooled_width = (width - 2) // 2
    return nn.Sequential(
        nn.Conv2d(1, 32, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * pooled_height * pooled_width, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )

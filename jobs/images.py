"""Image data for the jobs: scikit-learn's digits, and MNIST's files."""

import numpy as np
import torch

import hpcdist


def load_digits():
    """Return ((images, labels) to train on, (images, labels) to test on); images are (n, 1, height, width) in 0..1."""
    from sklearn.datasets import load_digits as bundled

    digits = bundled()
    order = np.random.RandomState(0).permutation(len(digits.target))
    pixels = digits.images[order] / 16
    images = torch.tensor(pixels, dtype=torch.float32).unsqueeze(1)
    labels = torch.tensor(digits.target[order])
    train = (images[:1437], labels[:1437])
    test = (images[1437:], labels[1437:])
    return train, test


def load_mnist(folder):
    """Return the same as load_digits, from MNIST's files."""
    try:
        parts = hpcdist.datasets.mnist.load_data(folder)
    except hpcdist.errors.DataError as error:
        raise SystemExit(str(error)) from None
    return [
        (torch.from_numpy(images).unsqueeze(1) / 255, torch.from_numpy(labels).long())
        for images, labels in parts
    ]

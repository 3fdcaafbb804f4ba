"""Image data for the jobs: scikit-learn's digits, and MNIST's IDX files."""

import gzip

import numpy as np
import torch


def load_digits():
    """Return ((images, labels) to train on, (images, labels) to test on); images are (n, 1, height, width) in 0..1."""
    from sklearn.datasets import load_digits as bundled

    digits = bundled()
    order = np.random.RandomState(0).permutation(len(digits.target))
    images = torch.tensor(digits.images[order] / 16, dtype=torch.float32).unsqueeze(1)
    labels = torch.tensor(digits.target[order])
    return (images[:1437], labels[:1437]), (images[1437:], labels[1437:])


def load_mnist(folder):
    """Return the same as load_digits, from MNIST's files."""
    parts = []
    for name in ("train", "t10k"):
        images = read_idx(folder, f"{name}-images-idx3-ubyte")
        labels = read_idx(folder, f"{name}-labels-idx1-ubyte")
        parts.append((torch.from_numpy(images).unsqueeze(1) / 255, torch.from_numpy(labels).long()))
    return parts


def read_idx(folder, name):
    """Return the array in an IDX file: two zero bytes, type 8, dimensions, their sizes, then bytes."""
    path = next((path for path in (folder / name, folder / f"{name}.gz") if path.exists()), None)
    if path is None:
        raise SystemExit(f"train: expected {name} or {name}.gz in {folder}, got neither; give --data the MNIST folder.")
    with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
        data = file.read()
    n_dims = data[3] if data[:3] == b"\0\0\x08" and len(data) >= 4 + 4 * data[3] else 0
    shape = np.frombuffer(data[4 : 4 + 4 * n_dims], ">u4")
    if not n_dims or len(data) != 4 + 4 * n_dims + shape.prod():
        raise SystemExit(f"train: expected a whole IDX file of bytes, got {len(data)} bytes in {path}; fetch it again.")
    return np.frombuffer(data, np.uint8, offset=4 + 4 * n_dims).reshape(shape).copy()

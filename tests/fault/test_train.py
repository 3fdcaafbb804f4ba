"""jobs/train.py as a user runs it: its data, its files, its accuracy."""

import gzip
import json
import os
import struct

import numpy as np
import pytest


def write_mnist(folder, n_train, n_test, zipped):
    """Write four IDX files of images whose label is the number of their bright row."""
    folder.mkdir()
    for name, n_images in (("train", n_train), ("t10k", n_test)):
        labels = np.arange(n_images, dtype=np.uint8) % 10
        images = np.zeros((n_images, 28, 28), np.uint8)
        images[np.arange(n_images), labels * 2 + 3] = 255
        contents = {
            f"{name}-images-idx3-ubyte": struct.pack(">4B3I", 0, 0, 8, 3, n_images, 28, 28) + images.tobytes(),
            f"{name}-labels-idx1-ubyte": struct.pack(">4BI", 0, 0, 8, 1, n_images) + labels.tobytes(),
        }
        for file, data in contents.items():
            if zipped:
                (folder / f"{file}.gz").write_bytes(gzip.compress(data))
            else:
                (folder / file).write_bytes(data)


@pytest.mark.parametrize("zipped", [True, pytest.param(False, marks=pytest.mark.sweep)])
def test_mnist_files(start, root, tmp_path, zipped):
    write_mnist(tmp_path / "mnist", 600, 100, zipped)
    options = ["--data", tmp_path / "mnist", "--run-dir", tmp_path / "run", "--epochs", "3", "--model", "cnn"]
    outcome = start(2, root / "jobs" / "train.py", *options).wait(60)
    assert outcome.code == 0, outcome.output
    assert "test accuracy 1.0000" in outcome.output


def test_a_folder_without_mnist(start, root, tmp_path):
    outcome = start(2, root / "jobs" / "train.py", "--data", tmp_path, "--run-dir", tmp_path / "run").wait(60)
    assert outcome.code == 1
    assert "expected train-images-idx3-ubyte or train-images-idx3-ubyte.gz" in outcome.output
    assert "Traceback" not in outcome.output


@pytest.mark.parametrize("model", ["mlp", pytest.param("cnn", marks=pytest.mark.sweep)])
def test_accuracy_on_digits_and_what_the_run_folder_holds(start, root, tmp_path, model):
    outcome = start(2, root / "jobs" / "train.py", "--model", model, "--run-dir", tmp_path / "run").wait(60)
    assert outcome.code == 0, outcome.output
    assert sorted(os.listdir(tmp_path / "run")) == [
        *("checkpoints", "config.json", "decision.json", "metrics.jsonl"),
        *("trace", "train.log"),
    ]
    rows = list(map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()))
    assert [row["epoch"] for row in rows] == list(range(20))
    assert rows[-1]["test_accuracy"] >= 0.96
    last = outcome.output.splitlines()[-1]
    assert last == f"test accuracy {rows[-1]['test_accuracy']:.4f}  checkpoint {newest(tmp_path / 'run')}"
    printed = []
    for line in outcome.output.splitlines(keepends=True):
        if not line.startswith("hpcdist: attempt 1 "):
            printed.append(line)
    assert (tmp_path / "run" / "train.log").read_text() == "".join(printed)
    assert outcome.output.count("2 replicas; new run") == 1


def test_a_cut_file(start, root, tmp_path):
    write_mnist(tmp_path / "mnist", 20, 20, zipped=False)
    path = tmp_path / "mnist" / "train-images-idx3-ubyte"
    path.write_bytes(path.read_bytes()[:-1])
    outcome = start(1, root / "jobs" / "train.py", "--data", tmp_path / "mnist", "--run-dir", tmp_path / "run").wait(60)
    assert "expected a whole IDX file" in outcome.output
    assert "Traceback" not in outcome.output


@pytest.mark.parametrize("flag", ["--epochs", "--batch", "--save-every"])
def test_numbers_below_one(start, root, flag):
    outcome = start(1, root / "jobs" / "train.py", flag, "0").wait(60)
    assert outcome.code == 2
    assert "expected a number above 0, got 0" in outcome.output


@pytest.mark.sweep
def test_a_torn_metrics_line_is_dropped(start, root, tmp_path):
    options = [root / "jobs" / "train.py", "--run-dir", tmp_path / "run", "--epochs"]
    assert start(1, *options, "1").wait(60).code == 0
    with open(tmp_path / "run" / "metrics.jsonl", "a") as file:
        file.write('{"epoch": 1, "st')
    assert start(1, *options, "2").wait(60).code == 0
    rows = list(map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()))
    assert [row["epoch"] for row in rows] == [0, 1]


def newest(run_dir):
    return sorted((run_dir / "checkpoints").rglob("*.h5"))[-1]

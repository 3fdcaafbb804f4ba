"""What fit prints: a bar on a terminal, lines in a batch log."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest
import torch
from torch import nn

import hpcdist
from hpcdist.training import progress

PROGRAM = """
import sys, time
import torch
import hpcdist
from hpcdist.callbacks import BackupAndRestore, LambdaCallback

with hpcdist.MultiWorkerMirroredStrategy().scope():
    model = hpcdist.Model(torch.nn.Linear(4, 1))
    model.compile("sgd", "mse", metrics=["mae", "mse"], steps_per_execution=2)
callbacks = [
    BackupAndRestore(sys.argv[1], save_freq=25),
    LambdaCallback(on_train_batch_begin=lambda batch, logs=None: time.sleep(0.15)),
]
model.fit(torch.ones(40, 4), torch.ones(40), batch_size=4, epochs=2, callbacks=callbacks)
"""


@pytest.mark.feature("training.progress-for-batch-logs")
def test_a_bar_on_a_terminal(tmp_path):
    """It counts steps, also where callbacks act after two of them, and says when fit saves; a line stays.

    80 columns have room for the loss and two metrics.
    """
    (tmp_path / "program.py").write_text(PROGRAM)
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 80, 0, 0))  # else it has no columns
    command = [sys.executable, tmp_path / "program.py", tmp_path / "run"]
    with subprocess.Popen(command, stdout=slave, stderr=slave, stdin=slave) as job:
        os.close(slave)
        text = read_all(master)
        assert job.wait(60) == 0, text
    bars = re.findall(r"epoch 1/2 \|[^|]*\| (\d+)/10 \S+ left", text)
    assert bars[-1] == "10", text
    assert {int(step_count) % 2 for step_count in bars} == {0}
    assert re.search(r"\d+/10 \S+ left, loss \S+  mae \S+  mse \S+  save in \d", text), text
    lines = [part.split("\r")[-1] for part in text.replace("\r\n", "\n").split("\n")]
    assert [line[:19] for line in lines if line.startswith("epoch")] == ["epoch 1/2  10 steps", "epoch 2/2  10 steps"]


def read_all(descriptor):
    """Return all that is written to a terminal, until nobody has it open."""
    parts = []
    while True:
        try:
            parts.append(os.read(descriptor, 4096))
        except OSError:  # as Linux says it
            os.close(descriptor)
            return b"".join(parts).decode()


def test_a_bar_through_the_pipe_of_a_launcher(model, capsys, monkeypatch):
    """As `hpcdist run` on a terminal says."""
    monkeypatch.setenv("HPCDIST_TERMINAL_COLUMNS", "100")
    monkeypatch.setattr(progress, "_is_pipe", lambda stream: True)
    model.fit(torch.ones(12, 4), torch.ones(12), batch_size=4, epochs=1)
    assert re.search(r"epoch 1/1 \|.*0/3 \S+ left", capsys.readouterr().out)


def test_a_bar_without_a_known_end(model, capsys, monkeypatch):
    monkeypatch.setenv("HPCDIST_TERMINAL_COLUMNS", "80")
    monkeypatch.setattr(progress, "_is_pipe", lambda stream: True)
    rows = hpcdist.Dataset.from_tensor_slices((torch.ones(12, 4), torch.ones(12))).filter(lambda x, y: True).batch(4)
    model.fit(rows, epochs=1)
    assert re.search(r"\repoch 1/1 [03] steps \d\d:\d\d", capsys.readouterr().out)


@pytest.mark.parametrize("verbose", [1, 2, "auto"])
def test_a_file_holds_no_control_characters(model, capsys, monkeypatch, verbose):
    monkeypatch.setenv("HPCDIST_TERMINAL_COLUMNS", "100")  # as of a launcher on a terminal; the program has a file
    model.fit(torch.ones(12, 4), torch.ones(12), batch_size=4, epochs=2, verbose=verbose)
    text = capsys.readouterr().out
    assert text.count("\n") == 2
    assert not [character for character in text if ord(character) < 32 and character != "\n"]


@pytest.fixture
def model():
    compiled_model = hpcdist.Model(nn.Linear(4, 1))
    compiled_model.compile("sgd", "mse")
    return compiled_model


def fit(model, **options):
    return model.fit(torch.ones(12, 4), torch.ones(12), batch_size=4, epochs=2, verbose=2, **options)


@pytest.mark.feature("training.progress-for-batch-logs")
def test_a_batch_log_has_a_line_for_each_epoch(model, capsys):
    fit(model)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert re.fullmatch(r"epoch 1/2  3 steps  [\d.]+ s  [\d.e+-]+ ms/step  loss [\d.e-]+", lines[0])


@pytest.mark.feature("training.progress-for-batch-logs")
def test_an_epoch_that_takes_long_is_reported_meanwhile(model, capsys, monkeypatch):
    monkeypatch.setattr(progress, "_FIRST_REPORT_S", 0.0)
    fit(model)
    assert len(capsys.readouterr().out.splitlines()) == 3, "one report, before the first epoch's line"
    monkeypatch.setattr(progress, "_REPORT_S", 0.0)
    fit(model)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 8
    assert re.fullmatch(
        r"epoch 2  step 2/3  [\d.e+-]+ steps/s, \d+ s left in the epoch  loss [\d.e-]+ \(this rank\)", lines[5]
    )


def test_verbose_0_prints_nothing(model, capsys):
    model.fit(torch.ones(12, 4), torch.ones(12), verbose=0)
    assert capsys.readouterr().out == ""

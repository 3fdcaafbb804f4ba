"""CSVLogger: whatever callbacks put into the logs, the table has Keras' columns and is read back as it was written."""

import csv
import random
from types import SimpleNamespace

import numpy as np
import pytest

from hpcdist.callbacks import CSVLogger
from hpcdist.checkpoint.durable import Disk
from hpcdist.errors import UsageError

SEED = 20261126
VALUES = (
    0.25,
    float("nan"),
    -3,
    np.float32(0.1),
    np.array(2.5),
    np.arange(3),
    [0.5, 0.25],
    [],
    ("a,b", 1),
    None,
    True,
    "",
    "one, two",
    'a "quoted" text',
    "two\nlines",
    "a\r\nb",
    "a\rb",
    "\udc80",
    " spaces ",
    "'",
    "Grüße; \t|",
    {"a": [1, 2]},
)
NAMES = ("loss", "accuracy", "val_loss", "my,metric", 'a "name"', "learning_rate", "two\nlines", "Z")


def logger(path, **options):
    csv_logger = CSVLogger(path, **options)
    csv_logger.set_model(SimpleNamespace(strategy=SimpleNamespace(is_chief=True)))
    return csv_logger


def table_of(path, separator=","):
    with path.open(newline="") as file:
        return list(csv.reader(file, delimiter=separator))


def test_columns_and_fields_are_those_of_keras(tmp_path):
    """As keras 3.15 writes them, but for the end of the lines."""
    path = tmp_path / "log.csv"
    csv_logger = logger(path)
    csv_logger.on_train_begin()
    csv_logger.on_epoch_end(0, {"loss": 0.5, "accuracy": np.float32(0.25), "list": [1, 2], "text": "a,b"})
    csv_logger.on_epoch_end(1, {"loss": 0.25})
    assert path.read_text() == 'epoch,accuracy,list,loss,text\n0,0.25,"""[1, 2]""",0.5,"a,b"\n1,NA,NA,0.25,NA\n'


def test_a_name_that_comes_later_gets_a_column_at_the_end(tmp_path):
    path = tmp_path / "log.csv"
    csv_logger = logger(path)
    csv_logger.on_train_begin()
    csv_logger.on_epoch_end(0, {"loss": 0.5})
    csv_logger.on_epoch_end(1, {"loss": 0.25, "accuracy": 1})
    assert path.read_text() == "epoch,loss,accuracy\n0,0.5,NA\n1,0.25,1\n"


def logs_of(draws):
    """Return the logs of an epoch, drawn by chance."""
    names = draws.sample(NAMES, draws.randint(1, 6))
    return {name: draws.choice(VALUES) for name in names}


@pytest.mark.parametrize("number", range(40))
def test_a_run_that_stops_and_resumes_writes_the_table_of_an_unbroken_one(tmp_path, number):
    draws = random.Random(SEED + number)
    separator = draws.choice([",", ";", "\t", "|"])
    epochs = [logs_of(draws) for _ in range(5)]
    unbroken = logger(tmp_path / "unbroken.csv", separator=separator)
    unbroken.on_train_begin()
    for epoch, logs in enumerate(epochs):
        unbroken.on_epoch_end(epoch, logs)
    path = tmp_path / "log.csv"
    stopped = logger(path, separator=separator)
    stopped.on_train_begin()
    n_saved = draws.randint(1, 3)
    for epoch, logs in enumerate(epochs[: n_saved + 1]):  # the last one is lost, and comes again
        if epoch == n_saved:
            state = stopped.state_dict()
        stopped.on_epoch_end(epoch, logs)
    resumed = logger(path, separator=separator)
    resumed.on_train_begin()
    resumed.load_state_dict(state)
    for epoch, logs in list(enumerate(epochs))[n_saved:]:
        resumed.on_epoch_end(epoch, logs)
    expected = table_of(tmp_path / "unbroken.csv", separator)
    assert sorted_columns(table_of(path, separator)) == sorted_columns(expected)
    assert {len(row) for row in expected} == {len(expected[0])}


def sorted_columns(table):
    """The lost epoch may have brought columns earlier than the epoch that comes again."""
    return sorted(zip(*table, strict=True))


def test_lines_of_an_earlier_run_stay(tmp_path):
    path = tmp_path / "log.csv"
    for run in range(2):
        csv_logger = logger(path, append=True)
        csv_logger.on_train_begin()
        csv_logger.on_epoch_end(0, {"loss": [run, run]})
    assert [row[0] for row in table_of(path)] == ["epoch", "0", "0"]


@pytest.mark.parametrize(
    "content", [b"epoch,loss\n0\n1,2\n", b"loss\n1\n", b"epoch,loss\n0,1,2\n1,2\n", b"\xff\xfe", b'a"b\n']
)
def test_a_file_that_is_no_such_table_is_set_aside(tmp_path, content, caplog):
    path = tmp_path / "log.csv"
    path.write_bytes(content)
    csv_logger = logger(path, append=True)
    csv_logger.on_train_begin()
    csv_logger.load_state_dict({"n_rows": 3})
    csv_logger.on_epoch_end(0, {"loss": 0.5})
    assert path.read_text() == "epoch,loss\n0,0.5\n"
    assert (tmp_path / "log.csv.bad").read_bytes() == content
    assert "moved it to" in caplog.text


def test_a_line_that_a_crash_has_cut_off_is_left_out(tmp_path):
    whole = "epoch,loss\n0,0.5\n1,0.25\n"
    for length in range(len("epoch,loss\n0,0.5\n"), len(whole)):
        path = tmp_path / f"{length}.csv"
        path.write_text(whole[:length])
        resumed_logger = logger(path, append=True)
        resumed_logger.on_train_begin()
        resumed_logger.on_epoch_end(1, {"loss": 0.25})
        assert path.read_text() == whole, length


def test_an_epoch_costs_the_same_however_many_there_were(tmp_path, monkeypatch):
    written = []
    write = Disk.write
    monkeypatch.setattr(Disk, "write", lambda disk, *arguments: written.append(write(disk, *arguments)) or written[-1])
    csv_logger = logger(tmp_path / "log.csv")
    csv_logger.on_train_begin()
    for epoch in range(200):
        written.clear()
        csv_logger.on_epoch_end(epoch, {"loss": 0.5})
    assert sum(written) == len("199,0.5\n")
    assert len(table_of(tmp_path / "log.csv")) == 201


def test_a_long_list_is_read_again(tmp_path):
    path = tmp_path / "log.csv"
    csv_logger = logger(path)
    csv_logger.on_train_begin()
    csv_logger.on_epoch_end(0, {"all": list(range(100_000))})
    resumed_logger = logger(path, append=True)
    resumed_logger.on_train_begin()
    assert resumed_logger.state_dict() == {"n_rows": 1}


@pytest.mark.parametrize("separator", ["", ", ", '"', "\n"])
def test_a_separator_that_no_reader_takes(tmp_path, separator):
    with pytest.raises(UsageError, match="one character"):
        CSVLogger(tmp_path / "log.csv", separator=separator)

"""`hpcdist logs` on files as `hpcdist.log_to` writes them."""

import functools
import json

import pytest


def text(second, level, rank, message):
    return f"2026-11-26T00:00:{second:06.3f} {level} [worker:{rank} r{rank}/2 n{rank}] mine: {message}\n"


@pytest.fixture
def run_dir(tmp_path):
    """Return a run folder: rank 1 writes between the records of rank 0, one of which has a traceback."""
    (tmp_path / "logs").mkdir()
    first = (
        text(1, "INFO", 0, "one")
        + text(3, "ERROR", 0, "three")
        + "Traceback\n  ValueError: x\n"
        + text(4, "INFO", 0, "4")
    )
    (tmp_path / "logs" / "rank-00000.log").write_text(first)
    (tmp_path / "logs" / "rank-00001.log").write_text(text(2, "WARNING", 1, "two") + text(5, "INFO", 1, "five"))
    return tmp_path


@pytest.fixture
def call(hpcdist):
    """Return call(*arguments): `hpcdist logs` with these."""
    return functools.partial(hpcdist, "logs")


def messages(out):
    return [line.rpartition(": ")[2] for line in out.splitlines()]


@pytest.mark.feature("slurm.status-log-cancel")
def test_records_of_all_ranks_by_time(run_dir, call):
    code, out, _ = call(run_dir)
    assert code == 0
    assert messages(out) == ["one", "two", "three", "Traceback", "x", "4", "five"]
    assert call(run_dir / "logs")[1] == out


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--rank", "1"], ["two", "five"]),
        (["--level", "warning"], ["two", "three", "Traceback", "x"]),
        (["--tail", "2"], ["4", "five"]),
        (["--rank", "0", "--level", "ERROR", "--tail", "1"], ["three", "Traceback", "x"]),
    ],
)
def test_some_of_them(run_dir, call, options, expected):
    assert messages(call(run_dir, *options)[1]) == expected


def test_lines_of_json(run_dir, call):
    line = json.dumps({"time": "2026-11-26T00:00:03.500", "level": "INFO", "message": "between"})
    (run_dir / "logs" / "rank-00002.log").write_text(line + "\n{\n")
    out = call(run_dir)[1].splitlines()
    assert out.index(line) == 5
    assert out[6] == "{", "a line that is cut belongs to the record before"


def test_a_clock_that_goes_back_keeps_the_order_of_a_file(run_dir, call):
    (run_dir / "logs" / "rank-00001.log").write_text(text(5, "INFO", 1, "a") + text(2, "INFO", 1, "b"))
    assert messages(call(run_dir, "--rank", "1")[1]) == ["a", "b"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ([], "expected rank-00000.log in"),
        ([], "in the log that `hpcdist status` names"),
        (["--rank", "7"], "expected rank-00007.log"),
    ],
)
def test_logs_that_are_not_there(call, tmp_path, options, text):
    if options:
        (tmp_path / "rank-00000.log").write_text("")
    code, _, error = call(tmp_path, *options)
    assert (code, error.count("\n")) == (2, 1)
    assert text in error


def test_records_as_json(run_dir, call):
    records = list(map(json.loads, call(run_dir, "--json", "--level", "error")[1].splitlines()))
    assert [(record["time"], record["rank"], record["level"]) for record in records] == [
        ("2026-11-26T00:00:03.000", 0, "ERROR")
    ]
    assert records[0]["text"].endswith("three\nTraceback\n  ValueError: x")

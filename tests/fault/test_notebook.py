"""notebook_launcher, called as from a cell: by a program that starts no MPI."""

import os
import re
import signal
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from real_jobs import PYTHON

NOTEBOOK = Path(__file__).resolve().parents[2] / "docs" / "gallery" / "notebook.ipynb"

CELL = """
import sys, time
import torch
import hpcdist

FACTOR = 10

def train(n_steps):
    strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op="mean")
    with strategy.scope():
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(n_steps):
        optimizer.zero_grad()
        model(torch.ones(1, 2) * strategy.rank).sum().backward()
        optimizer.step()
    print(f"trained on rank {strategy.rank}\\n", end="")
    return FACTOR * strategy.rank, float(model.weight.sum())
"""


@pytest.fixture
def cell(start, tmp_path):
    """Return cell(code): a job of one process that defines `train`, and runs the code."""

    def cell(code):
        (tmp_path / "cell.py").write_text(CELL + code)
        return start(1, command=[PYTHON, tmp_path / "cell.py"])

    return cell


def test_a_cell_runs_twice_and_returns_what_each_rank_does(cell, nothing_left):
    job = cell(
        "for n in (1, 3):\n"
        "    found = hpcdist.notebook_launcher(train, (n,), num_processes=2)\n"
        "    assert [one[0] for one in found] == [0, 10] and found[0][1] == found[1][1], found\n"
        "assert 'mpi4py' not in sys.modules\n"
    )
    outcome = job.wait(90)
    assert outcome.code == 0, outcome.output
    assert outcome.output.count("trained on rank 1") == 2
    nothing_left(job)


def test_a_rank_that_fails(cell, nothing_left):
    job = cell(
        "def fails():\n    import hpcdist\n    assert hpcdist.MultiWorkerMirroredStrategy().rank == 0, 'wrong rank'\n"
        "    time.sleep(100)\n"
        "try:\n    hpcdist.notebook_launcher(fails)\n"
        "except hpcdist.errors.HpcdistError as error:\n    print('caught', error)\n"
    )
    outcome = job.wait(60)
    assert outcome.code == 0, outcome.output
    assert "AssertionError: wrong rank" in outcome.output
    assert "caught notebook_launcher: expected all 2 ranks to return, got exit code" in outcome.output
    nothing_left(job)


def test_an_interrupted_cell_ends_its_ranks(cell, nothing_left):
    job = cell(
        "def waits():\n    train(1)\n    time.sleep(100)\n"
        "try:\n    hpcdist.notebook_launcher(waits)\nexcept KeyboardInterrupt:\n    print('interrupted')\n"
    )
    job.wait_for_line("trained on rank 1")
    os.kill(job.process.pid, signal.SIGINT)
    outcome = job.wait(60)
    assert outcome.code == 0, outcome.output
    assert "interrupted" in outcome.output
    nothing_left(job)


def test_what_is_refused(cell):
    outcome = cell(
        "for n, environ in ((0, {}), (2, {'PMI_SIZE': '2', 'PMI_RANK': '1'})):\n"
        "    import os\n    os.environ.update(environ)\n"
        "    try:\n        hpcdist.notebook_launcher(train, (1,), n)\n"
        "    except ValueError as error:\n        print('refused:', error)\n"
    ).wait(60)
    assert "refused: notebook_launcher: expected 1 process or more, got 0" in outcome.output
    assert "refused: notebook_launcher: expected to start the ranks, got rank 1 of 2" in outcome.output


@pytest.mark.timeout(200)
def test_the_notebook_of_the_gallery(tmp_path, monkeypatch, clean_environ):
    """Its numbers are those that the page shows, within a hundredth: processors round differently."""
    for name in set(os.environ) - set(clean_environ):
        monkeypatch.delenv(name)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    expected = numbers_printed_by(notebook)
    assert len(expected) == 12
    client = NotebookClient(notebook, timeout=150, resources={"metadata": {"path": str(tmp_path)}})
    assert numbers_printed_by(client.execute()) == pytest.approx(expected, rel=0.01)


def numbers_printed_by(notebook):
    """Return the numbers that the cells have printed on their standard output."""
    numbers = []
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            if output.get("name") == "stdout":
                numbers += map(float, re.findall(r"\d+\.\d+", output.text))
    return numbers

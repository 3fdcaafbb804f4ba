"""A batch system sends its signals to all processes of a job: loader workers must not end, and their rank with them."""

import contextlib
import os
import signal
import time

import pytest

PROGRAM = """
import sys, time
import torch
import hpcdist


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 10**6

    def __getitem__(self, row):
        time.sleep(0.01)
        return torch.tensor([float(row)])


if __name__ == "__main__":
    run, method = sys.argv[1:]
    strategy = hpcdist.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    checkpoint = hpcdist.Checkpoint(model=model, optimizer=optimizer)
    handler = hpcdist.PreemptionCheckpointHandler(None, checkpoint, run + "/checkpoints")
    loader = torch.utils.data.DataLoader(Rows(), 2, num_workers=2, multiprocessing_context=method)
    batches = loader if method == "fork" else hpcdist.Dataset.from_torch(loader)
    with handler:
        for number, rows in enumerate(batches):
            optimizer.zero_grad()
            hpcdist.compute_average_loss(model(rows).sum(1), global_batch_size=4).backward()
            optimizer.step()
            handler.poll()
            if number == 5:
                open(f"{run}/step-{strategy.world.rank}", "w").close()
"""


@pytest.mark.feature("complaints.no-save-in-a-handler")
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "method",
    [pytest.param("fork", marks=pytest.mark.quick), "forkserver", pytest.param("spawn", marks=pytest.mark.sweep)],
)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1], ids=["TERM", "USR1"])
def test_workers_outlive_the_stop_signal(start, tmp_path, method, number):
    (tmp_path / "run").mkdir()
    (tmp_path / "program.py").write_text(PROGRAM)
    job = start(2, tmp_path / "program.py", tmp_path / "run", method)
    deadline = time.monotonic() + 60
    while len(list((tmp_path / "run").glob("step-*"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    processes = job.ranks()
    assert len(processes) >= 2 + 2 * 2, "two ranks, and two workers each"
    for pid in sorted(processes, reverse=True):  # workers first: a rank that has ended takes its workers along
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
    outcome = job.wait(60)
    assert outcome.output.count(f"{number.name} on rank ") == 1, outcome.output
    assert "Traceback" not in outcome.output
    assert outcome.code == 75
    assert len(list((tmp_path / "run" / "checkpoints").glob("step-*.h5"))) == 1
    assert job.processes() == []

"""What a rank starts is no rank: workers by fork and by fork server, subprocesses, and how those end that fail."""

import re
import time

import pytest

FORKS = """
import os, sys, threading
import numpy as np
import torch
import hpcdist
import hpcdist.errors

run, n_forks = sys.argv[1], int(sys.argv[2])
strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op="mean")
with strategy.scope():
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
checkpoint = hpcdist.Checkpoint(model=model, optimizer=optimizer)
handler = hpcdist.PreemptionCheckpointHandler(None, checkpoint, run + "/checkpoints", save_every_steps=5)
codes = []


def end(number):
    try:
        strategy.reduce("sum", torch.ones(1), axis=None)
        os._exit(99)
    except hpcdist.errors.UsageError:
        pass
    if number % 3 == 0:
        os._exit(7)
    if number % 3 == 1:
        sys.exit(7)
    raise ValueError("of a child")


n_sums = 0
with handler:
    for number in range(n_forks):
        sent = np.full(1000, number + strategy.world.rank, np.float32)
        total = hpcdist.all_reduce_async(sent)
        pid = os.fork()
        if pid == 0:
            torch.ones(10).sum()
            end(number)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        total.wait()
        assert (sent == strategy.world.size * number + sum(range(strategy.world.size))).all()
        optimizer.zero_grad()
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
        handler.poll()
        n_sums += 1
print(f"rank {strategy.world.rank}: {len(codes)} forks, codes {sorted(set(codes))}, {n_sums} sums", flush=True)
"""


@pytest.mark.feature("complaints.fork-after-mpi")
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "n_forks", [pytest.param(60, marks=pytest.mark.quick), pytest.param(5000, marks=pytest.mark.sweep)]
)
def test_forks_during_sums_and_saves_disturb_nothing(start, tmp_path, n_forks):
    (tmp_path / "program.py").write_text(FORKS)
    outcome = start(2, tmp_path / "program.py", tmp_path / "run", str(n_forks)).wait(800)
    assert outcome.code == 0, outcome.output
    lines = re.findall(r"rank \d: (\d+) forks, codes \[([\d, ]+)\], (\d+) sums", outcome.output)
    assert [int(line[0]) for line in lines] == [n_forks] * 2
    for _, codes, n_sums in lines:
        assert codes == "1, 7", "each child has left with its own code"
        assert int(n_sums) == n_forks
    assert list((tmp_path / "run" / "checkpoints").glob("step-*.h5"))


WORKERS = """
import os, signal, sys, time
import torch
import hpcdist


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, row):
        if row == 21 and what in ("killed", "killed in a step"):
            os.kill(os.getpid(), signal.SIGKILL)
        if row == 21 and what == "hangs":
            time.sleep(600)
        if row == 21 and what == "world":
            hpcdist.MultiWorkerMirroredStrategy()
        return torch.tensor([float(row)])


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        yield from map(Rows().__getitem__, range(info.id, 40, info.num_workers))


def fail(worker):
    if what == "init":
        raise ValueError("worker_init_fn fails")


def main():
    strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op="mean")
    loader = torch.utils.data.DataLoader(
        kinds[kind](), 8, num_workers=2, multiprocessing_context=method, worker_init_fn=fail, timeout=20
    )
    for rows in strategy.experimental_distribute_dataset(loader):
        if what == "killed in a step":
            time.sleep(20)
        hpcdist.all_reduce(rows.sum().reshape(1).numpy())


kinds = {"items": Rows, "stream": Stream}
what, method, kind = sys.argv[1:]
if __name__ == "__main__" or what == "guard":
    main()
"""


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("what", "method", "kind", "message"),
    [
        pytest.param(
            "killed", "fork", "items", "worker 0 of 2 to read item 21, got process .* signal 9", marks=pytest.mark.quick
        ),
        pytest.param(
            "killed in a step",
            "fork",
            "items",
            "worker 0 of 2 to read item 21, got process .* signal 9",
            marks=pytest.mark.quick,
        ),
        ("killed", "fork", "stream", "worker 0 of 2 to read row 5 of its stream, got process .* signal 9"),
        ("killed in a step", "fork", "stream", "worker 0 of 2 to read row 5 of its stream, got process .* signal 9"),
        ("hangs", "forkserver", "items", "worker 0 of 2 to read item 21, got nothing in time"),
        ("hangs", "fork", "stream", "worker 0 of 2 to read row 5 of its stream, got nothing in time"),
        ("init", "fork", "items", "worker_init_fn to return in worker 0, got ValueError: worker_init_fn fails"),
        ("init", "fork", "stream", "worker_init_fn to return in worker [01], got ValueError: worker_init_fn fails"),
        ("world", "fork", "items", "expected the process of a rank, got process .* forked"),
        pytest.param(
            "guard",
            "forkserver",
            "items",
            "expected the program under if __name__ == '__main__'.*in line",
            marks=pytest.mark.quick,
        ),
        ("guard", "spawn", "items", "expected the program under if __name__ == '__main__'.*in line"),
    ],
)
def test_a_worker_that_fails_ends_the_job_with_a_line(start, tmp_path, what, method, kind, message):
    (tmp_path / "program.py").write_text(WORKERS)
    job = start(2, tmp_path / "program.py", what, method, kind)
    outcome = job.wait(60)
    assert outcome.code != 0
    assert re.search(message, outcome.output), outcome.output
    deadline = time.monotonic() + 15  # torch's workers look every 5 s whether their rank lives
    while job.processes() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert job.processes() == []


PARENT = """
import subprocess, sys
import hpcdist

strategy = hpcdist.MultiWorkerMirroredStrategy()
program = "import hpcdist; s = hpcdist.MultiWorkerMirroredStrategy(); print('child', s.world.size)"
child = [sys.executable, "-c", program]
is_shell = sys.argv[1] == "shell"
done = subprocess.run(child, capture_output=True, text=True, timeout=60, close_fds=not is_shell)
print(f"rank {strategy.world.rank}: {done.stdout.strip()} {done.returncode} {done.stderr.strip()}", flush=True)
hpcdist.barrier()
"""


@pytest.mark.quick
@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", ["plain", "shell"])
def test_a_subprocess_of_a_rank_is_one_process_of_its_own(start, tmp_path, kind):
    (tmp_path / "program.py").write_text(PARENT)
    outcome = start(2, tmp_path / "program.py", kind).wait(100)
    assert outcome.code == 0, outcome.output
    assert sorted(re.findall(r"rank (\d): child 1 0", outcome.output)) == ["0", "1"], outcome.output


EXITS = """
import os, sys
import torch
import hpcdist

strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op="mean")
rows = torch.utils.data.TensorDataset(torch.arange(40.0))
loader = torch.utils.data.DataLoader(rows, 8, num_workers=2, persistent_workers=True)
batches = strategy.experimental_distribute_dataset(loader)
for epoch in range(2):
    n_rows = 0
    for (part,) in batches:
        if n_rows == 0:
            pid = os.fork()
            if pid == 0:
                sys.exit(0)
            os.waitpid(pid, 0)
        n_rows += len(part)
    print(f"rank {strategy.world.rank}: {n_rows} rows", flush=True)
"""


@pytest.mark.quick
@pytest.mark.timeout(120)
def test_a_forked_child_that_exits_ends_no_worker_of_its_rank(start, tmp_path):
    (tmp_path / "program.py").write_text(EXITS)
    outcome = start(2, tmp_path / "program.py").wait(100)
    assert outcome.code == 0, outcome.output
    assert outcome.output.count(": 20 rows") == 4, outcome.output

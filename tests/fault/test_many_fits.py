"""A program that makes many fits, as a search does, keeps none of them: memory, threads and descriptors stay."""

import json
import re

import pytest

pytestmark = pytest.mark.timeout(300)

PROGRAM = """
import ctypes, gc, json, os, sys, threading
import torch
import hpcdist
from hpcdist.callbacks import BackupAndRestore, CSVLogger, EarlyStopping, ModelCheckpoint, TensorBoard

folder, kind, n_fits = sys.argv[1], sys.argv[2], int(sys.argv[3])
libc = ctypes.CDLL(None)
hpcdist.set_random_seed(1)
x = torch.randn(32, 500, generator=torch.Generator().manual_seed(1))
shared = hpcdist.MultiWorkerMirroredStrategy(gradient_op="sum")

def net():
    return torch.nn.Sequential(torch.nn.Linear(500, 1500), torch.nn.ReLU(), torch.nn.Linear(1500, 1))  # 3 MB

def fit(number, strategy):
    with strategy.scope():
        model = hpcdist.Model(net())
        model.compile("adam", "mse")
    run = f"{folder}/run-{number}"
    callbacks = [
        BackupAndRestore(run, delete_checkpoint=number % 2 == 0),
        ModelCheckpoint(run + "/best.h5"),
        CSVLogger(run + "/log.csv"),
        TensorBoard(run + "/events"),
        EarlyStopping("loss", restore_best_weights=True),
    ]
    model.fit(x, x[:, :1], batch_size=16, epochs=2, callbacks=callbacks, verbose=0, shuffle=False)

def loop(number, strategy):
    with strategy.scope():
        model = net()
        optimizer = torch.optim.Adam(model.parameters())
    batches = strategy.experimental_distribute_dataset(hpcdist.Dataset.from_tensor_slices(x).batch(16))
    records = hpcdist.MetricsFile(f"{folder}/run-{number}/metrics.jsonl")
    checkpoint = hpcdist.Checkpoint(model=model, optimizer=optimizer, data=batches, metrics=records, strategy=strategy)
    with hpcdist.PreemptionCheckpointHandler(None, checkpoint, f"{folder}/run-{number}/checkpoints") as handler:
        for batch in batches:
            optimizer.zero_grad()
            hpcdist.compute_average_loss(model(batch).square().sum(1), global_batch_size=16).backward()
            optimizer.step()
            records.write(handler.step, loss=1.0)

for number in range(n_fits):
    strategy = shared if kind == "fit" else hpcdist.MultiWorkerMirroredStrategy(gradient_op="sum")
    (loop if kind == "loop" else fit)(number, strategy)
    del strategy
    if number in (9, n_fits - 1):
        gc.collect()
        libc.malloc_trim(0)
        kinds = [kind for kind in map(type, gc.get_objects()) if str(kind.__module__).startswith("hpcdist.")]
        facts = {
            "rank": shared.rank,
            "threads": threading.active_count(),
            "descriptors": len(os.listdir("/proc/self/fd")),
            "resident_mb": int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6,
            "objects": len(kinds),
        }
        shared.barrier()
        print("facts " + json.dumps(facts), flush=True)
"""


@pytest.mark.parametrize(
    ("kind", "n_fits"),
    [
        ("fit", 30),
        pytest.param("fit with a strategy", 40, marks=pytest.mark.slow),
        pytest.param("loop", 40, marks=pytest.mark.slow),
        pytest.param("fit", 100, marks=pytest.mark.slow),
    ],
)
def test_memory_threads_and_descriptors_stay(start, tmp_path, kind, n_fits):
    outcome = start(2, "-c", PROGRAM, tmp_path, kind, n_fits).wait(200)
    assert outcome.code == 0, outcome.output[-3000:]
    facts = list(map(json.loads, re.findall(r"facts (\{[^}]*\})", outcome.output)))  # ranks may share a line
    for rank in range(2):
        early, late = (entry for entry in facts if entry["rank"] == rank)
        assert late["threads"] <= early["threads"]
        assert late["descriptors"] <= early["descriptors"]
        n_new = late["objects"] - early["objects"]  # 13 record the end of each; memory of batches is known for a while
        assert n_new <= 13 * (n_fits - 10) + 250, facts
        assert late["resident_mb"] - early["resident_mb"] < 30, "a fit holds 15 MB, and its saves as much"
    if kind != "loop":
        decisions = [json.loads(path.read_text()) for path in tmp_path.glob("run-*/decision.json")]
        assert [entry["decision"] for entry in decisions] == ["finished"] * n_fits
        run_numbers = sorted(int(path.parents[1].name[4:]) for path in tmp_path.glob("run-*/checkpoints/latest.h5"))
        assert run_numbers == list(range(1, n_fits, 2))

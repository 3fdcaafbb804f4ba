"""What real jobs leave in the run folder: config.json, records of steps, tracebacks; and what commands make of it."""

import json
import os
import re
import subprocess

import pytest
from real_jobs import PYTHON

#: One rank computes longer than the others, and can be made to fail.
PROGRAM = """
import sys, time
import torch
import hpcdist

strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op="mean")
with strategy.scope():
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = hpcdist.Dataset.from_tensor_slices(torch.randn(400, 64, generator=torch.Generator().manual_seed(1))).batch(8)
batches = strategy.experimental_distribute_dataset(data)
metrics = hpcdist.MetricsFile("{folder}/metrics.jsonl")
checkpoint = hpcdist.Checkpoint(model=model, optimizer=optimizer, data=batches, strategy=strategy, metrics=metrics)
manager = hpcdist.CheckpointManager(checkpoint, "{folder}/checkpoints")
with hpcdist.PreemptionCheckpointHandler(None, manager, save_every_steps=20) as handler:
    for batch in batches:
        time.sleep({slow_s} if strategy.world.rank == 1 else 0.001)
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if handler.step == 30:
            {then}
    metrics.write(handler.step, loss=loss.item())
"""
RAISE = "raise ValueError(f'on purpose, {strategy.world.rank}')"


@pytest.fixture
def run(start, tmp_path):
    """Return run(n_ranks, slow_s, then, environ): it runs the program, and returns how that ended."""

    def run(n_ranks, slow_s=0.001, then="pass", environ=None):
        program = tmp_path / "program.py"
        program.write_text(
            PROGRAM.replace("{slow_s}", str(slow_s)).replace("{then}", then).replace("{folder}", f"{tmp_path}/run")
        )
        return start(n_ranks, program, environ=environ).wait(60)

    return run


def hpcdist(tmp_path, *arguments):
    """Return what a command prints."""
    command = [PYTHON, "-m", "hpcdist", *map(str, arguments)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def records(path):
    return list(map(json.loads, path.read_text().splitlines()))


def test_what_it_was_started_with(run, tmp_path):
    environ = {"HPCDIST_ROLES": "chief:1,worker:*", "HPCDIST_TIMEOUT_S": "90", "HPCDIST_FROM_FILE": "HPCDIST_TIMEOUT_S"}
    outcome = run(2, environ={**environ, "HPCDIST_JOB_END_S": "4102444800"})
    assert outcome.code == 0, outcome.output
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    settings = {name: (setting["value"], setting["from"]) for name, setting in config["settings"].items()}
    assert settings.pop("ends_at")[1] == "HPCDIST_JOB_END_S"
    assert settings == {
        "roles": ("chief:1,worker:1", "HPCDIST_ROLES"),
        "timeout_s": ("90", "hpcdist.toml"),
        "debug": ("nothing", "default"),
        "log": ("text", "default"),
        "trace": ("some", "default"),
    }
    assert (config["ranks"], list(config["hosts"].values())) == (2, ["0-1"])
    (line,) = re.findall(r"^hpcdist: attempt 1 of \S+/run: 2 ranks on .*$", outcome.output, re.MULTILINE)
    assert "roles chief:1,worker:1 (HPCDIST_ROLES), timeout_s 90 (hpcdist.toml), debug nothing (default)" in line


@pytest.mark.feature("observability.timeline", "observability.merged-timeline", "observability.stragglers")
def test_where_the_time_of_the_slow_rank_goes(run, tmp_path):
    """Three ranks; the second takes 20 ms longer, for which the others wait: each has recorded its own part."""
    outcome = run(3, slow_s=0.02)
    assert outcome.code == 0, outcome.output
    for rank in range(3):
        header, *entries = records(tmp_path / "run" / "trace" / "0001" / f"rank-{rank:05d}.jsonl")
        assert (header["rank"], header["size"], header["role"]) == (rank, 3, f"worker:{rank}")
        windows = [entry for entry in entries if "window" in entry]
        total = {}
        for key in ("n_steps", "rows", "step_s", "communication_s"):
            total[key] = sum(window[key] for window in windows)
        assert (total["n_steps"], total["rows"]) == (50, 400)
        assert sum(window["save_s"] for window in windows) > 0
        waited = total["communication_s"] / total["step_s"]
        assert waited < 0.4 if rank == 1 else waited > 0.5, f"rank {rank} waits {waited:.2f} of its steps"
        steps = [entry["step"] for entry in entries if "spans" in entry]
        assert steps[:32] == list(range(1, 33))
    assert "report.html, and " in hpcdist(tmp_path, "report", "run")
    page = (tmp_path / "run" / "report" / "report.html").read_text()
    (finding,) = re.findall(r'<li class="bad">([^<]*)</li>', page)
    assert finding.startswith("rank 1 on ")
    hpcdist(tmp_path, "trace", "run")
    events = json.loads((tmp_path / "run" / "trace.json").read_text())["traceEvents"]
    sums = {}
    for event in events:
        if event.get("cat") == "communication" and event["name"].startswith("gradients"):
            sums.setdefault(event["pid"], []).append((event["ts"], event["ts"] + event["dur"]))
    for together in zip(*sums.values(), strict=True):  # nobody leaves a sum before all have entered it
        assert max(began for began, _ in together) <= min(ended for _, ended in together)


@pytest.mark.parametrize("mode", ["text", "json"])
def test_each_rank_that_fails_has_a_file(run, tmp_path, mode):
    """The screen has one traceback; the files have those of both ranks, which fail 0.3 s apart."""
    outcome = run(2, then=f"time.sleep(0.3 * (1 - strategy.world.rank)); {RAISE}", environ={"HPCDIST_LOG": mode})
    assert outcome.code != 0
    assert outcome.output.count("Traceback") == 1
    for rank in range(2):
        text = (tmp_path / "run" / "logs" / f"rank-{rank:05d}.log").read_text()
        if mode == "json":
            record = json.loads(text)
            assert (record["rank"], record["level"], record["step"]) == (rank, "ERROR", 30)
            text = record["message"] + "\n"
        else:
            assert re.match(rf"\S+ ERROR \[worker:{rank} r{rank}/2 \S+ step 30\] hpcdist: uncaught exception\n", text)
        assert text.endswith(f"ValueError: on purpose, {rank}\n")
    assert hpcdist(tmp_path, "logs", "run").count("ValueError: on purpose") == 2


def test_one_rank_alone_has_a_file_too(run, tmp_path):
    assert run(1, then=RAISE).code == 1
    assert "ValueError: on purpose, 0" in (tmp_path / "run" / "logs" / "rank-00000.log").read_text()


def test_without_records(run, tmp_path):
    outcome = run(2, environ={"HPCDIST_TRACE": "off"})
    assert outcome.code == 0, outcome.output
    assert sorted(os.listdir(tmp_path / "run")) == [*("checkpoints", "config.json", "decision.json", "metrics.jsonl")]
    assert "report.html, and 2 pictures" in hpcdist(tmp_path, "report", "run")


def test_records_that_cannot_be_written(run, tmp_path):
    """A file is where the folder would be: training continues, with one warning on each rank."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "trace").write_text("")
    outcome = run(2)
    assert outcome.code == 0, outcome.output
    assert outcome.output.count("training continues, and no more steps are recorded in this file") == 2
    assert json.loads((tmp_path / "run" / "decision.json").read_text())["decision"] == "finished"


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("HPCDIST_TRACE", "always", "expected HPCDIST_TRACE as some, all or off, got 'always'"),
        ("HPCDIST_LOG", "xml", "expected HPCDIST_LOG as json or text, got 'xml'"),
    ],
)
def test_an_unknown_value_is_refused_before_an_attempt_begins(run, tmp_path, name, value, text):
    outcome = run(2, environ={name: value})
    assert outcome.code == 78
    assert not (tmp_path / "run").exists(), "no attempt has begun"
    assert text in outcome.output
    assert "Traceback" not in outcome.output


@pytest.mark.slow
def test_ranks_beside_parameter_servers_are_named_as_elsewhere(start, root, tmp_path):
    """They are ranks of the whole job, as in logs and records."""
    options = ("--strategy", "ps", "--roles", "ps:1,worker:*", "--epochs", "2", "--run-dir", tmp_path / "run")
    outcome = start(3, root / "jobs" / "train.py", *options).wait(60)
    assert outcome.code == 0, outcome.output
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (config["ranks"], list(config["hosts"].values())) == (3, ["1-2"])
    assert ": 2 ranks on " in outcome.output
    assert sorted(os.listdir(tmp_path / "run" / "trace" / "0001")) == [*("rank-00001.jsonl", "rank-00002.jsonl")]
    windows = []
    for record in records(tmp_path / "run" / "trace" / "0001" / "rank-00001.jsonl"):
        if "window" in record:
            windows.append(record)
    assert sum(window["communication_s"] for window in windows) > 0
    assert sum(window["stale"][0] for window in windows) > 0, "two workers push, and each misses some of the other's"

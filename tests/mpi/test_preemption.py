"""PreemptionCheckpointHandler: one rank is asked, all save after the same step and leave; the next attempt resumes."""

import contextlib
import gc
import json
import os
import signal
import sys
import threading
import time
import weakref

import pytest
import torch
from torch import nn

import hpcdist
from hpcdist.checkpoint.read import CheckpointFile
from hpcdist.checkpoint.store import Store
from hpcdist.child_processes import STOP_SIGNALS
from hpcdist.errors import CheckpointMismatch, DesyncError, ExitCode, NoProgressError, UsageError
from hpcdist.run.stop_request import StopRequest
from hpcdist.runtime.step_flags import Request
from hpcdist.stopping import preemption
from hpcdist.stopping import stop as stop_module
from hpcdist.stopping.deadline import MIN_SLACK_S, Deadline
from hpcdist.stopping.stop import STOP_FOR_GOOD

pytestmark = pytest.mark.mpi
ROWS = 96
BATCH = 12
N_STEPS = ROWS // BATCH


class Job:
    """A model, its data and a handler over one run folder."""

    width = 2

    def __init__(
        self, folder, make_strategy=hpcdist.MultiWorkerMirroredStrategy, num_replicas=None, metrics=None, **options
    ):
        torch.manual_seed(3)
        self.strategy = strategy = make_strategy(num_replicas=num_replicas, gradient_op="sum")
        with strategy.scope():
            self.model = nn.Linear(3, self.width)
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        rows = torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(1))
        self.batches = self.distribute(rows)
        self.test_batches = self.distribute(rows)
        checkpoint = hpcdist.Checkpoint(
            model=self.model,
            optimizer=self.optimizer,
            data=self.batches,
            strategy=strategy,
            **({} if metrics is None else {"metrics": metrics}),
        )
        self.manager = hpcdist.CheckpointManager(checkpoint, folder / "checkpoints")
        self.handler = hpcdist.PreemptionCheckpointHandler(strategy.cluster_resolver, self.manager, **options)

    def distribute(self, rows):
        return self.strategy.experimental_distribute_dataset(hpcdist.Dataset.from_tensor_slices(rows).batch(BATCH))

    def step(self, x):
        self.optimizer.zero_grad()
        hpcdist.compute_average_loss(self.model(x).square().sum(1), global_batch_size=BATCH).backward()
        self.optimizer.step()

    def train(self, n_epochs=1, after_step=None):
        for _ in range(self.batches.epoch, n_epochs):
            for x in self.batches:
                self.handler.run(self.strategy.run, self.step, args=(x,))
                if after_step:
                    after_step(self.handler.total_run_calls)

    def bits(self):
        return [parameter.detach().numpy().tobytes() for parameter in self.model.parameters()]


@pytest.fixture
def make_job(shared_path):
    jobs = []
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # the tests run in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def make(name="run", **options):
        jobs.append(Job(shared_path / name, **options))
        return jobs[-1]

    yield make
    for job in jobs:
        job.handler.close()


def told_of(path, name="run"):
    return json.loads((path / name / "decision.json").read_text())


def decision(comm, path, name="run"):
    comm.Barrier()
    return told_of(path, name)


def raise_on(rank, comm, at, number=signal.SIGTERM):
    def act(step):
        if step == at and comm.rank == rank % comm.size:
            os.kill(os.getpid(), number)

    return act


def stopped(comm, run):
    """Run until the handler leaves; return the code, equal on all ranks."""
    with pytest.raises(SystemExit) as leaving:
        run()
    codes = comm.allgather(leaving.value.code)
    assert len(set(codes)) == 1, codes
    return codes[0]


@pytest.mark.feature(
    "checkpoints.preemption-handler",
    "checkpoints.one-rank-s-signal-suffices",
    "checkpoints.exact-resume",
    "semantics.handler-restores",
    "semantics.handler-agrees-on-a-step",
    "complaints.no-save-in-a-handler",
)
@pytest.mark.parametrize("number", STOP_SIGNALS)
@pytest.mark.parametrize(
    ("make_strategy", "more_replicas"),
    [
        (hpcdist.MultiWorkerMirroredStrategy, None),
        (hpcdist.MultiWorkerMirroredStrategy, 2),
        (hpcdist.CentralStorageStrategy, None),
    ],
)
def test_a_signal_to_one_rank_and_the_next_attempt_has_the_same_bits(
    comm, shared_path, make_job, number, make_strategy, more_replicas
):
    options = {
        "make_strategy": make_strategy,
        "num_replicas": None if more_replicas is None else comm.size + more_replicas,
    }
    unbroken = make_job("unbroken", **options)
    unbroken.train(2)
    unbroken.handler.close()
    first = make_job(**options)
    code = stopped(comm, lambda: first.train(2, raise_on(-1, comm, 3, number)))
    assert code == ExitCode.RUN_AGAIN == 75
    # the signal comes after step 3: the sum of step 4 tells the others; a single rank needs no telling
    at = 3 if comm.size == 1 else 4
    assert comm.allgather(first.handler.step) == [at] * comm.size
    told = decision(comm, shared_path)
    assert (told["decision"], told["step"], told["attempt"]) == ("requeue", at, 1)
    assert told["reason"] == f"{number.name} on rank {comm.size - 1}"
    first.handler.close()
    second = make_job(**options)
    assert second.handler.restored_path.endswith(f"step-{at:08d}-0001.h5")
    assert second.handler.total_run_calls == at
    with second.handler:
        second.train(2)
    assert second.bits() == unbroken.bits()
    told = decision(comm, shared_path)
    assert (told["decision"], told["step"], told["attempt"]) == ("finished", 2 * N_STEPS, 2)


@pytest.mark.feature("complaints.flag-seen-in-time")
def test_a_stop_in_evaluation(comm, shared_path, make_job):
    job = make_job()
    job.train()
    n_batches = []

    def evaluate():
        with torch.no_grad():
            for _ in range(100):
                for x in job.test_batches:
                    job.model(x)
                    n_batches.append(1)
                    if len(n_batches) == 20 and comm.rank == 0:
                        job.handler.stop("the user")

    assert stopped(comm, evaluate) == 75
    assert len(set(comm.allgather(len(n_batches)))) == 1
    assert 20 <= len(n_batches) <= 20 + 33
    told = decision(comm, shared_path)
    assert (told["reason"], told["step"]) == ("the user on rank 0", N_STEPS)


def test_an_evaluation_is_no_step_where_optimizers_step_by_themselves(comm, shared_path, make_job):
    """README's loop, with saves: they go on after the evaluation, under the optimizer's steps."""
    job = make_job(schedule=hpcdist.SaveSchedule(every_steps=3))
    saved = []

    def evaluate():
        saved.append(job.manager.checkpoint.step)
        return job.strategy.reduce("sum", torch.tensor(float(sum(map(len, job.test_batches)))), axis=None)

    with job.handler:
        for _ in range(2):
            for x in job.batches:
                job.step(x)
            assert job.handler.evaluate(evaluate) == ROWS
    assert saved == [6, 15]
    assert job.handler.total_run_calls == 2 * N_STEPS
    assert decision(comm, shared_path)["step"] == 2 * N_STEPS


def test_an_evaluation_is_no_step_in_the_next_attempt_either(comm, make_job):
    """It comes there before a step of the attempt: README's loop, stopped after the last step of an epoch."""

    def train(job):
        with job.handler:
            for _ in range(job.batches.epoch, 2):
                for x in job.batches:
                    job.step(x)
                    if job.handler.step == stop_at:
                        job.handler.stop()
                job.handler.evaluate(lambda: sum(map(len, job.test_batches)))
        return job.handler.latest_path

    # the sum of the next step tells the other ranks; a single one needs no telling
    stop_at = N_STEPS if comm.size == 1 else N_STEPS - 1
    first = make_job()
    assert stopped(comm, lambda: train(first)) == 75
    second = make_job()
    assert second.handler.restored_path.endswith(f"step-{N_STEPS:08d}-0001.h5")
    assert train(second).endswith(f"step-{2 * N_STEPS:08d}-0002.h5")
    assert second.handler.step == 2 * N_STEPS


def test_the_steps_of_a_strategy_of_one_replica_count(comm, shared_path):
    if comm.size > 1:
        pytest.skip("one device is a job of one rank")
    strategy = hpcdist.OneDeviceStrategy("cpu")
    with strategy.scope():
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = strategy.experimental_distribute_dataset(
        hpcdist.Dataset.from_tensor_slices(torch.ones(ROWS, 3)).batch(BATCH)
    )
    checkpoint = hpcdist.Checkpoint(model=model, optimizer=optimizer, data=batches)
    with hpcdist.PreemptionCheckpointHandler(None, checkpoint, shared_path / "run", save_every_steps=3) as handler:
        for x in batches:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    assert handler.step == N_STEPS
    assert sorted(path.name for path in shared_path.rglob("step-*.h5")) == [
        f"step-0000000{step}-0001.h5" for step in (3, 6, N_STEPS)
    ]


def test_the_end_saves_what_has_changed_since_the_last_step_was_saved(comm, shared_path, make_job):
    """Records of metrics, say; a program that comes to its end again and changes nothing writes nothing."""
    metrics = hpcdist.MetricsFile(shared_path / "metrics.jsonl")

    def files():
        comm.Barrier()
        return sorted(str(path.relative_to(shared_path)) for path in shared_path.rglob("step-*.h5"))

    def run():
        job = make_job(save_every_steps=N_STEPS, metrics=metrics)
        with job.handler:
            job.train(1)
            job.handler.poll()  # the last step is saved here
            before = files()
            if len(metrics) == 0:
                metrics.write(N_STEPS, loss=0.5)
        return before

    def inode():
        comm.Barrier()
        return os.stat(shared_path / name).st_ino

    name = f"run/checkpoints/step-0000000{N_STEPS}-0001.h5"
    assert run() == [name]
    assert files() == [name]
    before = inode()
    run()
    assert files() == [name]
    assert inode() == before, "nothing has changed"
    assert len(metrics) == 1
    metrics.load_state_dict({"records": 0, "last_step": -1})
    run()
    assert len(metrics) == 1, "the record was in the checkpoint"


@pytest.mark.parametrize("code", [0, None])
def test_an_early_end_by_sys_exit_saves_too(comm, shared_path, make_job, code):
    job = make_job()

    def train():
        with job.handler:
            for x in job.batches:
                job.step(x)
                if job.handler.step == 3:
                    sys.exit(code)

    assert stopped(comm, train) == code
    told = decision(comm, shared_path)
    assert (told["decision"], told["step"]) == ("finished", 3)
    assert job.handler.latest_path.endswith("step-00000003-0001.h5")


@pytest.mark.feature("evaluation.multi-node-evaluator")
def test_an_evaluation_is_not_cut_in_two(comm, shared_path, make_job):
    job = make_job()

    def evaluate():
        job.handler.stop()
        return sum(map(len, job.test_batches))

    n_rows = job.strategy.reduce("sum", torch.tensor(float(job.handler.evaluate(evaluate))), axis=None)
    assert n_rows == ROWS
    assert stopped(comm, lambda: [job.handler.evaluate(evaluate) for _ in range(5)]) == 75


def test_a_loop_under_no_sync(comm, make_job):
    """A request waits until a step has been made of what was accumulated."""
    job = make_job()
    done = []

    def accumulate():
        for number, x in enumerate([*job.batches] * 8):
            if number == 3 and comm.rank == comm.size - 1:
                job.handler.stop()
            is_last = number % 5 == 4
            with contextlib.nullcontext() if is_last else job.strategy.no_sync():
                hpcdist.compute_average_loss(job.model(x).square().sum(1), global_batch_size=BATCH).backward()
            if is_last:
                job.optimizer.step()
                job.optimizer.zero_grad()
            done.append(number)
            job.handler.poll()

    assert stopped(comm, accumulate) == 75
    assert len(set(comm.allgather(done[-1]))) == 1
    assert done[-1] == 4


@pytest.mark.feature("semantics.handler-restores")
def test_a_numpy_loop_with_save_checkpoint_if_preempted(comm, shared_path):
    import numpy as np

    array = np.zeros(4)
    checkpoint = hpcdist.Checkpoint(array=array)
    handler = hpcdist.PreemptionCheckpointHandler(None, checkpoint, shared_path / "run" / "checkpoints")

    def loop():
        for number in range(1000):
            array[:] = number + 1
            if number == 10 and comm.rank == comm.size - 1:
                handler.stop()
            handler.save_checkpoint_if_preempted()

    assert stopped(comm, loop) == 75
    step = handler.step
    handler.close()
    resumed_handler = hpcdist.PreemptionCheckpointHandler(None, checkpoint, shared_path / "run" / "checkpoints")
    assert resumed_handler.total_run_calls == step == array[0]
    resumed_handler.close()


def test_the_stop_file_is_removed_when_it_was_obeyed(comm, shared_path, make_job):
    job = make_job()
    if comm.rank == 0:
        (shared_path / "run" / "stop").touch()
    comm.Barrier()
    assert stopped(comm, lambda: job.train(50)) == 75
    assert decision(comm, shared_path)["reason"] == f"stop file {shared_path / 'run' / 'stop'}"
    assert not (shared_path / "run" / "stop").exists()


LIMIT_S = 9_756


def pace_s(step):
    """Return how long a step takes by the clock of deadlines: little near `LIMIT_S`, to leave time for a save."""
    if step < 40:
        return 250
    return 1


@pytest.fixture
def advance(monkeypatch):
    """Return a function that moves the clock of deadlines ahead, as a loaded machine takes its own time."""
    ahead_s = [0.0]

    def move(seconds):
        ahead_s[0] += seconds

    def ahead(end_s, step, save, clock, **options):
        return Deadline(end_s, step, save, lambda: clock() + ahead_s[0], **options)

    monkeypatch.setattr("hpcdist.stopping.time_left.Deadline", ahead)
    return move


@pytest.mark.feature("checkpoints.stop-before-the-time-limit", "complaints.time-limit-known")
def test_a_deadline(comm, shared_path, make_job, capfd, advance):
    job = make_job(time_limit_s=LIMIT_S)
    assert capfd.readouterr().err.count("hpcdist: job ends at ") == (comm.rank == 0)
    assert stopped(comm, lambda: job.train(10**6, lambda step: advance(pace_s(step)))) == 75
    assert 36 <= job.handler.step <= 41
    assert decision(comm, shared_path)["reason"] == "deadline"
    assert len(list(shared_path.rglob("step-*.h5"))) == 2, "a first save was made to know what one costs"


def let_end_in(job, seconds):
    """Move the deadline of a job."""
    job.handler.deadline.end += seconds - job.handler.deadline.left_s


@pytest.mark.parametrize("is_in_run", [False, True])
def test_the_deadline_leaves_time_for_one_more_evaluation(comm, shared_path, make_job, is_in_run):
    """Which is neither a step, where these are made outside of `run`, nor among the p99 of so many."""
    job = make_job(time_limit_s=600)

    def train(n_epochs):
        for _ in range(n_epochs):
            for x in job.batches:
                job.handler.run(job.strategy.run, job.step, args=(x,)) if is_in_run else job.step(x)

    train(15)
    assert job.handler.deadline.calls.longest_s == 0.0, "calls that are steps have their p99"
    job.handler.evaluate(time.sleep, 3)
    train(1)
    let_end_in(job, MIN_SLACK_S + 2.9)
    assert stopped(comm, lambda: train(1)) == 75
    assert decision(comm, shared_path)["reason"] == "deadline"


@pytest.mark.feature("checkpoints.stop-before-the-time-limit", "complaints.time-to-save")
def test_a_save_that_may_not_fit_is_tried_and_not_waited_for(comm, shared_path, make_job, capfd, monkeypatch):
    """A job that is ended in the middle of it has said before that it is to run again."""
    job = make_job(time_limit_s=600)
    job.train(1, lambda step: job.manager.save(step) if step == 3 else None)
    job.handler.deadline.save.add(200)
    let_end_in(job, 100)
    writes = threading.Event()
    if comm.rank == 0:
        commit = Store.commit
        monkeypatch.setattr(Store, "commit", lambda *arguments: writes.wait(60) and commit(*arguments))
    assert stopped(comm, lambda: job.train(2)) == 75
    assert job.handler.step > 3
    told = decision(comm, shared_path)
    assert (told["decision"], told["step"]) == ("requeue", 3), "a kill now loses nothing that was saved"
    writes.set()
    job.manager.wait()
    assert decision(comm, shared_path)["step"] == job.handler.step
    newest = hpcdist.latest_checkpoint(job.manager.directory)
    assert newest.endswith(f"step-{job.handler.step:08d}-0001.h5")
    too_late = "too late for a save, which it tries; the last one is step 3 in "
    assert capfd.readouterr().err.count(too_late) == (1 if comm.rank == 0 else 0)


def test_a_deadline_that_comes_near_in_an_evaluation_lets_no_step_begin(comm, make_job):
    """The last sum of gradients was made before it, and could not tell."""
    job = make_job(time_limit_s=600)
    job.train(1)

    def evaluate():
        let_end_in(job, MIN_SLACK_S)

    job.handler.evaluate(evaluate)
    before = job.handler.step
    assert stopped(comm, lambda: job.train(2)) == 75
    assert job.handler.step == before


@pytest.mark.feature("checkpoints.preemption-handler", "semantics.handler-grace-period")
def test_a_grace_period_is_used_for_training(comm, shared_path, make_job, advance):
    job = make_job(termination_config=hpcdist.TerminationConfig(grace_period=LIMIT_S))

    def after_step(step):
        if step == 2 and comm.rank == comm.size - 1:
            job.handler.stop()
        advance(pace_s(step))

    assert stopped(comm, lambda: job.train(10**6, after_step)) == 75
    assert 36 <= job.handler.step <= 44
    steps = sorted(path.name for path in (shared_path / "run").rglob("step-*.h5"))
    comm.Barrier()
    assert steps[0] == f"step-{2 if comm.size == 1 else 3:08d}-0001.h5", "one save at once"
    assert steps[-1] == f"step-{job.handler.step:08d}-0001.h5", "one at the end"


@pytest.mark.feature("complaints.time-to-save")
def test_what_a_save_costs_is_with_its_read_back(comm, make_job, monkeypatch):
    verify = CheckpointFile.verify
    monkeypatch.setattr(CheckpointFile, "verify", lambda *arguments: (time.sleep(0.5), verify(*arguments)))
    job = make_job(time_limit_s=600, save_every_steps=5)
    n_saves = []
    job.train(1, lambda step: n_saves.append(job.handler.deadline.n_saves()))
    assert job.handler.deadline.save.p99 >= 0.5
    assert n_saves[:6] == [1, 1, 1, 2, 2, 1], "one is due after the fifth"
    job.manager.save(N_STEPS, blocking=False)
    assert job.handler.deadline.n_saves() == (2 if comm.rank == 0 else 1), "one is read back"
    job.manager.wait()
    assert job.handler.deadline.n_saves() == 1


def test_saves_that_become_slower_are_measured_too(comm, make_job, monkeypatch):
    verify = CheckpointFile.verify
    delay_s = [0.0]
    monkeypatch.setattr(CheckpointFile, "verify", lambda *arguments: (time.sleep(delay_s[0]), verify(*arguments)))
    job = make_job(time_limit_s=600, save_every_steps=2)

    def slow_down(step):
        delay_s[0] = 0.5 if step >= 3 else 0.0

    job.train(1, slow_down)
    assert (job.handler.deadline.save.p99 >= 0.5) == (comm.rank == 0), "the chief alone has to know"


@pytest.mark.feature("checkpoints.preemption-handler", "semantics.handler-agrees-on-a-step")
def test_watcher_save_fn_and_exit_fn(comm, make_job):
    calls = []
    config = hpcdist.TerminationConfig(
        termination_watcher_fn=lambda: comm.rank == comm.size - 1 and len(calls) >= 3,
        save_fn=lambda: calls.append("save"),
        exit_fn=lambda: calls.append("exit"),
    )
    job = make_job(termination_config=config)
    job.train(1, lambda step: (calls.append(step), time.sleep(0.3 if step in (3, 4, 5, 6) else 0)))
    assert comm.allgather(calls) == [calls] * comm.size
    assert calls.count("save") == calls.count("exit") == 1
    assert calls.index("exit") == calls.index("save") + 1


def test_saves_of_the_program_that_become_slower_are_measured_too(comm, make_job):
    n_saves = []

    def save():
        n_saves.append(1)
        time.sleep(0.5 if len(n_saves) > 1 else 0.0)

    config = hpcdist.TerminationConfig(save_fn=save)
    job = make_job(termination_config=config, time_limit_s=600, save_every_steps=3)
    job.train(1)
    assert job.handler.deadline.save.p99 >= 0.5


def test_a_second_stop_of_a_deadline_that_moved_away_ends_the_job(comm, make_job):
    """The ranks have agreed on a stop that no rank asks for any more: there is no request to count a period from."""
    job = make_job(termination_config=hpcdist.TerminationConfig(grace_period=600.0))
    job.handler._stop_waits = True
    assert stopped(comm, lambda: job.train(1)) == 75
    assert job.handler.step == 0


@pytest.mark.feature("checkpoints.save-and-retention-policy")
@pytest.mark.parametrize("every", [{"save_every_steps": 3}, {"schedule": hpcdist.SaveSchedule(every_s=0.05)}])
def test_periodic_saves(comm, shared_path, make_job, every):
    job = make_job(**every)
    with job.handler:
        job.train(1, lambda step: time.sleep(0.03))
    assert job.manager.checkpoint.step == N_STEPS
    comm.Barrier()
    steps = sorted(int(path.stem[5:13]) for path in (shared_path / "run").rglob("step-*.h5"))
    if "save_every_steps" in every:
        assert steps == [3, 6, N_STEPS]
    else:
        assert 2 <= len(steps) <= 3, "the last three are kept"
    assert decision(comm, shared_path)["decision"] == "finished"


@pytest.mark.feature("debugging.replica-divergence")
def test_copies_and_comparisons_between_steps(comm, make_job):
    """One bit that changes on one rank ends all of them at the next comparison, with "do not requeue"."""
    job = make_job(schedule=hpcdist.SaveSchedule(in_memory_every_steps=2, compare_every_steps=3))
    copied = []
    job.manager.save_fast = copied.append

    def flip(step):
        if step == 4 and comm.rank == comm.size - 1:
            next(job.model.parameters()).data.view(-1)[0] += 1

    if comm.size == 1:
        job.train(1, flip)
        assert copied == list(range(2, N_STEPS + 1, 2))
        return
    with pytest.raises(DesyncError, match=f"equal models and optimizers on all {comm.size} ranks"):
        job.train(1, flip)
    assert copied == [2, 4]


@pytest.mark.feature("checkpoints.signals-set-a-flag")
def test_a_user_handler_is_called_too_and_gets_its_signal_back(comm, make_job):
    calls = []
    earlier = signal.signal(signal.SIGUSR2, lambda number, frame: calls.append(number))
    try:
        user_handler = signal.getsignal(signal.SIGUSR2)
        job = make_job()
        assert stopped(comm, lambda: job.train(2, raise_on(0, comm, 2, signal.SIGUSR2))) == 75
        assert calls == ([signal.SIGUSR2] if comm.rank == 0 else [])
        job.handler.close()
        assert signal.getsignal(signal.SIGUSR2) is user_handler
    finally:
        signal.signal(signal.SIGUSR2, earlier)


@pytest.mark.feature("checkpoints.signals-set-a-flag")
def test_a_second_signal_while_saving(comm, shared_path, make_job):
    job = make_job()
    save = job.manager.save

    def save_slowly(*args, **kwargs):
        for number in STOP_SIGNALS:
            os.kill(os.getpid(), number)
        return save(*args, **kwargs)

    job.manager.save = save_slowly
    assert stopped(comm, lambda: job.train(2, raise_on(0, comm, 1, signal.SIGUSR1))) == 75
    assert decision(comm, shared_path)["reason"] == "SIGUSR1 on rank 0"


def test_a_request_for_good_counts_while_the_job_saves(comm, shared_path, make_job):
    job = make_job()
    save = job.manager.save

    def ask_meanwhile(*args, **kwargs):
        saved = save(*args, **kwargs)
        if comm.rank == 0:
            (shared_path / "run" / "stop").write_text(f"{STOP_FOR_GOOD}\n")
        return saved

    job.manager.save = ask_meanwhile
    assert stopped(comm, lambda: job.train(2, raise_on(0, comm, 1, signal.SIGTERM))) == 76
    told = decision(comm, shared_path)
    assert (told["decision"], told["reason"]) == ("stop", "SIGTERM on rank 0, for good")
    assert not (shared_path / "run" / "stop").exists()


@pytest.mark.parametrize("is_there", [True, False], ids=["the file server answers", "it hangs"])
def test_a_stop_without_a_save_waits_for_no_file_server(comm, shared_path, make_job, monkeypatch, is_there):
    job = make_job()
    answer = threading.Event()
    if is_there:
        answer.set()
    look = stop_module._text_of_request
    monkeypatch.setattr(stop_module, "_text_of_request", lambda file: look(file) if answer.wait(60) else None)
    monkeypatch.setattr(preemption, "_RECORD_S", 10 if is_there else 0.2)
    monkeypatch.setattr(preemption, "end_job", lambda text, code: sys.exit(code))
    if comm.rank == 0:
        (shared_path / "run" / "stop").write_text(f"{STOP_FOR_GOOD}\n")
    comm.Barrier()
    started = time.monotonic()
    with pytest.raises(SystemExit) as leaving:
        job.handler.leave_at_once(StopRequest("SIGTERM on rank 0"))
    assert time.monotonic() - started < 30
    assert leaving.value.code == (76 if is_there and comm.rank == 0 else 75)  # the chief looks for the file
    answer.set()
    deadline = time.monotonic() + 30
    while (shared_path / "run" / "stop").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert told_of(shared_path)["decision"] == "stop"
    assert told_of(shared_path)["reason"] == "SIGTERM on rank 0, for good"
    assert not (shared_path / "run" / "stop").exists()


def test_signals_do_not_end_a_process_that_is_leaving(comm, make_job):
    job = make_job()
    job.handler.stop()

    def leave():
        with job.handler:
            job.train(2)

    assert stopped(comm, leave) == 75
    os.kill(os.getpid(), signal.SIGTERM)
    assert list(map(signal.getsignal, STOP_SIGNALS)) == [signal.SIG_IGN] * len(STOP_SIGNALS), (
        "handlers go before Python's end"
    )


def test_an_error_leaves_the_decision_that_was_made_at_the_start(comm, shared_path, make_job):
    job = make_job()
    with pytest.raises(ZeroDivisionError), job.handler:
        raise ZeroDivisionError
    told = decision(comm, shared_path)
    assert (told["decision"], told["reason"]) == ("requeue", "died by a signal or an error")
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.fixture
def in_batch_job(monkeypatch):
    """Attempts without progress end a run in batch jobs only."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")


@pytest.mark.feature("slurm.requeue-cap")
@pytest.mark.usefixtures("in_batch_job")
def test_attempts_that_die_again_and_again_are_not_started_a_fourth_time(comm, shared_path, make_job):
    for verdict in ("requeue", "requeue", "stop"):
        make_job().handler.close()
        assert decision(comm, shared_path)["decision"] == verdict
    with pytest.raises(NoProgressError, match="3.*attempts.*progress") as refusal:
        make_job()
    assert refusal.value.exit_code == 76
    assert refusal.value.is_agreed
    assert decision(comm, shared_path)["decision"] == "stop"
    comm.Barrier()
    if comm.rank == 0:
        (shared_path / "run" / "decision.json").unlink()
    comm.Barrier()
    job = make_job(save_every_steps=2)  # somebody has looked at it
    job.train(1)
    assert decision(comm, shared_path)["decision"] == "requeue", "renewed by the first checkpoint"
    job.handler.close()
    assert sorted(path.name for path in shared_path.rglob("attempts/*.jsonl")) == [f"000{n}.jsonl" for n in range(1, 5)]


def test_attempts_outside_of_batch_jobs_warn_only(comm, shared_path, make_job, caplog):
    """Three bugs in a row at a prompt do not keep the fourth, corrected program from running."""
    for n in range(5):
        make_job().handler.close()
        assert decision(comm, shared_path)["decision"] == "requeue"
        assert caplog.text.count("attempts in a row made no progress") == (max(n - 2, 0) if comm.rank == 0 else 0)


@pytest.mark.usefixtures("in_batch_job")
def test_a_corrected_program_starts_after_three_that_died(shared_path, make_job, monkeypatch):
    program = shared_path / "train.py"
    monkeypatch.setattr("sys.argv", [str(program)])
    for n in range(6):
        program.write_text(str(n // 3))
        make_job().handler.close()


@pytest.mark.feature("slurm.requeue-cap")
@pytest.mark.usefixtures("in_batch_job")
def test_preemptions_before_the_first_new_step_do_not_count(comm, shared_path, make_job, monkeypatch):
    """Asked by Slurm, or killed and restarted by Slurm, which the batch script tells."""
    for _ in range(4):
        job = make_job()
        os.kill(os.getpid(), signal.SIGTERM)
        assert stopped(comm, lambda job=job: [job.handler.poll() for _ in range(3)]) == 75
        job.handler.close()
        told = decision(comm, shared_path)
        assert (told["decision"], told["attempts_without_progress"]) == ("requeue", 0)
    monkeypatch.setenv("HPCDIST_PREEMPTED", "1")
    for _ in range(4):
        make_job().handler.close()
        told = decision(comm, shared_path)
        assert (told["decision"], told["attempts_without_progress"]) == ("requeue", 1)


def test_a_second_handler_of_a_manager_is_another_attempt(comm, shared_path, make_job):
    """Two phases of a program: what the first has finished says nothing of the second."""
    job = make_job()
    with job.handler:
        job.train(1)
    second = hpcdist.PreemptionCheckpointHandler(None, job.manager)
    told = decision(comm, shared_path)
    assert (told["decision"], told["attempt"]) == ("requeue", 2)
    second.close()


@pytest.mark.usefixtures("in_batch_job")
def test_a_restore_before_the_handler_keeps_the_rule(comm, shared_path, make_job, monkeypatch):
    """As in TensorFlow's guides. A refused start counts as little as it does without."""
    plain = hpcdist.CheckpointManager.__init__

    def restoring(manager, *args, **kwargs):
        plain(manager, *args, **kwargs)
        manager.restore_or_initialize()

    monkeypatch.setattr(hpcdist.CheckpointManager, "__init__", restoring)
    for _ in range(3):
        make_job().handler.close()
    for _ in range(2):
        with pytest.raises(NoProgressError, match="3.*attempts.*progress"):
            make_job()
    comm.Barrier()
    if comm.rank == 0:
        (shared_path / "run" / "decision.json").unlink()
    comm.Barrier()
    make_job().handler.close()
    told = decision(comm, shared_path)
    assert (told["decision"], told["attempts_without_progress"]) == ("requeue", 1)


@pytest.mark.usefixtures("in_batch_job")
def test_progress_after_a_suspect_was_skipped_is_told(comm, shared_path, make_job, monkeypatch):
    """The third attempt begins with "stop", and its first save only reaches the step that was skipped."""
    first = make_job(save_every_steps=2)
    first.train(1, lambda step: first.handler.close() if step == 4 else None)
    first.manager.wait()
    for job_id in ("8", "9"):
        monkeypatch.setenv("SLURM_JOB_ID", job_id)
        make_job().handler.close()
    job = make_job(save_every_steps=2)
    start = job.handler.step
    verdicts = []
    job.train(2, lambda step: verdicts.append(decision(comm, shared_path)["decision"]))
    assert verdicts[0] == "stop"
    assert verdicts[-1] == "requeue"
    assert start < job.handler.step
    job.handler.close()


class OtherJob(Job):
    """Of another model."""

    width = 3


def test_another_model_is_refused_once_and_for_all(comm, shared_path, make_job):
    job = make_job()
    with job.handler:
        job.train(1)
    with pytest.raises(CheckpointMismatch) as refusal:
        OtherJob(shared_path / "run")
    assert refusal.value.exit_code == ExitCode.BAD_CONFIGURATION == 78
    told = decision(comm, shared_path)
    assert told["decision"] == "stop"
    assert "expected 'model' with" in told["reason"]
    resumed_job = make_job()
    assert resumed_job.handler.step == N_STEPS


@pytest.mark.usefixtures("in_batch_job")
def test_a_checkpoint_saved_by_hand_renews_the_decision(comm, shared_path, make_job):
    """The third attempt of a run without a checkpoint begins with "stop", whoever saves later."""
    for _ in range(2):
        make_job().handler.close()
    job = make_job()
    assert decision(comm, shared_path)["decision"] == "stop"
    job.train(1, lambda step: job.manager.save(step, {"loss": 1.0}, blocking=False) if step == 2 else None)
    told = decision(comm, shared_path)
    assert (told["decision"], told["step"], told["attempts_without_progress"]) == ("requeue", 2, 0)


@pytest.mark.usefixtures("in_batch_job")
def test_attempts_that_die_while_they_restore_count_too(comm, shared_path, make_job, monkeypatch):
    def die(manager, skipped):
        raise MemoryError

    monkeypatch.setattr(hpcdist.CheckpointManager, "_restore", die)
    for verdict in ("requeue", "requeue", "stop"):
        with pytest.raises(MemoryError):
            make_job()
        assert decision(comm, shared_path)["decision"] == verdict
    with pytest.raises(NoProgressError, match="3.*attempts.*progress"):
        make_job()


@pytest.mark.usefixtures("in_batch_job")
def test_stops_before_any_progress_end_the_chain_too(comm, shared_path, make_job, capfd):
    job = make_job()
    with job.handler:
        job.train(1)
    for attempt, (verdict, code) in enumerate([("requeue", 75), ("requeue", 75), ("stop", 76)], 2):
        job = make_job()
        job.handler.stop()
        assert stopped(comm, lambda job=job: [job.handler.poll() for _ in range(3)]) == code
        told = decision(comm, shared_path)
        assert (told["decision"], told["attempt"], told["attempts_without_progress"]) == (verdict, attempt, attempt - 1)
        job.handler.close()
    why = "do not run again: 3 attempts in a row made no progress; this one was stopped by stop() on rank 0"
    assert capfd.readouterr().err.count(why) == (1 if comm.rank == 0 else 0)


@pytest.mark.usefixtures("in_batch_job")
def test_with_save_fn_nobody_counts(comm, shared_path, make_job):
    """What save_fn saves is unknown: three preempted attempts in a row are three that came further, for all we know."""
    saves = []
    config = hpcdist.TerminationConfig(save_fn=lambda: saves.append("saved"))
    for attempt in range(1, 5):
        job = make_job(termination_config=config)
        assert stopped(comm, lambda job=job: job.train(1, lambda step, job=job: job.handler.stop())) == 75
        told = decision(comm, shared_path)
        assert (told["decision"], told["attempt"]) == ("requeue", attempt)
        job.handler.close()
    assert len(saves) == 4
    for _ in range(4):
        make_job(termination_config=config).handler.close()
        assert decision(comm, shared_path)["decision"] == "requeue"


def test_a_later_handler_takes_over(comm, make_job):
    first = make_job("one")
    second = make_job("two")
    assert second.strategy.world.step_flags.requester is second.handler
    first.handler.close()
    assert second.strategy.world.step_flags.requester is second.handler
    os.kill(os.getpid(), signal.SIGUSR1)
    assert (first.handler.requested(), second.handler.requested()) == (Request.NONE, Request.STOP)


def test_what_cannot_be(comm, shared_path):
    with pytest.raises(UsageError, match="CheckpointManager.*Checkpoint.*checkpoint_dir"):
        hpcdist.PreemptionCheckpointHandler(None, hpcdist.Checkpoint())
    with pytest.raises(UsageError, match="got dict"):
        hpcdist.PreemptionCheckpointHandler(None, {}, shared_path)


def test_threads_do_not_poll(make_job):
    job = make_job()
    job.handler.stop()
    thread = threading.Thread(target=job.handler.poll)
    thread.start()
    thread.join()
    assert job.handler.requested() == Request.STOP, "a handler that has stopped requests nothing"


def test_a_handler_that_has_ended_keeps_nothing_alive(comm, shared_path):
    """A strategy that lives on would have a say in the losses of the next one."""

    def train():
        strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op="sum")
        with strategy.scope():
            model = nn.Linear(3, 1)
        checkpoint = hpcdist.Checkpoint(model=model, strategy=strategy)
        manager = hpcdist.CheckpointManager(checkpoint, shared_path)
        with hpcdist.PreemptionCheckpointHandler(strategy.cluster_resolver, manager) as handler:
            handler.run(lambda: None)
        return weakref.ref(strategy)

    strategy = train()
    gc.collect()
    assert strategy() is None


def test_the_decision_names_the_last_checkpoint(comm, shared_path, make_job):
    """Also while the program runs, and if its next moment is its last."""
    job = make_job(schedule=hpcdist.SaveSchedule(every_steps=2))
    seen = {}

    def look(step):
        job.manager.wait()
        seen[step] = decision(comm, shared_path)["step"]

    job.train(2, look)
    assert len(seen) >= 6
    assert seen == {step: (step - 1) // 2 * 2 or None for step in seen}  # saves come with the next batch

"""README's batch script under a real Slurm: to the end, preempted, requeued, with a node lost, in a crash loop."""

import contextlib
import json
import os
import re
import signal
import statistics
import sys
import time
from pathlib import Path

import pytest
from conftest import kill_all
from scale import SCALE

pytestmark = pytest.mark.timeout(900)
N_PREEMPTIONS = SCALE.choose(1, 10)


@pytest.mark.quick
def test_to_the_end_and_the_same_command_again(submit, data):
    small = ("--data", data, "--batch", 16)
    job = submit("train", *small, "--epochs", 3)
    text = job.finish()
    assert "2 replicas; new run" in text
    assert "epoch 3/3" in text
    assert (job.decision["attempt"], job.decision["job"]) == (1, job.id)
    job = submit("train", *small, "--epochs", 4)
    assert "2 replicas; resuming from" in job.finish()
    assert (job.decision["attempt"], job.decision["job"]) == (2, job.id)
    rows = (job.run_dir / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["epoch"] for row in rows] == [0, 1, 2, 3]


@pytest.mark.feature("checkpoints.requeue", "complaints.requeue-once")
@pytest.mark.quick
def test_preempted_again_and_again_it_ends_with_the_same_bits(folder, submit, preempt, options, run_unbroken):
    """No step is lost, and the log is not truncated."""
    signals = folder / "signals"
    epochs = 40 * N_PREEMPTIONS  # of four steps: each attempt makes 20 before it is preempted, and some until it is
    job = submit("train", *options, "--epochs", epochs, environ={"PROBE_SIGNALS": str(signals)})
    latencies_s = []
    for attempt in range(1, N_PREEMPTIONS + 1):
        job.wait_for_training(attempt)
        if signals.exists():
            n_before = len(signals.read_text().splitlines())
        else:
            n_before = 0
        told = preempt(job)
        assert (told["decision"], told["attempt"]) == ("requeue", attempt)
        assert told["reason"].startswith("SIGTERM on rank ")
        assert f"stopped after step {told['step']}" in job.log
        saved = job.run_dir / "checkpoints" / f"step-{told['step']:08d}-{attempt:04d}.h5"
        first = next(line for line in signals.read_text().splitlines()[n_before:] if "SIGTERM" in line)
        latencies_s.append(max(0.0, (saved.stat().st_ctime_ns - int(first.split()[0])) / 1e9))  # 0: it was there
        job.wait_for_text("resuming from", attempt, 120)
        resumed = rf"hpcdist: resuming at step {told['step']} from \S+{saved.name}\n"
        assert len(re.findall(resumed, job.log)) == 1, "the next attempt goes on after the last step"
    text = job.finish(600)
    assert job.final_state() == run_unbroken(epochs)
    assert text.count("new run") == 1
    assert text.count("to be requeued: SIGTERM on rank ") == N_PREEMPTIONS
    assert job.decision["attempt"] == N_PREEMPTIONS + 1
    assert 0 < max(latencies_s) < 10, "the grace time"
    p99 = sorted(latencies_s)[len(latencies_s) * 99 // 100]
    print(
        f"{N_PREEMPTIONS} preemptions, 0 steps lost; SIGTERM to committed checkpoint (steps take 0.05 s): "
        f"p50 {statistics.median(latencies_s):.3f} s, p99 {p99:.3f} s"
    )


@pytest.mark.feature("checkpoints.stop-before-the-time-limit")
@pytest.mark.slow
def test_a_job_that_slurm_suspends_beyond_its_end_trains_on(slurm, submit, options, unbroken):
    """Slurm moves the end of a job that it suspends; SLURM_JOB_END_TIME stays, and the job asks for the new end."""
    job = submit(
        "train",
        *options,
        sbatch=("--time=1", "--signal=URG@1"),
        environ={"PROBE_PACE_S": "0.05", "LIMIT_MARGIN_S": "5"},
    )
    job.wait_for_training()
    slurm.client("scontrol", "suspend", job.id)
    job.wait_for("a suspension", lambda: job.state == "SUSPENDED")
    time.sleep(65)
    slurm.client("scontrol", "resume", job.id)
    job.wait_for_text("the job was suspended, or the clock was set: job ends at", 1, 30)
    job.finish()
    assert job.final_state() == unbroken
    assert job.n_restarts == 0, job.log


@pytest.mark.feature("checkpoints.elastic-ranks")
@pytest.mark.sweep
def test_a_job_that_lost_a_node_resumes_in_its_allocation(slurm, submit, options, unbroken):
    """On fewer ranks with as many replicas, with the same bits, without a way through the queue."""
    job = submit("train", *options, nodes=3)
    job.wait_for_training()
    *surviving_nodes, lost = job.nodes
    try:
        assert len(slurm.kill_node(lost)) >= 3, "slurmd, a step's shepherd, a rank"
        killed = time.monotonic()
        job.wait_for_text("resuming from", 1, 120)
        print(f"goes on {time.monotonic() - killed:.1f} s after the loss of a node")
        text = job.finish()
    finally:
        slurm.restart_node(lost)
    assert f"restart 1 inside the allocation, on {','.join(surviving_nodes)}" in text
    assert job.n_restarts == 0
    assert job.final_state() == unbroken
    assert job.decision["attempt"] == 2


@pytest.mark.sweep  # as when a node is lost; here what is lost comes back
@pytest.mark.parametrize("what", ["the script and the chief", "a worker"])
def test_a_node_that_falls_silent_comes_back_during_the_next_attempt(slurm, submit, options, unbroken, what):
    """Ranks of two attempts live at the same time, even two chiefs: those of the first one change nothing."""
    job = submit("train", *options, nodes=3, environ={"WATCH_PAUSE_S": "1"})
    job.wait_for_training()
    silent = job.nodes[0 if what == "the script and the chief" else -1]
    pids = slurm.silence_node(silent)
    (old,) = (pid for pid in pids if is_rank(pid, job.id))
    try:
        job.wait_for_training(attempt=2)
        assert is_rank(old, job.id)
    finally:
        kill_all(pids, signal.SIGCONT)
    text = job.finish(180)
    slurm.wait_for("the end of the silent rank", lambda: not is_rank(old, job.id))
    slurm.wait_for_nodes()
    assert ("the node of the batch script is lost" if what != "a worker" else "restart 1 inside the allocation") in text
    assert job.final_state() == unbroken
    # the srun that woke up may cancel its step, and the next attempt's has the same number: then there is a third one
    assert job.decision["attempt"] in (2, 3), text + slurm.logs()


@pytest.mark.feature("slurm.end-on-a-rank-s-death")
@pytest.mark.sweep  # it measures; that a killed rank is recovered from is tested in test_recipes.py
@pytest.mark.parametrize("recipe", ["train", "train-mpirun"])
def test_the_time_from_a_ranks_death_to_the_next_step(slurm, submit, options, unbroken, recipe):
    environ = {"MPIRUN": str(Path(sys.executable).with_name("mpirun"))}
    job = submit(recipe, *options, "--save-every", 1, nodes=2, ranks=1, environ=environ)
    job.wait_for_training()
    victim = next(pid for pid in slurm.processes() if is_rank(pid, job.id))
    killed = time.time()
    os.kill(victim, signal.SIGKILL)
    n_seen = 0
    parts = {}
    ledger = job.run_dir / "checkpoints" / "attempts" / "0002.jsonl"
    looks = {
        "over, and restarted": lambda: "inside the allocation" in job.log,
        "launched": lambda: any(is_rank(pid, job.id) and started_at(pid) > killed for pid in slurm.processes()),
        "imported, MPI started": ledger.exists,
        "restored": lambda: "resuming from" in job.log,
        "a step, saved": lambda: any(job.run_dir.glob("checkpoints/step-*-0002.h5")),
    }
    while n_seen < len(looks) and time.time() < killed + 60:
        milestone, is_seen = list(looks.items())[n_seen]
        if is_seen():
            parts[milestone] = time.time() - killed
            n_seen = n_seen + 1
        else:
            time.sleep(0.01)
    job.finish()
    print(f"{recipe}: seconds after SIGKILL of a rank: " + ", ".join(f"{phase} {s:.2f}" for phase, s in parts.items()))
    assert len(parts) == len(looks)
    assert parts["a step, saved"] < 60
    assert job.final_state() == unbroken


def is_rank(pid, job_id):
    """Return whether a process is a rank of a job: it has imported torch, or will."""
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        is_python = b"python" in Path(os.fsdecode(words[0])).name.encode() and words[1].endswith(b"train.py")
        return is_python and f"SLURM_JOB_ID={job_id}" in Path(f"/proc/{pid}/environ").read_text().split("\0")
    return False


def started_at(pid):
    """Return when a process started, in seconds since 1970."""
    with contextlib.suppress(OSError):
        ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
        return time.time() - time.monotonic() + ticks / os.sysconf("SC_CLK_TCK")
    return 0.0


@pytest.mark.sweep
def test_a_lost_node_that_the_batch_script_was_on(slurm, submit, options, unbroken):
    """Slurm lets the job run on without a script, as it lets it run on without any other node."""
    job = submit("train", *options, ranks=2, environ={"WATCH_PAUSE_S": "1"})
    job.wait_for_training()
    lost = job.nodes[0]
    try:
        assert len(slurm.kill_node(lost)) >= 6, "slurmd, two shepherds, the script, two ranks"
        killed = time.monotonic()
        job.wait_for_restart(1)
        print(f"requeued {time.monotonic() - killed:.1f} s after the loss of the script")
        text = job.finish()
    finally:
        slurm.restart_node(lost)
    assert "the node of the batch script is lost" in text
    assert "exit code 137, to be requeued: " in text
    assert job.final_state() == unbroken
    assert job.decision["attempt"] == 2


@pytest.mark.feature("checkpoints.requeue", "slurm.requeue-cap", "complaints.requeue-once")
def test_a_rank_that_dies_at_each_start_has_three_attempts(submit, options, folder):
    path = folder / "runs" / "hpcdist-train" / "decision.json"
    job = submit("train", *options, environ={"PROBE_DIE_AFTER": str(path)})
    assert job.end(300) == ("FAILED", 76), job.log[-3000:]
    assert job.log.count("new run") <= 3
    assert job.log.count("inside the allocation") == 2
    assert job.n_restarts == 0
    told = job.decision
    assert (told["decision"], told["attempt"], told["attempts_without_progress"]) == ("stop", 3, 3)
    assert "not run again: attempt 3 in a row that died without progress" in job.log


@pytest.mark.feature("checkpoints.elastic-ranks", "slurm.end-on-a-rank-s-death")
@pytest.mark.sweep  # as after a kill under mpirun, in test_recipes.py
def test_a_node_on_which_ranks_die_is_left_out(submit, options, unbroken, folder):
    """In this allocation: it may be sick though it answers."""
    path = folder / "runs" / "hpcdist-train" / "decision.json"
    job = submit("train", *options, environ={"PROBE_DIE_AFTER": str(path), "PROBE_DIE_RANK": "1"})
    job.finish()
    assert (
        f"restart 1 inside the allocation, on {job.nodes[0]}; {job.nodes[1]} stays out until this allocation ends\n"
        in job.log
    )
    assert job.log.count("inside the allocation") == 1
    assert job.final_state() == unbroken


def test_a_cancelled_job_ends(slurm, submit, options):
    job = submit("train", *options)
    job.wait_for_training()
    slurm.client("scancel", job.id)
    assert job.end()[0] == "CANCELLED"
    time.sleep(8)  # a requeued job would have started by now
    assert (job.state, job.n_restarts) == ("CANCELLED", 0)
    assert job.decision["attempt"] == 1


@pytest.mark.sweep  # like the preemptions above, for the script
def test_a_preemption_that_cancels_is_one_that_requeues(slurm, submit, preempt, folder, options, unbroken):
    """PreemptMode=CANCEL: Slurm ends a job, but within the grace time the script has it requeued."""
    partition = "--partition=cancelled"
    job = submit("train", *options, sbatch=(partition,))
    plain = ("--parsable", partition, "--requeue", "--output=/dev/null", "--wrap", "sleep 600")
    other_job_id = slurm.client("sbatch", *plain, cwd=folder).strip()
    job.wait_for_training()
    told = preempt(job)
    slurm.wait_for("the end of the other job", lambda: slurm.fact(other_job_id, "JobState") == "PREEMPTED")
    assert (told["decision"], told["attempts_without_progress"]) == ("requeue", 0)
    job.finish()
    assert f"step-{told['step']:08d}-0001.h5" in job.log
    assert job.final_state() == unbroken


@pytest.mark.sweep
def test_of_two_jobs_in_one_run_folder_the_older_ends(submit, options, unbroken):
    """As when Slurm gives up a node that is alive, and starts the job again elsewhere."""
    shared = {"RUN_DIR": "runs/shared"}
    old = submit("train", *options, sbatch=("--job-name=old",), environ={**shared, "PROBE_PACE_S": "0.2"})
    old.wait_for_training()
    new = submit("train", *options, sbatch=("--job-name=new",), environ=shared)
    assert old.end() == ("FAILED", 76), old.log[-3000:]
    assert "expected attempt 1 to be the latest" in old.log
    assert "not run again: " in old.log
    new.finish()
    assert new.final_state() == unbroken
    assert (new.decision["attempt"], new.decision["job"], old.n_restarts) == (2, new.id, 0)


def test_a_job_that_cannot_stop_before_its_limit_is_requeued(submit, options, unbroken):
    """Slurm would end it as TIMEOUT, which it does not requeue. (It sends its signal at once in so short a job.)"""
    environ = {"PROBE_STUCK_AFTER": "60", "LIMIT_MARGIN_S": "25"}
    job = submit("train", *options, sbatch=("--time=1", "--signal=URG@1"), environ=environ)
    job.wait_for_training()
    job.wait_for_restart(1)
    assert "the time limit is near, and the program has not ended: requeued" in job.log
    job.finish(200)
    assert job.final_state() == unbroken
    assert job.decision["attempts_without_progress"] == 0


@pytest.mark.feature("slurm.signal-before-the-limit", "complaints.time-to-save")
@pytest.mark.sweep  # the limit: see above; a requeue is a SIGTERM, as a preemption
def test_out_of_time_and_requeued_by_hand(slurm, submit, options, unbroken):
    """Slurm sends USR1 to all ranks when the time is nearly over; a requeue is a SIGTERM.

    It looks at the time every 30 s: the training takes longer here.
    """
    job = submit("train", *options, environ={"PROBE_PACE_S": "0.2"})
    job.wait_for_training()
    slurm.client("scontrol", "update", f"JobId={job.id}", "TimeLimit=2")  # that is when --signal=USR1@120 is sent
    job.wait_for_restart(1)
    slurm.client("scontrol", "update", f"JobId={job.id}", "TimeLimit=60")
    assert job.decision["reason"].startswith("SIGUSR1 on rank ")
    assert "to be requeued: SIGUSR1 on rank " in job.log
    job.wait_for_training(2)
    slurm.client("scontrol", "requeue", job.id)
    job.wait_for_restart(2)
    job.finish()
    assert job.final_state() == unbroken
    assert job.decision["attempt"] == 3

"""One rank fails while the others are inside a collective: all ranks end, it is printed once, and nothing stays."""

import os
import re
import signal
import time

import pytest
from real_jobs import MPIRUN, PYTHON

#: How long a job may take to start, and to end once a rank has failed: a launcher alone would wait for ever.
START_S = 25
LIMIT_S = 15
#: MPICH's mpirun reports either the code of the rank that aborted, or that of a rank which it then killed.
KILLED_OTHERS = 9
SIZES = """
import time

import numpy as np

import hpcdist
from hpcdist.runtime.process import make_world

rank = make_world().rank
for _ in range(3):
    hpcdist.all_reduce(np.ones(4), implementation="BY")
if rank == 1:
    time.sleep(0.2)
hpcdist.all_reduce(np.ones(4 + 100 * rank), implementation="BY")
"""
PROGRAM = """
import os, signal, sys, threading, time
import numpy as np
import hpcdist

strategy = hpcdist.MultiWorkerMirroredStrategy()
rank = strategy.world.rank
hpcdist.all_reduce(np.ones(1))

def fail():
    {how}

if rank == 1:
    fail()
    {after}
while True:
    hpcdist.all_reduce(np.ones(1000))
"""
FAILURES = {
    "raise": ("raise ValueError('on purpose')", "", "ValueError: on purpose", 1),
    "sys.exit": ("sys.exit(3)", "", "in fail", 3),
    "sys.exit text": ("sys.exit('bye')", "", "in fail", 1),
    "SystemExit": ("raise SystemExit(3)", "", "left with a non-zero exit", 1),
    "exit": ("exit(3)", "", "in fail", 3),
    "os._exit": ("os._exit(3)", "", "", None),
    "killed": ("os.kill(os.getpid(), signal.SIGKILL)", "", "", None),
    "terminated": ("os.kill(os.getpid(), signal.SIGTERM)", "", "", None),
    "segmentation fault": ("import ctypes; ctypes.string_at(0)", "", "Fatal Python error: Segmentation fault", None),
    "thread": ("threading.Thread(target=lambda: 1 / 0).start()", "time.sleep(60)", "ZeroDivisionError", 1),
    "raise beside a thread": (
        "threading.Thread(target=time.sleep, args=(60,)).start(); raise ValueError('on purpose')",
        "",
        "ValueError: on purpose",
        1,
    ),
    "input": (
        "list(hpcdist.Dataset.from_tensor_slices(np.ones(3)).map(lambda x: 1 / 0).batch(1).prefetch(1))",
        "",
        "ZeroDivisionError",
        1,
    ),
    "file": ("hpcdist.Dataset.from_hdf5('missing.h5', 'x')", "", "expected an HDF5 file, got 'missing.h5'", 78),
    "configuration": ("raise hpcdist.compute_average_loss(np.float64(1))", "", "UsageError", 2),
}


QUICK = {"raise", "killed"}
LIKE_ANOTHER = {"sys.exit", "sys.exit text", "exit", "raise beside a thread", "input", "file"}


def marks_of(name):
    """Return the marks of a way to fail: a few are quick, and those that are much like another are a sweep."""
    if name in QUICK:
        return [pytest.mark.quick]
    if name in LIKE_ANOTHER:
        return [pytest.mark.sweep]
    return []


@pytest.mark.feature("tf.error-replica-stops", "debugging.exception-hook", "complaints.one-dead-rank")
@pytest.mark.parametrize("name", [pytest.param(name, marks=marks_of(name)) for name in FAILURES])
def test_the_job_ends(name, start, nothing_left, tmp_path):
    how, after, reason, code = FAILURES[name]
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(how=how, after=after))
    if name == "raise":
        n_ranks = 3
    else:
        n_ranks = 2
    job = start(n_ranks, program)
    outcome = job.wait(START_S + LIMIT_S)
    assert outcome.code != 0
    nothing_left(job)
    assert reason in outcome.output
    if code is not None:
        assert outcome.code in (code, KILLED_OTHERS)
        assert len(re.findall(r"hpcdist: rank 1 \(worker 1\) on ", outcome.output)) == 1
        assert len(re.findall(r"hpcdist: rank \d", outcome.output)) == 1
        assert outcome.output.count("Traceback") <= 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("implementation", "texts"),
    [
        ("AUTO", ["expected the same call on every rank, got sum of 4 float64 on rank 0, sum of 104 float64"]),
        ("MPI", ["expected the same call on every rank, float64 of ", "got all_reduce sum float64 of another size on"]),
    ],
)
def test_reductions_of_other_sizes_are_named(start, nothing_left, tmp_path, implementation, texts):
    """By MPI before the library sees them: MPICH would wait for ever, or end the process with 142."""
    program = tmp_path / "program.py"
    program.write_text(SIZES.replace("BY", implementation))
    job = start(2, program)
    outcome = job.wait(START_S + LIMIT_S)
    nothing_left(job)
    assert outcome.code in (76, KILLED_OTHERS), outcome.output
    for text in texts:
        assert text in outcome.output


GONE = re.compile(
    r"hpcdist: (rank \d) \(worker \d\), process \d+ on \S+, has ended without notice at \d\d:\d\d:\d\d\.\d{3}: "
)


@pytest.mark.feature("slurm.end-on-a-rank-s-death", "complaints.one-dead-rank")
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "how", [pytest.param("os._exit(0)", marks=pytest.mark.sweep), "os.kill(os.getpid(), signal.SIGKILL)"]
)
def test_a_rank_that_is_gone_is_named_and_the_job_ends_though_the_launcher_does_nothing(
    start, nothing_left, tmp_path, how
):
    """As srun does nothing by default; here it only ends what it has started, which are not the ranks. One that kills
    the others often does so before they can print."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(how=how, after=""))
    job = start(3, command=[MPIRUN, "-n", "3", "setsid", "--wait", PYTHON, program])
    job.process.wait(START_S)
    deadline = time.monotonic() + 45  # MPI's abort hangs for ten seconds where the launcher is gone
    while job.processes() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert GONE.findall(job.log.read_text()) == ["rank 1"], "the one that was first, and no other"
    nothing_left(job)


@pytest.mark.feature("semantics.health-check", "complaints.one-dead-rank")
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_killed_from_outside_while_it_is_in_a_collective(start, nothing_left, tmp_path, victim):
    """Both ranks do nothing but reduce 8 MB again and again: the signal finds the victim inside MPI."""
    program = tmp_path / "program.py"
    program.write_text(
        """
import os, pathlib, sys
import numpy as np
import hpcdist
strategy = hpcdist.MultiWorkerMirroredStrategy()
pathlib.Path(sys.argv[1], f"pid-{strategy.world.rank}").write_text(str(os.getpid()))
buffer = np.zeros(1 << 20)
while True:
    hpcdist.all_reduce(buffer)
"""
    )
    (tmp_path / "pids").mkdir()
    job = start(2, program, tmp_path / "pids")
    deadline = time.monotonic() + 30
    while len(list((tmp_path / "pids").iterdir())) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(0.5)
    os.kill(int((tmp_path / "pids" / f"pid-{victim}").read_text()), signal.SIGKILL)
    assert job.wait(LIMIT_S).code != 0
    nothing_left(job)


def run(start, tmp_path, text, n_ranks=2, first=""):
    program = tmp_path / "program.py"
    program.write_text(first + "import sys, time\nimport numpy as np\nimport hpcdist\n" + text)
    job = start(n_ranks, program)
    return job, job.wait(40)


WORLD = "strategy = hpcdist.MultiWorkerMirroredStrategy()\nrank = strategy.world.rank\n"


@pytest.mark.feature("debugging.exception-hook")
def test_all_ranks_raise_and_it_is_printed_once(start, nothing_left, tmp_path):
    job, outcome = run(start, tmp_path, WORLD + "raise ValueError('on purpose')")
    assert outcome.code in (1, KILLED_OTHERS)
    assert outcome.output.count("ValueError: on purpose") == 1
    assert "hpcdist: rank 0 (worker 0) on " in outcome.output
    nothing_left(job)


@pytest.mark.parametrize("leave", ["sys.exit(75)", "raise SystemExit(75)"])
def test_all_ranks_leave_together_with_their_code(start, nothing_left, tmp_path, leave):
    job, outcome = run(start, tmp_path, WORLD + leave)
    assert outcome.code == 75
    assert "hpcdist:" not in outcome.output
    nothing_left(job)


def test_who_is_terminated_after_all_have_left_keeps_its_code(start, tmp_path):
    """srun --kill-on-bad-exit does so to the slower ones, as soon as the first has ended."""
    late = "import atexit, os, signal\natexit.register(lambda: os.kill(os.getpid(), signal.SIGTERM))\n"
    _, outcome = run(start, tmp_path, WORLD + "sys.exit(75)", first=late)
    assert outcome.code == 75


def test_what_is_caught_ends_nothing(start, tmp_path):
    caught = """
for act in (lambda: 1 / 0, lambda: sys.exit(3), lambda: exit(4)):
    try:
        act()
    except (ZeroDivisionError, SystemExit) as error:
        code = getattr(error, "code", None)
        print(f"caught {code}\\n", end="")  # in one piece, or that of the other rank comes between
"""
    _, outcome = run(start, tmp_path, WORLD + caught)
    assert outcome.code == 0, outcome.output
    assert outcome.output.count("caught 3") == 2
    assert "hpcdist:" not in outcome.output


@pytest.mark.parametrize("leave", ["", pytest.param("raise SystemExit(0)", marks=pytest.mark.sweep)])
def test_a_rank_that_is_done_waits_for_one_that_saves(start, tmp_path, leave):
    """The chief is busy for longer than a failing rank would wait: leaving early with success must not end it."""
    text = WORLD + f"if rank == 0:\n    time.sleep(6)\n    print('saved')\n{leave}"
    _, outcome = run(start, tmp_path, text)
    assert outcome.code == 0, outcome.output
    assert "saved" in outcome.output


def test_a_thread_that_exits_ends_only_itself(start, tmp_path):
    text = (
        "import threading\n"
        + WORLD
        + """
thread = threading.Thread(target=sys.exit, args=(3,))
thread.start()
thread.join()
hpcdist.all_reduce(np.ones(1))
"""
    )
    _, outcome = run(start, tmp_path, text)
    assert outcome.code == 0, outcome.output
    assert outcome.output == ""


def test_an_error_of_the_workers_is_printed_also_beside_an_evaluator(start, tmp_path):
    (tmp_path / "file").write_text("")
    text = f"""
strategy = hpcdist.MultiWorkerMirroredStrategy(hpcdist.MPIClusterResolver("evaluator:1,worker:*"))
if strategy.cluster_resolver.task_type == "worker":
    hpcdist.CheckpointManager(hpcdist.Checkpoint(strategy=strategy), {str(tmp_path / "file" / "below")!r}).save(1)
time.sleep(30)
"""
    _, outcome = run(start, tmp_path, text, n_ranks=3)
    assert outcome.code in (74, KILLED_OTHERS)
    assert outcome.output.count("expected a folder that can be") == 1


@pytest.mark.parametrize("stream", ["sys.stdout", "open('/dev/full', 'w')", "None"])
def test_a_forked_child_is_not_the_rank(start, tmp_path, stream):
    """Also one whose output cannot be written."""
    text = (
        WORLD
        + f"""
import os
child = os.fork()
if child == 0:
    sys.stdout = {stream}
    print("in the child")
    if rank == 1:
        raise ValueError("in the child")
    sys.exit(3)
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print(f"child left with {{code}}\\n", end="")
hpcdist.all_reduce(np.ones(1))
"""
    )
    _, outcome = run(start, tmp_path, text)
    assert outcome.code == 0, outcome.output
    assert "child left with 3" in outcome.output
    assert "child left with 1" in outcome.output
    assert "hpcdist:" not in outcome.output


def test_a_single_process_leaves_with_the_code_of_our_error(start, tmp_path):
    _, outcome = run(start, tmp_path, "hpcdist.Dataset.from_tensor_slices(())", n_ranks=1)
    assert outcome.code == 1  # nothing was started: Python's own
    _, outcome = run(start, tmp_path, WORLD + "hpcdist.Dataset.from_tensor_slices(())", n_ranks=1)
    assert outcome.code == 78
    assert outcome.output.count("Traceback") == 1


def test_a_single_process_fails_as_python_does(start, tmp_path):
    _, outcome = run(start, tmp_path, WORLD + "raise ValueError('on purpose')", n_ranks=1)
    assert outcome.code == 1
    assert outcome.output.count("Traceback") == 1
    assert "hpcdist:" not in outcome.output


@pytest.mark.feature("debugging.exception-hook")
def test_the_step_is_named(start, tmp_path):
    text = (
        WORLD
        + """
import torch
with strategy.scope():
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    hpcdist.compute_average_loss(model(torch.ones(2, 1))).backward()
    optimizer.step()
    if rank == 1 and step == 2:
        raise ValueError("on purpose")
"""
    )
    _, outcome = run(start, tmp_path, text)
    assert "hpcdist: rank 1 (worker 1) at step 3 on " in outcome.output


BESIDE_TORCH_DISTRIBUTED = (
    WORLD
    + """
import torch.distributed
meeting = "file://" + MEETING
torch.distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=strategy.world.size)
error = hpcdist.errors.UsageError("on purpose")
HOW
while True:
    hpcdist.all_reduce(np.ones(1000))
"""
)


@pytest.mark.parametrize(
    ("n_ranks", "how", "code", "n_tracebacks"),
    [
        (2, "if rank == 1: raise ValueError('on purpose')", 1, 1),
        (2, "strategy.world.agree(error if rank == 1 else None)", 2, 0),
        (1, "raise error", 2, 1),
    ],
    ids=["one rank", "agreed", "single process"],
)
def test_the_reason_is_printed_beside_torch_distributed(start, tmp_path, n_ranks, how, code, n_tracebacks):
    """Its process group puts an exception hook around ours, and prints only when ours has returned."""
    text = BESIDE_TORCH_DISTRIBUTED.replace("MEETING", repr(str(tmp_path / "meeting"))).replace("HOW", how)
    _, outcome = run(start, tmp_path, text, n_ranks)
    assert outcome.code in (code, KILLED_OTHERS)
    assert len(re.findall(r"^(?:hpcdist: |[\w.]+Error: )+on purpose", outcome.output, re.MULTILINE)) == 1, (
        outcome.output
    )
    assert outcome.output.count("Traceback") == n_tracebacks


OPEN_FILE = """
import sys
import hpcdist
hpcdist.MultiWorkerMirroredStrategy()
out = open(sys.argv[1] + "-open", "w")
out.write("all of it")
"""


def test_a_file_that_the_program_leaves_open_is_written(start, tmp_path):
    """Python closes what a program's globals hold, as long as nobody else holds these."""
    assert start(2, "-c", OPEN_FILE, tmp_path / "left").wait(40).code == 0
    assert [path.read_text() for path in tmp_path.glob("left-*")] == ["all of it"]

"""One rank stops coming to collectives: the others say so, then end the job with everybody's stack."""

import os
import re
import signal
import time

import pytest

LIMIT_S = 2.0
WARN_S = LIMIT_S / 2
PROGRAM = """
import itertools, os, pathlib, signal, sys, time
import numpy as np
import hpcdist
from hpcdist.runtime.process import make_world

folder, rank = pathlib.Path(sys.argv[1]), make_world().rank
if ALONE:
    from made_up_hosts import group_on
    from hpcdist.collectives import calls
    from hpcdist.collectives import group
    lonely = group_on("1 each", make_world().role_comm, make_world())
    calls.group_of = lambda comm=None: lonely

def reduce(n_elements):
    hpcdist.all_reduce(np.ones(n_elements))

def stay_away():
    (folder / "away").write_text(str(os.getpid()))
    HOW

for number in range(70):
    reduce(number)
if rank == 1:
    stay_away()
if rank == 2:
    time.sleep(LATE_S)
while True:
    reduce(100)
    time.sleep(0.001)
"""
SLEEPS = "time.sleep(1000)"
HOLDS_THE_INTERPRETER = "max(itertools.repeat(0))"
STOPS = "os.kill(os.getpid(), signal.SIGSTOP)"


def run(start, root, tmp_path, how, is_alone=False, late_s=0.0):
    text = PROGRAM.replace("HOW", how).replace("ALONE", str(is_alone)).replace("LATE_S", str(late_s))
    (tmp_path / "shared").mkdir()
    return begin(start, root, tmp_path, text, tmp_path / "shared")


def begin(start, root, tmp_path, text, *arguments):
    program = tmp_path / "program.py"
    program.write_text(text)
    python_path = os.pathsep.join(filter(None, [str(root / "tests" / "support"), os.environ.get("PYTHONPATH")]))
    return start(3, program, *arguments, environ={"HPCDIST_TIMEOUT_S": str(LIMIT_S), "PYTHONPATH": python_path})


def away_at(tmp_path, job):
    """Return when, in seconds of the job, the odd rank stayed away."""
    return (tmp_path / "shared" / "away").stat().st_mtime - (time.time() - (time.monotonic() - job.started))


def check_end(job, tmp_path):
    outcome = job.wait(40)
    assert outcome.seconds - away_at(tmp_path, job) < LIMIT_S + 15
    assert outcome.code != 0
    return outcome.output


def report_of(output, rank, beginning):
    """Return the one report of a rank, which begins like this."""
    reports = re.findall(
        rf"^hpcdist: rank {rank} \(worker {rank}\): {beginning}.*\n((?:(?!hpcdist:).*\n)*)", output, re.MULTILINE
    )
    assert len(reports) == 1, output
    return reports[0]


def check_collectives(report, last):
    """The last 64 collectives are there, and no more; the 71st is the one that hangs."""
    numbers = list(map(int, re.findall(r"^ +(\d+)  all_reduce sum float64 x \d+  ", report, re.MULTILINE)))
    assert numbers == list(range(last - 63, last + 1))
    assert re.search(r"^ +70  all_reduce sum float64 x 69  [\d.]+ ms$", report, re.MULTILINE)


ENDS = "(?:the limit; ending the job|another rank of this node is ending the job)"


def check_waiting(
    output, rank, entered="(not entered|entered by every|nothing is known of other ranks)", how_it_ends=ENDS
):
    """A waiting rank warned once, then reported what it waits for, its collectives and its stack once."""
    head = r"collective 71, all_reduce sum float64 x 100, has taken [\d.]+ s"
    report = report_of(output, rank, rf"{head}[,;] {how_it_ends}")
    check_collectives(report, 71)
    assert re.search(r"^ +71  all_reduce sum float64 x 100  running for ", report, re.MULTILINE)
    assert len(re.findall(r"program\.py:\d+ in reduce", report)) == 1
    report_of(output, rank, rf"{head}, {entered}")


@pytest.mark.feature(
    "tf.other-calls-another",
    "debugging.stall-detection",
    "debugging.hang-report",
    "debugging.log-of-calls",
    "complaints.stalled-collective",
    "complaints.save-under-if-chief",
)
@pytest.mark.quick
def test_every_rank_of_the_node_reports(start, nothing_left, root, tmp_path):
    """One sleeps elsewhere, one waits since the limit, one waits but not for so long: it came later."""
    job = run(start, root, tmp_path, SLEEPS, late_s=0.6 * WARN_S)
    output = check_end(job, tmp_path)
    pid = (tmp_path / "shared" / "away").read_text()
    missing = rf"not entered by rank 1 \(worker 1\) of this node; the job ends when it has taken {LIMIT_S:g} s"
    advice = rf"; look at that rank: py-spy dump --pid {pid}\."
    check_waiting(output, 0, missing + advice, "the limit; ending the job")
    check_waiting(output, 2, missing + advice, "another rank of this node is ending the job")
    culprit = report_of(
        output, 1, r"in no collective for [\d.]+ s, after 70 of them; another rank of this node is ending"
    )
    check_collectives(culprit, 70)
    assert len(re.findall(r"program\.py:\d+ in stay_away", culprit)) == 1
    nothing_left(job)


@pytest.mark.feature("debugging.hang-report")
def test_a_rank_that_holds_the_interpreter_lock_is_shown(start, nothing_left, root, tmp_path):
    job = run(start, root, tmp_path, HOLDS_THE_INTERPRETER)
    output = check_end(job, tmp_path)
    pid = (tmp_path / "shared" / "away").read_text()
    assert output.count(f"hpcdist: rank 1 (worker 1), process {pid}, is here:") == 1
    assert len(re.findall(r'File ".*program\.py", line \d+ in stay_away', output)) == 1
    assert output.count("It has entered 70 collectives.") == 1
    nothing_left(job)


@pytest.mark.feature("debugging.stall-detection")
def test_a_rank_that_is_stopped_is_named(start, nothing_left, root, tmp_path):
    job = run(start, root, tmp_path, STOPS)
    output = check_end(job, tmp_path)
    assert "hpcdist: rank 1 (worker 1), process " in output
    assert "is stopped by a signal; kill -CONT resumes it" in output
    nothing_left(job)


@pytest.mark.feature("complaints.stalled-collective")
def test_a_rank_that_hangs_alone_on_its_node_shows_itself(start, nothing_left, root, tmp_path):
    """Every rank has a host of its own: nobody can ask it."""
    job = run(start, root, tmp_path, SLEEPS, is_alone=True)
    output = check_end(job, tmp_path)
    check_waiting(output, 0)
    check_waiting(output, 2)
    report = report_of(output, 1, rf"in no collective for {LIMIT_S:g} s, a problem only if others wait for this rank")
    assert len(re.findall(r"program\.py:\d+ in stay_away", report)) == 1
    nothing_left(job)


@pytest.mark.parametrize("how", ["sys.exit(0)", "raise SystemExit(0)"])
def test_a_rank_that_has_left_its_program_is_said_to_have(start, nothing_left, root, tmp_path, how):
    job = run(start, root, tmp_path, how)
    output = check_end(job, tmp_path)
    missing = r"not entered by rank 1 \(worker 1\) \(which has left its program\) of this node"
    check_waiting(output, 0, missing + ".*; let every rank call the same collectives")
    assert len(re.findall(f"the limit; ending the job; {missing}", output)) >= 1
    check_collectives(report_of(output, 1, "has left its program after 70 collectives"), 70)
    nothing_left(job)


BUSY = """
import sys, time
import numpy as np
import hpcdist
from hpcdist.runtime.process import make_world
for number in range(3):
    hpcdist.all_reduce(np.ones(number))
if make_world().rank == int(sys.argv[1]):
    time.sleep(float(sys.argv[2]))
"""


@pytest.mark.feature("complaints.long-work-on-one-rank")
@pytest.mark.parametrize("busy", [0, 1])
def test_a_rank_that_works_on_while_others_are_done_is_no_fault(start, root, tmp_path, busy):
    """As in a long last evaluation: nothing is reported, of it or of those that wait at their exit."""
    outcome = begin(start, root, tmp_path, BUSY, busy, 2 * LIMIT_S).wait(40)
    assert outcome.code == 0, outcome.output
    assert outcome.output == ""


THREADS = """
import time
import numpy as np
import hpcdist
from hpcdist.runtime.process import make_world
hpcdist.all_reduce(np.ones(5))
handle = hpcdist.all_reduce_async(np.ones(6))
if make_world().rank == 1:
    time.sleep(1000)
hpcdist.all_reduce(np.ones(7))
"""


BROADCAST = """
import time
import torch
import hpcdist
from hpcdist.collectives import library
strategy = hpcdist.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = torch.nn.Linear(3, 2)
if strategy.is_chief:
    library.broadcast = lambda *arguments: time.sleep(1000)
model(torch.ones(1, 3))
"""


def test_a_chief_that_hangs_while_a_model_is_made_equal_is_seen(start, nothing_left, root, tmp_path):
    job = begin(start, root, tmp_path, BROADCAST)
    outcome = job.wait(40)
    assert outcome.code != 0
    for rank in range(3):
        report_of(outcome.output, rank, rf"collective 1, broadcast float32 x 6, has taken [\d.]+ s[,;] {ENDS}")
    nothing_left(job)


@pytest.mark.feature("debugging.hang-report")
def test_the_collectives_of_all_threads_are_reported(start, root, tmp_path):
    outcome = begin(start, root, tmp_path, THREADS).wait(40)
    assert outcome.code != 0
    report = report_of(outcome.output, 1, "in no collective for")
    of_main_thread, of_thread = report.split("last collectives of another thread:\n")
    assert " 1  all_reduce sum float64 x 5  " in of_main_thread
    assert " 1  all_reduce sum float64 x 6  " in of_thread


def test_a_job_that_was_paused_and_continues_is_not_late(start, root, tmp_path):
    """As a batch system does that suspends jobs: rank 1 comes back in time, as this job counts time."""
    job = run(start, root, tmp_path, "time.sleep(1)")
    deadline = time.monotonic() + 30
    while not (tmp_path / "shared" / "away").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    time.sleep(0.3)
    for sign in (signal.SIGSTOP, signal.SIGCONT):
        for pid in job.ranks():
            os.kill(pid, sign)
        if sign == signal.SIGSTOP:
            pause_s = 2 * LIMIT_S
        else:
            pause_s = LIMIT_S
        time.sleep(pause_s)
    assert job.process.poll() is None, job.log.read_text()
    assert "ending the job" not in job.log.read_text()


CHECKED = """
import sys
import numpy as np
import hpcdist
from hpcdist.diagnostics.call_check import CallCheck
from hpcdist.runtime.process import make_world

world = make_world()
checks = CallCheck(world.comm, world) if "collectives" in world.debug else None

def reduce(op, n_elements, dtype="float64"):
    if checks is not None:
        checks.check(f"all_reduce {op}", dtype, n_elements, site=f"{__file__}:{sys._getframe(1).f_lineno}")
    hpcdist.all_reduce(np.ones(n_elements, dtype), op)

for number in range(5):
    reduce("sum", 8)
if world.rank == 1:
    ODD
else:
    reduce("sum", 8); reduce("max", 8)
reduce("sum", 8)
"""
ODD = {
    "count": ('reduce("sum", 9); reduce("max", 8)', 6, "all_reduce sum float64 x 9"),
    "dtype": ('reduce("sum", 8, "float32"); reduce("max", 8)', 6, "all_reduce sum float32 x 8"),
    "order": ('reduce("max", 8); reduce("sum", 8)', 6, "all_reduce max float64 x 8"),
    "number": ("pass", 6, "all_reduce sum float64 x 8"),
}


@pytest.mark.feature("debugging.mismatch-detection")
@pytest.mark.parametrize("name", ODD)
def test_the_odd_rank_is_named_under_debug(start, nothing_left, tmp_path, name):
    odd, number, call = ODD[name]
    program = tmp_path / "program.py"
    program.write_text(CHECKED.replace("ODD", odd))
    job = start(3, program, environ={"HPCDIST_DEBUG": "collectives"})
    outcome = job.wait(40)
    assert outcome.code == 76, outcome.output
    expected = (
        rf"hpcdist: collective {number}: expected all_reduce sum float64 x 8 at \S*program\.py:\d+ as on 2 of 3 ranks, "
    )
    call_pattern = rf"got {call} at \S*program\.py:\d+ on rank 1 \(worker 1\); "
    assert len(re.findall(expected + call_pattern, outcome.output)) == 1, outcome.output
    assert "Traceback" not in outcome.output
    nothing_left(job)


def test_the_rank_that_left_early_is_named_under_debug(start, nothing_left, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(CHECKED.replace("ODD", "sys.exit(0)"))
    job = start(3, program, environ={"HPCDIST_DEBUG": "collectives", "HPCDIST_TIMEOUT_S": "1"})
    outcome = job.wait(40)
    assert outcome.code != 0
    assert "collective 6: expected every rank within 1 s for all_reduce sum float64 x 8 at " in outcome.output
    assert "got no answer from rank 1 (worker 1); look whether" in outcome.output
    nothing_left(job)


APART = """
import sys
import numpy as np
import torch
import hpcdist

strategy = hpcdist.MultiWorkerMirroredStrategy(gradient_op="mean")
with strategy.scope():
    model = torch.nn.Linear(2, 1)
manager = hpcdist.CheckpointManager(hpcdist.Checkpoint(model=model, strategy=strategy), sys.argv[1])
model(torch.ones(1, 2)).mean().backward()
if strategy.is_chief:
    CHIEFS
model(torch.ones(1, 2)).mean().backward()
hpcdist.all_reduce(np.ones(3))
"""


@pytest.mark.feature("debugging.mismatch-detection", "complaints.save-under-if-chief")
@pytest.mark.parametrize(
    ("chiefs", "chief_call"),
    [
        ("manager.save(1)", "save"),
        pytest.param("hpcdist.all_gather(np.ones((1, 3)))", "all_gather", marks=pytest.mark.sweep),
    ],
)
def test_a_call_of_the_chief_alone_is_noticed_in_seconds(start, nothing_left, tmp_path, chiefs, chief_call):
    """As a save under `if is_chief`: the others go on to their next sum."""
    program = tmp_path / "program.py"
    program.write_text(APART.replace("CHIEFS", chiefs))
    job = start(3, program, tmp_path / "checkpoints")
    started = time.monotonic()
    outcome = job.wait(40)
    assert outcome.code == 70, outcome.output
    assert time.monotonic() - started < 25
    match = re.search(r"while (.*): let every rank make the same calls; save is one", outcome.output)
    assert match, outcome.output
    chief = report_of(outcome.output, 0, rf"collective \d+, {chief_call} ")
    assert f"{chief_call} any x 0" in chief
    nothing_left(job)


STUCK_IN_ABORT = """
import itertools
from types import SimpleNamespace
from hpcdist.runtime import job_end as abort
abort.ABORT_LIMIT_S = 0.5
abort.end_job(SimpleNamespace(Abort=lambda code: max(itertools.repeat(0))), "the report\\n", 70)
"""


def test_a_process_that_is_stuck_in_abort_ends_itself(start, tmp_path):
    """Stuck with the interpreter lock in its hands, as mpi4py does not give it back for Abort."""
    program = tmp_path / "program.py"
    program.write_text(STUCK_IN_ABORT)
    outcome = start(1, program).wait(20)
    assert outcome.code != 0
    assert outcome.output.startswith("the report\n")
    assert "line 6 in <lambda>" in outcome.output


NEVER_COMES = """
import sys, time
import hpcdist, hpcdist.runtime.mpi
hpcdist.runtime.mpi.MIN_START_S = 2.0
if sys.argv[1] == "to a second world":
    hpcdist.MultiWorkerMirroredStrategy()
if hpcdist.runtime.mpi.MPI.COMM_WORLD.rank == 1:
    time.sleep(10)
hpcdist.MultiWorkerMirroredStrategy(hpcdist.SimpleClusterResolver(hpcdist.ClusterSpec({})))
"""


@pytest.mark.feature("complaints.hang-at-the-start")
@pytest.mark.parametrize("where", ["to the first world", "to a second world"])
def test_a_rank_that_does_not_come_is_not_waited_for_for_ever(start, tmp_path, where):
    """Nor where MPICH's mpirun leaves the late rank alone, as was seen once in 90 times: it then ends itself."""
    outcome = start(2, "-c", NEVER_COMES, where, environ={"HPCDIST_TIMEOUT_S": "2"}).wait(30)
    assert outcome.code in (70, 9)
    assert "world: expected every rank within 2 s, got no answer from some ranks on rank 0" in outcome.output


NEVER_STARTS = """
import faulthandler, os, signal
if int(os.environ["PMI_RANK"]) == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
dump_later = faulthandler.dump_traceback_later
def soon(limit_s, **options):
    print(f"limit {limit_s:g} s", flush=True)
    dump_later(limit_s / 30, **options)
faulthandler.dump_traceback_later = soon
import hpcdist
hpcdist.all_reduce([1.0])
"""


@pytest.mark.feature("complaints.hang-at-the-start")
def test_a_rank_that_does_not_start_mpi_is_not_waited_for_for_ever(start, root, tmp_path):
    """Before MPI has started no rank can ask another: each ends itself."""
    outcome = begin(start, root, tmp_path, NEVER_STARTS).wait(30)
    assert outcome.code != 0
    assert "_start_with_all_ranks" in outcome.output
    assert "limit 60 s" in outcome.output, "starting takes longer than a collective"
    assert "Timeout (0:00:02" in outcome.output


UNEVEN = """
import time
import torch
import hpcdist

strategy = hpcdist.MultiWorkerMirroredStrategy(num_replicas=5, gradient_op="mean")
with strategy.scope():
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def step():
    if strategy.is_chief:
        time.sleep(LATE_S)
    optimizer.zero_grad()
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()

for _ in range(2):
    strategy.run(step)
print("trained")
"""


@pytest.mark.parametrize(
    ("late_s", "environ"),
    [
        pytest.param(2.5, {}, id="late", marks=pytest.mark.sweep),
        pytest.param(0.0, {"HPCDIST_DEBUG": "collectives"}, id="compared"),
    ],
)
def test_ranks_with_other_numbers_of_replicas_are_in_the_same_collectives(start, tmp_path, late_s, environ):
    """A rank that is in another call than the one it waits for would end the job after 3 s."""
    program = tmp_path / "program.py"
    program.write_text(UNEVEN.replace("LATE_S", str(late_s)))
    outcome = start(3, program, environ=environ).wait(60)
    assert outcome.code == 0, outcome.output
    assert outcome.output.count("trained") == 3

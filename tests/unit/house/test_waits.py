"""Every wait has a bound. Read from the source: each call that may block is of a kind whose bound is known.

A new kind of wait fails here until its bound is written down.
"""

import ast
import re
from pathlib import Path

import pytest

import hpcdist

SOURCE = Path(hpcdist.__file__).parent
#: Names of methods and functions that may block until another thread, process or rank acts.
BLOCKING = {
    *("wait", "wait_until", "join", "result", "communicate", "sigtimedwait"),
    *("Wait", "Waitall", "Recv", "recv", "Barrier", "barrier", "Bcast", "bcast", "Gather", "gather"),
    *("allgather", "Allgather", "Allgatherv", "Allreduce", "allreduce", "Split", "Split_type", "Dup", "Create_group"),
}
#: What a call looks like, as FILE FUNCTION: CALL -> when it ends.
BOUNDS = {
    r": .*\bwait_until\(": "after its timeout argument; a process that is suspended does not count the time",
    r": (self\._?)?(group|_group|world|_world|self)\.wait\(\[?.*\b(I[a-z]+|request|sends|_requests)": (
        "HPCDIST_TIMEOUT_S, then the job ends: Group.wait and World.wait"
    ),
    r"hosts\.py __init__: wait\(": "HPCDIST_TIMEOUT_S: it is World.wait",
    r"\b(barrier|_barrier|node)\.wait\(": "HPCDIST_TIMEOUT_S: the barrier in shared memory",
    r"(shares|_shares|_memory|self)\.wait\(\)": "HPCDIST_TIMEOUT_S: a barrier, or the saver's agreements",
    r"(manager|_manager|saver|_saver)\.wait\(": "HPCDIST_TIMEOUT_S without a block written: Saver.wait",
    r"\.wait\((for_s|timeout_s|limit_s|pause_s|self\._interval_s|.*, ?[a-z_.]*_s|max\(.*|0|1\.0|.*_S)\)": (
        "its argument"
    ),
    r": wait\(.*(_S|_s|_s\)|0|1\.0)\)": "its argument",
    r"\.join\((timeout_s|_WRITE_S|[A-Z_]+_S)\)": "its argument",
    r"communicator\.wait\(\)": "NCCL's own timeout, which the group sets",
    r"joining\.wait\(limit_s\)": "its argument",
    r"comm\.(Dup|Split|Split_type|Create_group)\(|COMM_WORLD\.(Dup|Barrier)\(|given\.Dup": (
        "right after an agreement or a bounded barrier: all ranks have come"
    ),
    r"(comm|node)\.([a-z]*gather|bcast|allreduce|Bcast|Gather|Allgather|Allreduce|Barrier)\(": (
        "likewise; the watchdog ends the job HPCDIST_TIMEOUT_S after the first rank has come"
    ),
    r"comm\.[Rr]ecv\(.*(status|tag=tag|_FAILED_TAG|_REQUEST_TAG|_REPLY_TAG)": "at once: a probe has found the message",
    r"mpi_store\.py _ask_holder: request\.wait\(\)": "at once: its answer has come",
    r"mpi_store\.py get: self\.wait\(\[key\]\)": "the timeout of the store",
    r"cli/probe\.py": "the limit of `hpcdist doctor`, which ends the job that it has started",
    r"(cli/run|notebook)\.py _launch: process\.wait\(\)": "with the user's own job, which signals end",
    r"notebook\.py _launch: process\.communicate\(timeout=_END_S\)": "its argument",
    r"(look|called|answer|done|durable|expected|recording|appending)\.result\(\)": (
        "at once: it was done, or was waited for with a limit"
    ),
    r"\.result\(timeout_s\)": "its argument",
    r"image\.py put_all: future\.result\(\)": "with copies in memory, of threads that wait for nothing",
    r"runtime/handle\.py wait: self\._future\.result\(\)": "with a sum in the background, which Group.wait bounds",
    r"(gradients/.*: (self|handle|result|buckets|hooked_sum)|torch_backend/ranks\.py wait: self\._handle)\.wait\(": (
        "with sums, which Group.wait bounds: Handle.wait"
    ),
    r"scheduler\.py|_scheduler\.barrier\(": "with the steps of this process's replicas, each in a thread of its own",
    r"store\.wait\(.*timedelta": "its argument",
    r"dispatch\.py stop: self\._thread\.join\(\)": "HPCDIST_TIMEOUT_S: Dispatcher._run ends the job then",
    r"worker\.py __exit__: self\._thread\.join\(\)": "BEAT_S: the thread looks whether it is over",
    r"time_spent\.py|tf_compat/metrics\.py|training/compiled_module\.py": "no wait: a metric, or a counter",
    r": (sums|reducer|self\.checkpoint|self|model\.strategy|self\._ranks)\.(gather|allgather|barrier|recv)\(": (
        "with our own calls, which are bounded themselves"
    ),
}


def calls_that_block():
    """Yield FILE FUNCTION: CALL of each call that may block."""
    for path in sorted(SOURCE.rglob("*.py")):
        tree = ast.parse(path.read_text())
        for function in ast.walk(tree):
            if not isinstance(function, ast.FunctionDef):
                continue
            for node in ast.walk(function):
                if isinstance(node, ast.Call) and name_of(node) in BLOCKING and not is_about_text(node):
                    yield f"{path.relative_to(SOURCE)} {function.name}: {ast.unparse(node)}"


def name_of(call):
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


def is_about_text(call):
    """Return whether it is the `join` of texts or paths, or the result of a metric."""
    receiver = ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""
    if name_of(call) == "join":
        return bool(call.args) and (receiver[:1] in "'\"bf" or receiver in ("os.path", "shlex", "posixpath"))
    return False


def bound_of(call):
    return next((bound for pattern, bound in BOUNDS.items() if re.search(pattern, call)), None)


def test_each_wait_has_a_bound():
    unbounded = sorted({call for call in calls_that_block() if bound_of(call) is None})
    assert unbounded == []


@pytest.mark.parametrize("pattern", BOUNDS)
def test_each_bound_is_of_a_wait_that_there_is(pattern):
    assert any(re.search(pattern, call) for call in calls_that_block())

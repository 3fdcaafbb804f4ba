"""The stacks of this process's threads and of other ranks of the node, even of one that hangs in C code.

A rank answers a signal by writing its stacks to an anonymous file, which the asking rank reads through /proc. Python's
fault handler needs no interpreter lock for that, so a rank that hangs while holding the lock answers too.
"""

import contextlib
import faulthandler
import fcntl
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

from hpcdist.runtime.processes import stat_fields

#: The signal that asks for stacks. Batch systems do not send it; the first real-time signals belong to C libraries.
SIGNAL = signal.SIGRTMAX - 2
_FILE_NAME = "hpcdist-stacks"
#: Time that a rank may take to write its stacks.
ANSWER_S = 1.0
#: State of a process in /proc -> why it cannot answer.
_STATES = {
    "T": "is stopped by a signal; kill -CONT resumes it",
    "t": "is stopped by a debugger",
    "D": "is in the kernel, in a wait that no signal ends: look at its disk or file system",
    "Z": "has died",
}
#: Descriptor of the file that this process writes its stacks to: one for all, as a signal has one handler.
_answers: int | None = None


class Peer(NamedTuple):
    """A rank of this node: its name in messages, and its process."""

    name: str
    pid: int


def process_namespace() -> int:
    """Return the number of the namespace that process ids are valid in: ranks may be in separate containers."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def answer_signal() -> None:
    """Let other ranks of this node ask this process for its stacks, from now on. Not collective; a second call is free.

    A handler of the program for the same signal stays in place.
    """
    global _answers
    if _answers is None and not _is_caught(os.getpid()):
        _answers = os.memfd_create(_FILE_NAME)
        faulthandler.register(SIGNAL, file=_answers, all_threads=True)


def own_stacks() -> str:
    """Return the stacks of this process's threads, the calling one left out. Reads no source: disks may hang."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    lines = []
    for ident, frame in sys._current_frames().items():
        if ident == threading.get_ident():
            continue
        thread_name = names.get(ident, ident)
        lines.append(f"thread {thread_name}, innermost call first:")
        caller = frame
        while caller is not None:
            code = caller.f_code
            lines.append(f"  {code.co_filename}:{caller.f_lineno} in {code.co_name}")
            caller = caller.f_back  # type: ignore[assignment]
    return "\n".join(lines)


def state_of(peer: Peer) -> str | None:
    """Return why a rank cannot answer: stopped, dead or stuck in the kernel; None when it can."""
    try:
        state = stat_fields(peer.pid)[0]
    except OSError:
        return _STATES["Z"]
    return _STATES.get(state)


def stacks_of(peer: Peer) -> str | None:
    """Return the stacks of another rank of this node, or why there are none; None when another rank has asked already.

    Not collective. Takes up to `ANSWER_S`. For a process that is about to end: what it opens stays open.
    """
    name = f"{peer.name}, process {peer.pid}"
    state = state_of(peer)
    if state:
        return f"{name}, {state}"
    path = _answers_of(peer.pid)
    if path is None or not _is_caught(peer.pid):
        return f"{name}, cannot be asked for its stacks; try py-spy dump --pid {peer.pid}"
    try:
        answers = os.open(path, os.O_RDONLY)  # stays open, and so locked, until this process ends
        fcntl.flock(answers, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.kill(peer.pid, SIGNAL)
    except BlockingIOError:
        return None
    except OSError:  # it has ended meanwhile
        return f"{name}, {_STATES['Z']}"
    text = _read_when_written(answers) or "it did not answer"
    return f"{name}, is here:\n{text}"


def _read_when_written(fd: int) -> str:
    """Return the content of a file once it has some and has stopped growing."""
    deadline = time.monotonic() + ANSWER_S
    size = 0
    while time.monotonic() < deadline:
        time.sleep(ANSWER_S / 20)
        previous = size
        size = os.fstat(fd).st_size
        if 0 < size == previous:
            break
    return os.pread(fd, size, 0).decode(errors="replace").rstrip()


def _answers_of(pid: int) -> str | None:
    """Return the path of the file that a process writes its stacks to. None if there is no such file."""
    folder = f"/proc/{pid}/fd"
    try:
        names = os.listdir(folder)
    except OSError:  # it has ended, or it is not ours to look at
        return None
    for name in names:
        path = f"{folder}/{name}"
        with contextlib.suppress(OSError):  # closed meanwhile
            if _FILE_NAME in os.readlink(path):
                return path
    return None


def _is_caught(pid: int) -> bool:
    """Return whether a process has a handler for the signal: without one, it would die of it."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    line = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
    caught_signals = int(line.split()[1], 16)
    return bool(caught_signals >> (SIGNAL - 1) & 1)

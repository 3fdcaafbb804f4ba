"""The stop flag: signals, a file, a function, a call; who had the signals before, and forked children."""

import errno
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from hpcdist.checkpoint.durable import Disk
from hpcdist.child_processes import STOP_SIGNALS
from hpcdist.errors import UsageError
from hpcdist.stopping import stop as stop_module
from hpcdist.stopping.stop import StopFlag, wrapper_of


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """Wait for the look at the stop file as long as it takes on a loaded machine, unless a test says otherwise."""
    monkeypatch.setattr(stop_module, "FILE_WAIT_S", 5.0)


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def earlier():
    """Return what signals called that a handler of the program's own had before; all are put back."""
    previous_handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    calls = []
    for number in STOP_SIGNALS:
        signal.signal(number, lambda number, frame: calls.append(number))
    yield calls
    for number, handler in previous_handlers.items():
        signal.signal(number, handler)


@pytest.mark.feature(
    "checkpoints.signals-set-a-flag", "slurm.signal-before-the-limit", "complaints.no-save-in-a-handler"
)
@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_raises_the_flag_and_calls_the_earlier_handler(earlier, number):
    flag = StopFlag("rank 3")
    flag.watch_signals()
    assert flag.find_request() is None
    signal.raise_signal(number)
    assert flag.find_request().reason == f"{number.name} on rank 3"
    assert earlier == [number]
    flag.close()


def test_the_first_reason_stays(earlier):
    flag = StopFlag("rank 0", clock=Clock())
    flag.watch_signals()
    signal.raise_signal(signal.SIGUSR2)
    signal.raise_signal(signal.SIGTERM)
    flag.ask("stop()")
    assert flag.find_request().reason == "SIGUSR2 on rank 0"
    assert flag.find_request().asked_at == 100.0
    flag.close()


def test_closing_gives_the_signals_back(earlier):
    flag = StopFlag("rank 0")
    before = signal.getsignal(signal.SIGUSR1)
    flag.watch_signals()
    assert signal.getsignal(signal.SIGUSR1) is not before
    later_handler = signal.signal(signal.SIGTERM, lambda number, frame: None) and signal.getsignal(signal.SIGTERM)
    flag.close()
    assert signal.getsignal(signal.SIGUSR1) is before
    assert signal.getsignal(signal.SIGTERM) is later_handler, "it was installed later, and is not ours to take away"
    signal.raise_signal(signal.SIGUSR1)
    assert flag.find_request() is None
    assert earlier == [signal.SIGUSR1]


def test_only_the_main_thread_can_watch_signals():
    errors = []

    def watch():
        try:
            StopFlag("rank 0").watch_signals()
        except UsageError as error:
            errors.append(str(error))

    thread = threading.Thread(target=watch, name="loader")
    thread.start()
    thread.join()
    assert "expected the main thread" in errors[0]
    assert "got loader" in errors[0]


def test_the_file_is_looked_for_at_most_every_two_seconds(tmp_path):
    clock = Clock()
    flag = StopFlag("rank 0", file=tmp_path / "stop", clock=clock)
    assert flag.find_request() is None
    (tmp_path / "stop").touch()
    clock.now += 1.9
    assert flag.find_request() is None
    clock.now += 0.2
    assert flag.find_request().reason == f"stop file {tmp_path / 'stop'}"
    flag.remove_file()
    assert not (tmp_path / "stop").exists()
    assert StopFlag("rank 0", file=tmp_path / "stop", clock=clock).find_request() is None


@pytest.mark.parametrize(
    ("text", "suffix"),
    [
        ("", ""),
        ("hpcdist stop\n", ""),
        ("hpcdist stop --for-good\n", ", for good"),
        ("stop, but not for good\n", ""),
        ("\udcff" * 3, ""),
    ],
)
def test_what_the_file_says(tmp_path, text, suffix):
    path = tmp_path / "stop"
    path.write_text(text, errors="surrogateescape")
    assert StopFlag("rank 0", file=path, clock=Clock()).find_request().reason == f"stop file {path}{suffix}"


@pytest.mark.parametrize("is_ignored", [False, True], ids=["a terminal that is gone", "under nohup"])
def test_the_end_of_a_terminal_is_a_request(is_ignored):
    if is_ignored:
        action = signal.SIG_IGN
    else:
        action = signal.SIG_DFL
    before = signal.signal(signal.SIGHUP, action)
    flag = StopFlag("rank 2")
    try:
        flag.watch_signals()
        os.kill(os.getpid(), signal.SIGHUP)
        if is_ignored:
            assert flag.find_request() is None
        else:
            assert flag.find_request().reason == "SIGHUP on rank 2"
    finally:
        flag.close()
        signal.signal(signal.SIGHUP, before)


def test_a_file_server_that_hangs_does_not_stop_training(tmp_path, monkeypatch, caplog):
    """It is asked from a thread, once at a time; that it does not answer is said once."""
    clock = Clock()
    check_started = threading.Event()
    answer = threading.Event()
    calls = []
    monkeypatch.setattr(stop_module, "FILE_WAIT_S", 0.001)

    def hang(path):
        calls.append(path)
        check_started.set()
        return answer.wait(60)

    flag = StopFlag("rank 0", file=tmp_path / "stop", clock=clock)
    with monkeypatch.context() as patch:
        patch.setattr(os.path, "exists", hang)
        started = time.monotonic()
        for _ in range(100):
            assert flag.find_request() is None
            clock.now += 1.0
        assert time.monotonic() - started < 30, "training waited for the answer"
        assert check_started.wait(30)
        assert flag.find_request() is None
        assert len(calls) == 1
        assert caplog.text.count(f"expected {tmp_path} to answer, got none for 60 s; training goes on") == 1
        answer.set()
        deadline = time.monotonic() + 30
        while flag.find_request() is None and time.monotonic() < deadline:
            time.sleep(0.01)
    assert flag.find_request().reason == f"stop file {tmp_path / 'stop'}"


def test_a_handler_of_a_signal_may_ask_while_its_thread_looks_for_the_file(tmp_path):
    """The thread holds the lock of the look then, and cannot give it back before the handler returns."""
    flag = StopFlag("rank 0", file=tmp_path / "stop", clock=Clock())
    asking = threading.Thread(target=flag.ask, args=["the program"], daemon=True)
    with flag._looking:
        asking.start()
        asking.join(10)
        assert not asking.is_alive()
    assert flag.find_request().reason == "the program on rank 0"


@pytest.mark.parametrize("code", [errno.ESTALE, errno.EIO, errno.EACCES], ids=lambda code: errno.errorcode[code])
def test_a_file_system_that_cannot_tell_ends_no_job(tmp_path, monkeypatch, code):
    """The chief looks in the middle of a sum: an error there would end all ranks."""
    clock = Clock()
    flag = StopFlag("rank 0", file=tmp_path / "stop", clock=clock)

    def fail(*arguments, **more):
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", fail)
        assert flag.find_request() is None
    (tmp_path / "stop").touch()
    clock.now += 2.1
    assert flag.find_request().reason == f"stop file {tmp_path / 'stop'}"


def test_a_stop_file_that_cannot_be_removed_is_reported(tmp_path):
    class ReadOnlyDisk(Disk):
        def remove(self, path):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    (tmp_path / "stop").touch()
    with pytest.raises(OSError, match="Read-only"):
        StopFlag("rank 0", file=tmp_path / "stop", disk=ReadOnlyDisk()).remove_file()
    StopFlag("rank 0", file=tmp_path / "other", disk=Disk()).remove_file()


def test_the_users_function_is_called_at_most_every_second():
    clock = Clock()
    calls = []

    def watch():
        calls.append(clock.now)
        return len(calls) == 2

    flag = StopFlag("rank 1", watcher=watch, clock=clock)
    for _ in range(5):
        assert flag.find_request() is None
    assert calls == [100.0]
    clock.now += 1.0
    assert flag.find_request().reason == "termination_watcher_fn on rank 1"


def test_a_call_from_any_thread():
    flag = StopFlag("rank 2")
    thread = threading.Thread(target=flag.ask, args=("loss is not finite",))
    thread.start()
    thread.join()
    assert flag.find_request().reason == "loss is not finite on rank 2"


FORK = """
import os, signal, sys
from hpcdist.stopping.stop import StopFlag, wrapper_of
signal.signal(signal.SIGUSR1, signal.SIG_IGN)
flag = StopFlag("rank 0")
flag.watch_signals()
signal.raise_signal(signal.SIGUSR2)
pid = os.fork()
if pid == 0:
    is_default = [signal.getsignal(number) == signal.SIG_DFL for number in (15, 10, 12)]
    if not all(is_default) or flag.find_request() is not None:
        os._exit(3)
    signal.raise_signal(signal.SIGTERM)
    os._exit(4)
_, status = os.waitpid(pid, 0)
assert flag.find_request().reason == "SIGUSR2 on rank 0", flag.find_request().reason
assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
print(os.WTERMSIG(status) if os.WIFSIGNALED(status) else -os.WEXITSTATUS(status))
"""


def test_a_forked_child_ends_when_it_is_asked_to():
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, timeout=60, env=os.environ)
    assert done.stdout.strip() == str(int(signal.SIGTERM)), done.stdout + done.stderr


def test_signals_that_come_while_python_ends_do_not_kill_it(tmp_path):
    """Python gives its handlers up before it is gone: what comes then would end the process with another code."""
    code = """
import os, signal, sys
from hpcdist.child_processes import STOP_SIGNALS
from hpcdist.stopping.stop import StopFlag, wrapper_of

class Late:
    def __del__(self):  # when modules are torn down, after handlers were given up
        for number in STOP_SIGNALS:
            os.kill(os.getpid(), number)

flag = StopFlag("rank 0")
flag.watch_signals()
flag.ignore_signals()
sys.modules["late"] = type(sys)("late")
sys.modules["late"].it = Late()
sys.exit(75)
"""
    done = subprocess.run([sys.executable, "-c", code], timeout=60, check=False)
    assert done.returncode == 75


def test_the_grace_counts_from_the_signal_not_from_the_next_look(earlier):
    clock = Clock()
    flag = StopFlag("rank 0", clock=clock)
    flag.watch_signals()
    clock.now = 105.0
    signal.raise_signal(signal.SIGTERM)
    clock.now = 130.0  # a long step
    assert flag.find_request().reason == "SIGTERM on rank 0"
    assert flag.find_request().asked_at == 105.0
    flag.close()


def test_a_job_in_the_background_keeps_ignoring_ctrl_c(earlier):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    flag = StopFlag("rank 0")
    flag.watch_signals()
    signal.raise_signal(signal.SIGINT)
    assert flag.find_request() is None
    flag.close()


CTRL_C = """
import signal, time
from hpcdist.stopping.stop import StopFlag, wrapper_of
flag = StopFlag("rank 0")
flag.watch_signals()
print("ready", flush=True)
while flag.find_request() is None:
    time.sleep(0.01)
print(flag.find_request().reason, flush=True)
time.sleep(60)
"""


def test_the_first_ctrl_c_asks_for_a_stop_and_the_second_ends_the_program():
    def in_the_foreground():
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # shells start jobs in the background without it

    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", CTRL_C], preexec_fn=in_the_foreground, **pipes) as program:
        assert program.stdout.readline() == "ready\n"
        program.send_signal(signal.SIGINT)
        assert program.stdout.readline() == "SIGINT on rank 0\n"
        program.send_signal(signal.SIGINT)
        try:
            _, errors = program.communicate(timeout=10)
        finally:
            program.kill()
    assert "hpcdist: Ctrl-C: saving and stopping after this step; press it again to end at once" in errors
    assert errors.rstrip().endswith("KeyboardInterrupt")
    assert program.returncode == -signal.SIGINT


NAMES_WRAPPER = "import os; from hpcdist.stopping.stop import wrapper_of; print(wrapper_of(os.getpid()))"


@pytest.mark.parametrize(
    ("script", "expected"), [("{}; true", "bash"), ("exec {}", "None"), ("sh -c '{}; true'", "sh")]
)
def test_a_wrapper_that_may_keep_signals_is_named(script, expected):
    program = script.format(f'{sys.executable} -c "{NAMES_WRAPPER}"')
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout == f"{expected}\n", done.stderr


def test_no_wrapper_is_known_of_a_process_that_has_ended():
    assert wrapper_of(2**22 + 1) is None

"""Python runs this before anything else where this folder is on PYTHONPATH: it lets tests look into the ranks of a job,
and end them, without a change to the job."""

import os
import signal
import threading
import time


def note_signals(path):
    """Write down when each signal arrives, from the moment that somebody handles it."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)

    def note():
        while True:
            (number,) = os.read(reading, 1)
            line = f"{time.time_ns()} {signal.Signals(number).name} {os.environ.get('SLURM_PROCID')}\n"
            with open(path, "a") as file:
                file.write(line)

    threading.Thread(target=note, daemon=True).start()


def die_after(path):
    """Kill this process once an attempt has written its decision."""
    if os.path.exists(path):
        seen = os.stat(path).st_mtime_ns
    else:
        seen = None

    def wait():
        while not os.path.exists(path) or os.stat(path).st_mtime_ns == seen:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()


def pace(seconds):
    """Let each optimizer step take so long, on fast machines too."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    register_optimizer_step_post_hook(lambda *_: time.sleep(seconds))


def get_stuck(n_steps):
    """Let the job's first start hang after some optimizer steps, whatever signals arrive."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    remaining_steps = [n_steps]

    def count(*_):
        remaining_steps[0] -= 1
        while remaining_steps[0] <= 0:
            time.sleep(1)

    if os.environ.get("SLURM_RESTART_COUNT", "0") == "0":
        register_optimizer_step_post_hook(count)


if "PROBE_STUCK_AFTER" in os.environ:
    get_stuck(int(os.environ["PROBE_STUCK_AFTER"]))
if "PROBE_PACE_S" in os.environ:
    pace(float(os.environ["PROBE_PACE_S"]))
if "PROBE_SIGNALS" in os.environ:
    note_signals(os.environ["PROBE_SIGNALS"])
if "PROBE_DIE_AFTER" in os.environ:
    last = str(int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) - 1)
    if os.environ.get("SLURM_PROCID") == os.environ.get("PROBE_DIE_RANK", last):
        die_after(os.environ["PROBE_DIE_AFTER"])

"""Kill a training before and after each of its operations on the disk, start it again, and compare.

Usage: kill_points.py FOLDER START PROGRAM EVERY: what is there at the start; which program saves (one that uses the
folder itself, or one with a handler, a manager and records); and whether every operation is taken, or every second,
third... Prints one line of JSON. It forks, and so starts no thread and no MPI itself. All points of all programs, the
power cuts and hostile files (`make crashes`) take five minutes on two idle cores.
"""

import itertools
import json
import logging
import os
import shutil
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from small_training import STARTS, Training, WatchedDisk, newest_saved

from hpcdist.checkpoint.store import Store


class KillingDisk(WatchedDisk):
    """Kills the process before or after its nth operation; tells which ones it began."""

    def __init__(self, nth, is_after, told):
        self.nth = nth
        self.is_after = is_after
        self.told = told
        self.n_calls = 0

    def watch(self, name, act, *arguments):
        self.n_calls += 1
        is_last = self.n_calls == self.nth
        if is_last:
            os.write(self.told, f"operation {name}\n".encode())
        if is_last and not self.is_after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = act(*arguments)
        if is_last:
            os.kill(os.getpid(), signal.SIGKILL)
        return result


def run_plain(path, disk, tell):
    Training(path, disk, tell).run()


def run_managed(path, disk, tell):
    from managed_training import run  # starts MPI: in the child only, as what forks must not have it

    run(path, disk, tell)


PROGRAMS = {"plain": run_plain, "managed": run_managed}


def run_and_kill(program, path, nth, is_after):
    """Run in a child; return whether it was killed, at which operation, and the last checkpoint that it committed."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        disk = KillingDisk(nth, is_after, writing)
        program(path, disk, lambda saved: os.write(writing, b"committed %d %d\n" % (saved.attempt, saved.step)))
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as told:
        lines = [line.split() for line in told]
    status = os.waitpid(child, 0)[1]
    assert status in (0, signal.SIGKILL), f"the program ended with status {status}"
    committed = [(int(line[1]), int(line[2])) for line in lines if line[0] == "committed"]
    operation = next((line[1] for line in lines if line[0] == "operation"), None)
    return status != 0, operation, max(committed, default=None)


def look_at_one(program, template, folder, expected, nth, is_after):
    """Return (operation, what is wrong) of one kill point; None when the program has fewer operations."""
    path = folder / "killed" / "checkpoints"
    before = template.joinpath("newest").read_text()
    shutil.rmtree(path.parent, ignore_errors=True)
    if (template / "run").exists():
        shutil.copytree(template / "run", path.parent)
    was_killed, operation, committed = run_and_kill(program, path, nth, is_after)
    if not was_killed:
        return None
    at_least = max(committed or (0, 0), tuple(json.loads(before) or (0, 0)))
    newest = newest_saved(path)
    wrong = []
    if at_least > (0, 0) and (newest is None or (newest.attempt, newest.step) < at_least):
        wrong.append(f"lost {at_least}, found {newest}")
    wrong += wrong_decision(path.parent, "requeue", "finished")
    has_saved = run_and_kill(program, path, 0, False)[2] is not None
    if outcome_in(path) != expected:
        wrong.append("other bits or records at the end")
    wrong += wrong_decision(path.parent, "finished")
    if has_saved:  # which sweeps: a job that was already finished only reports
        wrong += [name.name for name in path.parent.rglob("*") if ".tmp-" in name.name]
    return operation, wrong


def wrong_decision(run_dir, *allowed):
    """Return what is wrong with the decision, which is there whole or not at all."""
    try:
        decision = json.loads((run_dir / "decision.json").read_text())["decision"]
    except FileNotFoundError:
        return []
    except (ValueError, KeyError) as error:
        return [f"decision.json: {error}"]
    if decision in allowed:
        return []
    return [f"decision: {decision}"]


def final_bits(path):
    """Return the state and the bytes that the latest checkpoint holds, or None where there is none."""
    latest = Store(path).read_latest()
    if latest is None:
        return None
    return (latest.index.state, [array.values.tobytes() for array in latest.arrays])


def outcome_in(path):
    """Return the bits of the last checkpoint, and the records; of a program without a handler there are none."""
    metrics = path.parent / "metrics.jsonl"
    return final_bits(path), metrics.read_bytes() if metrics.exists() else None


def kills(every):
    """Yield (number of a change of the disk, whether the kill comes after it) without end."""
    for nth in itertools.count(1, every):
        yield nth, False
        yield nth, True


def main():
    folder = Path(sys.argv[1])
    start = sys.argv[2]
    program = PROGRAMS[sys.argv[3]]
    every = int(sys.argv[4])
    if program is run_managed:
        import torch  # noqa: F401  here, so that not every child reads it from the disk
    folder.mkdir(parents=True)
    template = folder / "template"
    template.mkdir()
    newest = STARTS[start](template / "run" / "checkpoints")
    (template / "newest").write_text(json.dumps(newest and [newest.attempt, newest.step]))
    run_and_kill(program, folder / "unbroken" / "checkpoints", 0, False)
    expected = outcome_in(folder / "unbroken" / "checkpoints")
    points = {}
    wrong = []
    for nth, is_after in kills(every):
        outcome = look_at_one(program, template, folder, expected, nth, is_after)
        if outcome is None:
            break
        points[outcome[0]] = points.get(outcome[0], 0) + 1
        wrong += [f"{outcome[0]} {nth} {'after' if is_after else 'before'}: {text}" for text in outcome[1]]
    shutil.rmtree(folder)
    print(json.dumps({"points": points, "wrong": wrong}))


if __name__ == "__main__":
    logging.disable()  # what is damaged on purpose is skipped thousands of times
    main()

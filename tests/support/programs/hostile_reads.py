"""Read checkpoints that somebody has changed, with little memory and little time for each.

Usage: hostile_reads.py FOLDER FIRST LAST EVERY: those cases of `hostile_files`. Prints a line of JSON for each before
it is read, and one after: so a crash is told apart.
"""

import json
import logging
import os
import resource
import shutil
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import h5py
from hostile_files import Original, cases, objects
from loading import load

from hpcdist.checkpoint.retention import Retention, SaveFacts
from hpcdist.checkpoint.store import Store
from hpcdist.errors import CheckpointError
from hpcdist.run.decision import decide, suspects
from hpcdist.run.ledger import Ledger

LIMIT_S = 10
MEMORY_BYTES = 1 << 30


class CountingFile(h5py.File):
    """Counts how often libhdf5 was given a file."""

    n_opened = 0

    def __init__(self, *arguments, **named):
        CountingFile.n_opened += 1
        super().__init__(*arguments, **named)


def use(path):
    """Do all that a restart does with a folder, and return what it found."""
    store = Store(path)
    attempts = Ledger(store).attempts()
    suspects(attempts)
    decide(attempts, is_counted=True)
    latest_save = store.read_latest()
    checkpoint = objects(seed=1)
    load(checkpoint, latest_save.index.state, latest_save.arrays, latest_save.path.name)
    facts = SaveFacts(latest_save.index.step, latest_save.index.time_s, latest_save.index.metrics)
    Retention(1, keep_every_n_hours=1, keep_best="loss").retained([facts, facts])
    states = (latest_save.index.state, latest_save.arrays), checkpoint.collect({})
    return [(repr(state), list(map(content, arrays))) for state, arrays in states]


def content(array):
    return array.name, array.dtype, array.values.tobytes()


def read(path):
    """Return (outcome, message): refused, read, or what went wrong."""
    try:
        return "read", use(path)
    except CheckpointError as error:
        return "refused", str(error)[-300:]
    except Exception as error:
        return "raised", f"{type(error).__name__}: {str(error)[:300]}"


def main():
    folder = Path(sys.argv[1])
    (first, last, every) = map(int, sys.argv[2:])
    logging.disable()
    original = Original(folder / f"original-{first}")
    wanted = use(original.path)
    h5py.File = CountingFile
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    path = folder / f"case-{first}"
    for number, case in cases(original, first, last, every):
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(original.path, path)
        case.make(path)
        CountingFile.n_opened = 0  # cases themselves open files
        print(json.dumps({"number": number, "name": case.name, "kind": case.kind}), flush=True)
        signal.alarm(LIMIT_S)
        outcome, detail = read(path)
        signal.alarm(0)
        is_same = outcome == "read" and detail == wanted
        report = {"outcome": outcome, "same": is_same, "opened": CountingFile.n_opened}
        if outcome == "raised":
            text = detail
        else:
            text = ""
        print(json.dumps({**report, "text": text}), flush=True)
    shutil.rmtree(path, ignore_errors=True)
    os._exit(0)


if __name__ == "__main__":
    main()

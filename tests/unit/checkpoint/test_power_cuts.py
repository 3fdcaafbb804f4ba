"""After a power cut at any point, whatever a disk kept by then, training goes on and nothing committed is lost.

The states are those of the model in `power_cuts.py`. `make crashes` recovers thousands; else it is a sample.
"""

import contextlib
import functools
import itertools
import json
import os
import random
import shutil

import managed_training
import pytest
from power_cuts import Model, RecordingDisk, digest, write_out
from scale import SCALE
from small_training import N_STEPS, STARTS, Training, newest_saved

from hpcdist.checkpoint.durable import Disk
from hpcdist.checkpoint.retention import Retention
from hpcdist.checkpoint.store import Saved, Store
from hpcdist.checkpoint.tree import decode
from hpcdist.errors import CheckpointError
from hpcdist.program.tensors import from_array
from hpcdist.run import record as record_module
from hpcdist.saving import manager

IS_FULL = SCALE.is_full
SEED = 20261122
#: About so many states are recovered, of those of every nth cut.
SAMPLE, EVERY_NTH_CUT = (5000, 1) if IS_FULL else (150, 5)
#: Of the base folder.
PATH = "run/checkpoints"
NOTHING = Saved(0, 0)


@functools.cache
def weights_after(step):
    training = Training("nowhere")
    while training.step < step:
        training.take_step()
    return training.weights.tobytes()


def make_base(base):
    """Make the folder that runs begin in: all that is in it is durable, and other things are in it."""
    base.mkdir()
    (base / "others").write_text("")
    return base


def record(base, start="fresh", disk=None, **options):
    """Return (model of what was there, log, newest checkpoint) of a whole run below `base`."""
    make_base(base)
    newest = NOTHING
    if start != "fresh":
        (base / PATH).parent.mkdir()
        newest = STARTS[start](base / PATH)
    disk = disk or RecordingDisk(base)
    before = functools.partial(Model, shutil.copytree(base, base.with_name("before")))
    Training(base / PATH, disk, lambda saved: disk.log.append(("committed", saved)), **options).run()
    return before, disk.log, newest


def cuts(before, log, newest, every=1):
    """Yield (state, newest checkpoint that was committed) for every cut of a log."""
    model = before()
    for number in range(len(log) + 1):
        if number % every == 0:
            for state in model.states():
                yield state, newest
        if number < len(log) and log[number][0] == "committed":
            newest = log[number][1]
        elif number < len(log):
            model.apply(*log[number])


def is_right(checkpoint, base):
    return checkpoint.arrays[0].values.tobytes() == weights_after(checkpoint.saved.step) and (
        checkpoint.index.state["step"] == checkpoint.saved.step
    )


def recover(state, base, is_right):
    """Return the checkpoint that is found in a state, or what is wrong with it."""
    shutil.rmtree(base, ignore_errors=True)
    base.mkdir()
    write_out(state, base)
    try:
        checkpoint = Store(base / PATH).read_latest()
    except CheckpointError as error:
        return f"{type(error).__name__}: {error}"
    if checkpoint is None:
        return NOTHING
    if is_right(checkpoint, base):
        return checkpoint.saved
    return f"{checkpoint.saved}: other bytes"


def goes_on(base):
    """Return whether a training that is started on what was recovered comes to its end."""
    training = Training(base / PATH).run()
    return training.weights.tobytes() == weights_after(N_STEPS) and newest_saved(base / PATH).step == N_STEPS


class Verdicts:
    """Recovers each distinct state once.

    Args:
        base: a folder to write them out in.
        share: so much of them is recovered, chosen by chance.
        use: called with the folder; whether it can be used further.
        is_right: called with what was found, and the folder; whether it is what was saved.

    Attributes:
        n_found: states with repetitions.
        known: what was recovered from each distinct state.
    """

    def __init__(self, base, share=1.0, use=goes_on, is_right=is_right):
        self.base = base
        self.share = share
        self.use = use
        self.is_right = is_right
        self.n_found = 0
        self.known = {}
        self.chance = random.Random(SEED)

    def look(self, state, newest):
        """Return what is wrong with a state; None when all is well, or it is not in the sample."""
        self.n_found += 1
        key = digest(state)
        if key not in self.known:
            if self.chance.random() < self.share:
                self.known[key] = self._recover(state)
            else:
                self.known[key] = None
        verdict = self.known[key]
        if isinstance(verdict, str):
            return verdict
        if verdict is not None and verdict < newest:
            return f"lost {newest}, found {verdict}"
        return None

    def _recover(self, state):
        verdict = recover(state, self.base, self.is_right)
        if isinstance(verdict, str) or self.use(self.base):
            return verdict
        return "does not come to its end"

    def report(self, label):
        n_recovered = sum(verdict is not None for verdict in self.known.values())
        print(f"{label}: {self.n_found} states, {len(self.known)} distinct, {n_recovered} recovered, seed {SEED}")
        return n_recovered


@pytest.mark.feature("checkpoints.atomic-commit", "complaints.broken-checkpoint-files")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("start", ["fresh", "broken"])
def test_power_is_cut_at_any_point(fast_folder, start):
    every = EVERY_NTH_CUT
    run = record(fast_folder / "base", start)
    n_distinct = len({digest(state) for state, _ in cuts(*run, every)})
    verdicts = Verdicts(fast_folder / "state", SAMPLE / n_distinct)
    wrong = [text for cut in cuts(*run, every) if (text := verdicts.look(*cut))]
    n_recovered = verdicts.report(f"cut, {start} start")
    assert wrong == []
    assert n_recovered > 100


# -- a handler, a manager and records: threads write, too -------------------------------------------------------------


def records_in(base):
    """Return step and total of each whole record."""
    path = (base / PATH).with_name("metrics.jsonl")
    if path.exists():
        lines = path.read_text().split("\n")[:-1]
    else:
        lines = []
    records = []
    for line in lines:
        if line.startswith("{") and line.endswith("}"):
            records.append(json.loads(line))
    return [(record["step"], record["total"]) for record in records]


@functools.cache
def managed_totals():
    weights = managed_training.start_weights()
    totals = []
    for step in range(1, managed_training.N_STEPS + 1):
        weights = managed_training.weights_after(weights, step)
        totals.append((step, float(weights.sum())))
    return totals


def is_right_with_records(checkpoint, base):
    """Return whether the records that a checkpoint counts are there, and the decision is whole."""
    decision = (base / PATH).with_name("decision.json")
    n_records = decode(checkpoint.index.state["objects"]["metrics"], from_array, [])["records"]
    total = float(next(array.values for array in checkpoint.arrays if array.name == "weights").sum())
    return (
        (checkpoint.saved.step, total) == managed_totals()[checkpoint.saved.step - 1]
        and n_records == checkpoint.saved.step
        and records_in(base)[:n_records] == managed_totals()[:n_records]
        and (not decision.exists() or json.loads(decision.read_text())["decision"] in ("requeue", "finished"))
    )


def managed_goes_on(base):
    managed_training.run(base / PATH, Disk(), lambda saved: None)
    return records_in(base) == managed_totals() and newest_saved(base / PATH).step == managed_training.N_STEPS


@pytest.mark.timeout(3600)
def test_power_is_cut_under_a_handler(fast_folder, monkeypatch):
    for module, name in ((manager, "Store"), (record_module, "DecisionFile")):
        monkeypatch.setattr(module, name, getattr(module, name))  # the training replaces them
    base = make_base(fast_folder / "base")
    disk = RecordingDisk(base)
    before = functools.partial(Model, shutil.copytree(base, base.with_name("before")))
    managed_training.run(base / PATH, disk, lambda saved: disk.log.append(("committed", saved)))
    every = 1 if IS_FULL else 11
    run = before, disk.log, NOTHING
    n_distinct = len({digest(state) for state, _ in cuts(*run, every)})
    n_wanted = SAMPLE if IS_FULL else 60
    verdicts = Verdicts(fast_folder / "state", n_wanted / n_distinct, managed_goes_on, is_right_with_records)
    wrong = [text for cut in cuts(*run, every) if (text := verdicts.look(*cut))]
    n_recovered = verdicts.report("cut, a handler with records")
    assert wrong == []
    assert n_recovered > n_wanted // 2


# -- a process is killed, another one starts, and then the power is cut --------------------------------------------


class Killed(BaseException):
    """What no handler takes for an error of the disk."""


class DyingDisk(RecordingDisk):
    """Records the operations of a process up to its nth, at which it is killed: the log goes on in the next process."""

    def __init__(self, base, nth):
        super().__init__(base)
        self.nth = nth
        self.n_calls = 0
        self.open = set()

    def watch(self, name, act, *arguments):
        self.n_calls += 1
        if self.n_calls == self.nth:
            raise Killed
        if self.n_calls > self.nth:
            raise OSError("nothing is done after death")
        result = super().watch(name, act, *arguments)
        if name in ("create", "open_end"):
            self.open.add(result)
        elif name == "close":
            self.open.remove(arguments[0])
        return result


def record_with_kill(base, nth):
    """Return what `record` does of a run that is killed and started again."""
    make_base(base)
    disk = DyingDisk(base, nth)
    with contextlib.suppress(Killed):
        Training(base / PATH, disk, lambda saved: disk.log.append(("committed", saved))).run()
    for descriptor in disk.open:
        os.close(descriptor)
    restart_disk = RecordingDisk(base, disk.log)
    Training(base / PATH, restart_disk, lambda saved: disk.log.append(("committed", saved))).run()
    return functools.partial(Model, make_base(base.with_name(f"{base.name}-before"))), disk.log, NOTHING


@pytest.mark.timeout(1800)
def test_power_is_cut_after_a_kill_and_a_restart(fast_folder):
    """What a process had not synced when it was killed is not synced either when the next one builds on it."""
    verdicts = Verdicts(fast_folder / "state", use=lambda base: True)
    wrong = []
    if IS_FULL:
        kills = range(1, 100)
    else:
        kills = [*range(2, 8), 34, 65, 92, 93]
    for nth in kills:
        run = record_with_kill(fast_folder / f"base-{nth}", nth)
        problems = [verdicts.look(*cut) for cut in cuts(*run, 8 if IS_FULL else 20)]
        wrong += [f"killed at operation {nth}: {text}" for text in problems if text]
    verdicts.report(f"cut after each of {len(kills)} kills")
    assert wrong == []


# -- programs that are wrong ------------------------------------------------------------------------------------------


def is_temporary(path, suffix):
    return f"{suffix}.tmp-" in path


def without_sync(log):
    return [entry for entry in log if entry[0] != "sync"]


def without_sync_of(suffix, log):
    return [entry for entry in log if entry[0] != "sync" or not is_temporary(entry[1], suffix)]


def without_sync_of_folders(log):
    return [entry for entry in log if entry[0] != "sync_folder"]


def without_sync_of_the_folder_after(operation, suffix, log):
    """Leave out the sync of a folder right after some operation on names with a suffix."""
    before = [("", ""), *log]
    return [
        entry
        for entry, last in zip(log, before, strict=False)
        if not (entry[0] == "sync_folder" and last[0] == operation and last[-1].endswith(suffix))
    ]


def renamed_before_synced(log):
    names = {entry[1]: entry[2] for entry in log if entry[0] == "rename"}
    changed = []
    for entry in log:
        if entry[0] == "rename":
            changed += [entry, ("sync", entry[2])]
        elif entry[0] != "sync" or entry[1] not in names:
            changed.append(entry)
    return changed


def in_place(log):
    """Files are written under their own names."""
    names = {entry[1]: entry[2] for entry in log if entry[0] == "rename"}
    retained = [entry for entry in log if entry[0] != "rename"]
    return [(name, names.get(path, path), *more) for name, path, *more in retained]


def split_at_commits(log):
    """Return (what comes before, [(operations of one commit, what comes after), ...])."""
    starts = []
    for n, entry in enumerate(log):
        if entry[0] == "create" and is_temporary(entry[1], ".h5"):
            starts.append(n)
    commits = []
    for start, end in itertools.pairwise([*starts, len(log)]):
        committed = next(n for n in range(start, end) if log[n][0] == "committed")
        commits.append((log[start:committed], log[committed:end]))
    return log[: starts[0]], commits


def pruned_before_durable(log):
    before, commits = split_at_commits(log)
    changed = list(before)
    for commit, after in commits:
        removals = [entry for entry in after if entry[0] == "remove"]
        changed += [*removals, *commit, *(entry for entry in after if entry not in removals)]
    return changed


BROKEN = {
    "no sync": without_sync,
    "no sync of the file": functools.partial(without_sync_of, ".h5"),
    "no sync of folders": without_sync_of_folders,
    "no sync of the folder after the file": functools.partial(without_sync_of_the_folder_after, "rename", ".h5"),
    "no sync of the parent of a new folder": functools.partial(
        without_sync_of_the_folder_after, "make_folder", "checkpoints"
    ),
    "renamed before synced": renamed_before_synced,
    "written in place": in_place,
    "pruned before durable": pruned_before_durable,
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_program_that_is_wrong_is_noticed(fast_folder, name):
    """The tests above would see it: the model has a state in which this program has lost something."""
    before, log, newest = record(fast_folder / "base", retention=Retention(1))
    changed = BROKEN[name](log)
    verdicts = Verdicts(fast_folder / "state", use=lambda base: True)
    assert changed != log
    assert any(verdicts.look(*cut) for cut in cuts(before, changed, newest))
    verdicts.report(f"{name}: noticed")

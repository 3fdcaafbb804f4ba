"""Stopped at any moment, a fit calls each hook as often, and in the same order, as an unbroken one."""

import functools

import numpy as np
import pytest
import torch

import hpcdist
from hpcdist.callbacks import BackupAndRestore, Callback
from hpcdist.stopping.agreement import Agreement
from hpcdist.stopping.preemption import PreemptionCheckpointHandler
from hpcdist.training import backup

pytestmark = [pytest.mark.mpi, pytest.mark.core, pytest.mark.usefixtures("no_handler_left")]
HOOKS = [name for name in vars(Callback) if name.startswith("on_") and "predict" not in name]
ROWS = np.random.default_rng(5).normal(size=(12, 3)).astype(np.float32)
DATA = (ROWS, ROWS[:, :1])


class Recorder(Callback):
    """Notes each call of a hook, with the number of its epoch or batch."""

    saved = ("calls",)

    def __init__(self):
        self.calls = []
        for name in HOOKS:
            setattr(self, name, functools.partial(self.note, name))

    def note(self, name, number=None, logs=None):
        if isinstance(number, int):
            call = f"{name} {number}"
        else:
            call = name
        self.calls.append(call)


def stop_at_poll(monkeypatch, number):
    """Let all ranks stop when a handler polls between batches for the given time."""
    n_polls = 0
    poll = PreemptionCheckpointHandler.poll_between_batches

    def counted(self, *args, **kwargs):
        nonlocal n_polls
        n_polls += 1
        if n_polls == number:
            self.stop(f"poll {number}")
        poll(self, *args, **kwargs)

    agree = Agreement.poll
    monkeypatch.setattr(PreemptionCheckpointHandler, "poll_between_batches", counted)
    monkeypatch.setattr(Agreement, "poll", lambda self, at_once=False, may_ask=True: agree(self, at_once=True))


def fit(folder, options):
    """Return what a fit leaves: the calls of hooks, the History and the weights."""
    backup._used.clear()
    strategy = hpcdist.MultiWorkerMirroredStrategy()
    hpcdist.set_random_seed(2)
    with strategy.scope():
        model = hpcdist.Model(torch.nn.Linear(3, 1))
        model.compile("adam", "mse", steps_per_execution=options.get("steps_per_execution", 1))
    recorder = Recorder()
    options = {name: value for name, value in options.items() if name != "steps_per_execution"}
    callbacks = [BackupAndRestore(folder, delete_checkpoint=False), recorder]
    history = model.fit(*DATA, batch_size=4, epochs=2, callbacks=callbacks, verbose=0, shuffle=False, **options)
    return recorder.calls, history.history, [weights.tobytes() for weights in model.get_weights()]


def exit_code_of(folder, options):
    """Return the code with which a fit ends the program; 0 if it ends well."""
    try:
        fit(folder, options)
    except SystemExit as leaving:
        return leaving.code
    return 0


def test_a_fit_that_is_stopped_again_and_again_in_its_validation_ends(shared_path, monkeypatch):
    """Its step is saved already; each attempt gets a batch further, which must be saved too."""
    options = {"validation_data": DATA}
    unbroken = fit(shared_path / "unbroken", options)
    for _ in range(30):
        with monkeypatch.context() as patch:
            stop_at_poll(patch, 2)
            if exit_code_of(shared_path / "run", options) == 0:
                break
    else:
        pytest.fail("an attempt got no further than the one before")
    assert fit(shared_path / "run", options) == unbroken


@pytest.mark.parametrize(
    "options",
    [
        {"validation_data": DATA},
        {"validation_data": DATA, "validation_steps": 2, "steps_per_epoch": 2},
        {"validation_data": DATA, "validation_freq": 2, "steps_per_execution": 2},
        {},
    ],
    ids=lambda options: " ".join(options) or "no validation",
)
def test_a_fit_that_is_stopped_at_each_moment(shared_path, monkeypatch, options):
    unbroken = fit(shared_path / "unbroken", options)
    assert unbroken[0].count("on_test_begin") == len(unbroken[1].get("val_loss", ()))
    n_stops = 0
    for number in range(1, 100):
        run = shared_path / str(number)
        with monkeypatch.context() as patch:
            stop_at_poll(patch, number)
            if exit_code_of(run, options) != 75:
                break  # it has fewer polls
        assert fit(run, options) == unbroken, f"stopped at poll {number}"
        n_stops += 1
    assert n_stops > 5

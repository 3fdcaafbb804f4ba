"""Runs a program and harms it on request.

It starts in half the time: optimizers import torch's compiler only to be left alone by it, and a stand-in does.

On SIGRTMIN its main thread raises; on SIGRTMIN + 1 this rank makes a collective that no other makes.

python harmed_job.py PROGRAM [its arguments]
"""

import runpy
import signal
import sys
import types

import numpy as np
import torch

import hpcdist

wants = {"mismatch": False}
cross_entropy = torch.nn.functional.cross_entropy


def fail(number, frame):
    raise RuntimeError("harmed_job: this rank was told to fail")


def ask_mismatch(number, frame):
    wants["mismatch"] = True


def cross_entropy_or_harm(*args, **kwargs):
    """Return what torch does; before that, once, all-reduce what no other rank does, if this was requested."""
    if wants["mismatch"]:
        wants["mismatch"] = False
        hpcdist.all_reduce(np.ones(7))
    return cross_entropy(*args, **kwargs)


torch.nn.functional.cross_entropy = cross_entropy_or_harm
sys.modules["torch._dynamo"] = torch._dynamo = types.SimpleNamespace(
    disable=lambda fn, *args, **kwargs: fn, graph_break=lambda: None
)
signal.signal(signal.SIGRTMIN, fail)
signal.signal(signal.SIGRTMIN + 1, ask_mismatch)
sys.argv = sys.argv[1:]
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
runpy.run_path(sys.argv[0], run_name="__main__")

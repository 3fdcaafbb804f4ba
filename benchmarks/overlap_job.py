"""The ranks of `overlap.py`: a step without a sum, with the sum after backward, and with the sum during backward.

Four hosts share the cores of one machine, so layers sleep instead of computing, as they would wait for a device.
"""

import json
import sys
import time
from contextlib import nullcontext
from statistics import median

import torch
from torch import nn

import hpcdist
from hpcdist.runtime.mpi import MPI


class Working(torch.autograd.Function):
    """The identity, which takes its time."""

    @staticmethod
    def forward(context, x, forward_s, backward_s):
        """Return x, later."""
        context.backward_s = backward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        """Return the gradient, later."""
        time.sleep(context.backward_s)
        return gradient, None, None


class Layer(nn.Module):
    """A linear layer, and work before it."""

    def __init__(self, n_features):
        super().__init__()
        self.linear = nn.Linear(n_features, n_features)
        self.seconds = 0.0, 0.0

    def forward(self, x):
        """Return the output of the linear layer, later."""
        return self.linear(Working.apply(x, *self.seconds))


def make(n_layers, n_features, **options):
    """Return a strategy with some communication options, and a model."""
    communication = hpcdist.CommunicationOptions(**options)
    strategy = hpcdist.MultiWorkerMirroredStrategy(
        communication_options=communication, gradient_op="sum"
    )
    with strategy.scope():
        model = nn.Sequential()
        for _ in range(n_layers):
            model.append(Layer(n_features))
    return strategy, model


def step_s(strategy, model, comm, syncs=True):
    """Return the seconds of one forward and backward on the slowest rank."""
    model.zero_grad()
    n_features = model[0].linear.in_features
    x = torch.randn(1, n_features)
    block = nullcontext() if syncs else strategy.no_sync()
    comm.Barrier()
    started = time.perf_counter()
    with block:
        loss = model(x).sum()
        loss.backward()
    taken_s = time.perf_counter() - started
    return comm.allreduce(taken_s, MPI.MAX)


def main():
    *counts, share_text = sys.argv[1:]
    n_layers, n_features, repeats = map(int, counts)
    share = float(share_text)
    strategy, model = make(n_layers, n_features)
    comm = strategy.world.comm
    n_bytes = 4 * n_layers * n_features * (n_features + 1)
    # one bucket: nothing to overlap
    serial, whole = make(n_layers, n_features, bytes_per_pack=4 * n_bytes)
    for _ in range(2):
        step_s(strategy, model, comm)
        step_s(serial, whole, comm)
    communication_times_s = [step_s(serial, whole, comm) for _ in range(repeats)]
    communication_s = median(communication_times_s)
    layer_s = communication_s / n_layers
    forward_s = share * layer_s
    backward_s = layer_s - forward_s
    for layer in [*model, *whole]:
        layer.seconds = (forward_s, backward_s)
    times_s = {"bare": [], "serial": [], "overlapped": []}
    for _ in range(repeats):
        bare_s = step_s(strategy, model, comm, syncs=False)
        serial_s = step_s(serial, whole, comm)
        overlapped_s = step_s(strategy, model, comm)
        times_s["bare"].append(bare_s)
        times_s["serial"].append(serial_s)
        times_s["overlapped"].append(overlapped_s)
    if comm.rank == 0:
        result = {"nbytes": n_bytes, "communication_s": communication_s, **times_s}
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()

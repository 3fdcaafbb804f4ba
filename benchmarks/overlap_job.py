"""The ranks of `overlap.py`: a step without a sum, with the sum after backward, and with the sum during backward.

Four hosts share the cores of one machine, so layers sleep instead of computing, as they would wait for a device.
"""

import json
import sys
import time

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
    strategy = hpcdist.MultiWorkerMirroredStrategy(
        communication_options=hpcdist.CommunicationOptions(**options), gradient_op="sum"
    )
    with strategy.scope():
        layers = [Layer(n_features) for _ in range(n_layers)]
        model = nn.Sequential(*layers)
    return strategy, model


def step_s(strategy, model, comm, syncs=True):
    """Return the seconds of one forward and backward on the slowest rank."""
    model.zero_grad()
    x = torch.randn(1, model[0].linear.in_features)
    comm.Barrier()
    started = time.perf_counter()
    if syncs:
        model(x).sum().backward()
    else:
        with strategy.no_sync():
            model(x).sum().backward()
    taken_s = time.perf_counter() - started
    return comm.allreduce(taken_s, MPI.MAX)


def median(values):
    return sorted(values)[len(values) // 2]


def main():
    n_layers, n_features, repeats = map(int, sys.argv[1:4])
    share = float(sys.argv[4])
    strategy, model = make(n_layers, n_features)
    comm = strategy.world.comm
    n_bytes = 4 * sum(parameter.numel() for parameter in model.parameters())
    # one bucket: nothing to overlap
    serial, whole = make(n_layers, n_features, bytes_per_pack=4 * n_bytes)
    for _ in range(2):
        step_s(strategy, model, comm)
        step_s(serial, whole, comm)
    communication_s = median([step_s(serial, whole, comm) for _ in range(repeats)])
    forward_s = share * communication_s / n_layers
    backward_s = (1 - share) * communication_s / n_layers
    for layer in [*model, *whole]:
        layer.seconds = (forward_s, backward_s)
    times_s = {"bare": [], "serial": [], "overlapped": []}
    for _ in range(repeats):
        times_s["bare"].append(step_s(strategy, model, comm, syncs=False))
        times_s["serial"].append(step_s(serial, whole, comm))
        times_s["overlapped"].append(step_s(strategy, model, comm))
    if comm.rank == 0:
        result = {"nbytes": n_bytes, "communication_s": communication_s, **times_s}
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()

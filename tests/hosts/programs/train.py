"""Train a small model on rows dealt to the ranks; report losses, weights and whether all ranks hold the same."""

import torch
from report import print_result
from torch.nn.utils import parameters_to_vector

import hpcdist

N_STEPS = 10
N_ROWS = 32
strategy = hpcdist.MultiWorkerMirroredStrategy()
world = strategy.world
torch.manual_seed(7)
inputs = torch.randn(N_ROWS, 16)
targets = torch.randn(N_ROWS, 4)
mine = slice(world.rank, None, world.size)
with strategy.scope():
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(N_STEPS):
        optimizer.zero_grad()
        per_row = (model(inputs[mine]) - targets[mine]).square().mean(1)
        hpcdist.compute_average_loss(per_row, global_batch_size=N_ROWS).backward()
        optimizer.step()
        with torch.no_grad():
            losses.append(float((model(inputs) - targets).square().mean()))
weights = parameters_to_vector(model.parameters()).detach()
n_different = len(set(world.comm.allgather(weights.numpy().tobytes())))
print_result(
    world.comm, n_hosts=world.n_hosts, losses=losses, weights=weights.tolist(), n_different_weights=n_different
)

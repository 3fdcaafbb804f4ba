"""Train synchronously with a server and three workers, also with payloads of several pieces; print the weights.

Usage: servers.py
"""

import torch
from report import print_result
from torch import nn

import hpcdist

strategy = hpcdist.ParameterServerStrategy(hpcdist.MPIClusterResolver(roles="ps:1,worker:*"), synchronous=True)
with strategy.scope():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 1 << 18), nn.Linear(1 << 18, 2, bias=False))  # 5 and 2 MiB
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(3):
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(step))[strategy.rank :: strategy.size]
    optimizer.zero_grad()
    hpcdist.compute_average_loss(model(x).square().sum(1), global_batch_size=6).backward()
    optimizer.step()
sums = [float(parameter.detach().double().sum()) for parameter in model.parameters()]
found = strategy.world.role_comm.allgather(sums)
if strategy.is_chief:
    print_result(strategy.world.role_comm, weights=found, n_workers=strategy.size)

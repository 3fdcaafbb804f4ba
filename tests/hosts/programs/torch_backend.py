"""all_reduce of the torch backend between hosts goes on while the program does; DDP trains as one process."""

import json
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import hpcdist.torch_backend

dist.init_process_group("hpcdist", init_method="hpcdist://")
rank = dist.get_rank()
size = dist.get_world_size()
assert hpcdist.torch_backend
first = [torch.full((1 << 16,), float(rank)) for _ in range(2)]
dist.all_reduce(first[0], async_op=True).wait()  # which makes the thread
dist.barrier()
if rank == size - 1:
    time.sleep(1.0)
started = time.monotonic()
work = dist.all_reduce(first[1], async_op=True)
returned_s = time.monotonic() - started
was_done = work.is_completed()
work.wait()
total = size * (size - 1) / 2
failed = ""
try:  # sizes that differ: an error where the work is waited for
    dist.all_reduce(torch.ones(4 + rank), async_op=True).wait()
except hpcdist.errors.DesyncError as error:
    failed = str(error)

x = torch.randn(8 * size, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def train(model, rows):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def net():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()


pairs = zip(train(DistributedDataParallel(net()), x[rank::size]), train(net(), x), strict=True)
result = {
    "returned_s": returned_s,
    "was_done": was_done,
    "is_right": all((reduced == total).all().item() for reduced in first),
    "future": work.get_future().value()[0][0].item() == total,
    "failed": failed,
    "is_trained_alike": all(torch.allclose(ddp_parameter, plain_parameter) for ddp_parameter, plain_parameter in pairs),
}
if rank == 0:
    print(json.dumps(result))
dist.destroy_process_group()

"""Time training steps of Horovod with torch, over MPI. Needs a Horovod that was built with torch and MPI.

HOROVOD_CYCLE_TIME=0.1 mpirun -n 2 python benchmarks/peers/horovod_step.py --model mlp --out out/peers/horovod.json
"""

import os
import sys
from pathlib import Path

import horovod
import horovod.torch as hvd
import torch
from clock import parser, time_rounds, write

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from models import N_BATCHES, adam, batches, build, train_step


def main():
    args = parser(__doc__).parse_args()
    hvd.init()
    torch.set_num_threads(1)
    model = build(args.model)
    data = batches(args.batch, hvd.rank(), hvd.size())
    optimizer = hvd.DistributedOptimizer(adam(model), named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    def train(n_steps):
        for number in range(n_steps):
            loss = train_step(model, optimizer, data[number % N_BATCHES])
        return loss.item()

    rounds = time_rounds(train, args, hvd.size())
    cycle_time = os.environ.get("HOROVOD_CYCLE_TIME", "its default")
    if hvd.rank() == 0:
        environment = {
            "horovod": horovod.__version__,
            "ranks": hvd.size(),
            "cycle_time": cycle_time,
        }
        write("Horovod", rounds, args, environment, is_baseline=True)


if __name__ == "__main__":
    main()

"""One job of `servers.py`: workers that train against parameter servers or by an all-reduce; prints a line of JSON.

HPCDIST_ROLES=ps:1,worker:* mpirun -n 3 python benchmarks/servers_job.py --kind async
"""

import json
import random
import time

import torch
from command_line import parser_of
from torch import nn

import hpcdist


def parse_args():
    parser = parser_of(__doc__)
    parser.add_argument(
        "--kind",
        choices=["async", "sync", "all-reduce", "coordinator"],
        default="async",
    )
    parser.add_argument("--max-staleness", type=int)
    parser.add_argument(
        "--elements", type=int, help="of one parameter, in place of the guides' MLP"
    )
    parser.add_argument("--shards", type=int, help="of each variable")
    parser.add_argument("--batch", type=int, default=32, help="rows of a worker")
    parser.add_argument(
        "--compute-s",
        type=float,
        help="sleep so long in place of a forward and backward",
    )
    parser.add_argument(
        "--stalls",
        type=float,
        default=0.0,
        help="share of steps that take five times longer, six units in place of one",
    )
    parser.add_argument("--warm-up", type=int, default=20)
    parser.add_argument("--steps", type=int, default=300)
    return parser.parse_args()


def make_strategy(args):
    if args.kind == "all-reduce":
        return hpcdist.MultiWorkerMirroredStrategy(gradient_op="sum")
    partitioner = None
    if args.shards is not None:
        partitioner = hpcdist.FixedShardsPartitioner(args.shards)
    is_synchronous = args.kind == "sync"
    return hpcdist.ParameterServerStrategy(None, partitioner, args.max_staleness, is_synchronous)


def make_model(n_elements=None):
    """Return a layer with one parameter of this many elements; the guides' MLP without a number."""
    if n_elements:
        return nn.Linear(n_elements // 64, 64, bias=False)
    return nn.Sequential(
        nn.Linear(784, 256),
        nn.ReLU(),
        nn.Linear(256, 256),
        nn.ReLU(),
        nn.Linear(256, 10),
    )


def make_step(args, strategy):
    """Return a function that takes one training step of this worker."""
    torch.manual_seed(1)
    with strategy.scope():
        model = make_model(args.elements)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    first_weight = next(model.parameters())
    x = torch.randn(args.batch, first_weight.shape[1])
    y = torch.randint(0, 10, (args.batch,))
    global_batch = args.batch * strategy.size
    stalls = random.Random(strategy.rank)
    fixed = [torch.full_like(parameter, 1e-6) for parameter in model.parameters()]

    def step():
        optimizer.zero_grad()
        if args.compute_s is not None:
            n_units = 6 if stalls.random() < args.stalls else 1
            time.sleep(args.compute_s * n_units)
        losses = nn.functional.cross_entropy(model(x), y, reduction="none")
        loss = hpcdist.compute_average_loss(losses, global_batch_size=global_batch)
        loss.backward()
        optimizer.step()

    def step_of_bytes():
        for parameter, gradient in zip(model.parameters(), fixed, strict=True):
            parameter.grad = gradient
        optimizer.step()

    return step_of_bytes if args.elements and args.kind != "all-reduce" else step


def coordinate(args):
    """Time functions of one step each, scheduled on all workers."""
    resolver = hpcdist.MPIClusterResolver()
    if resolver.task_type in ("worker", "ps"):
        hpcdist.Server(resolver).join()
    strategy = hpcdist.ParameterServerStrategy(resolver)
    n_workers = resolver.cluster_spec().num_tasks("worker")
    torch.manual_seed(1)
    with strategy.scope():
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    coordinator = hpcdist.ClusterCoordinator(strategy)
    n_rows = args.batch

    def make_batch():
        images = torch.randn(n_rows, 784)
        labels = torch.randint(0, 10, (n_rows,))
        return images, labels

    batch = coordinator.create_per_worker_resource(make_batch)

    def step(batch):
        images, labels = batch
        optimizer.zero_grad()
        outputs = model(images)
        losses = nn.functional.cross_entropy(outputs, labels, reduction="none")
        loss = hpcdist.compute_average_loss(losses, global_batch_size=n_rows * n_workers)
        loss.backward()
        optimizer.step()

    for n_steps in (args.warm_up * n_workers, args.steps * n_workers):
        since = time.perf_counter()
        for _ in range(n_steps):
            coordinator.schedule(step, (batch,))
        coordinator.join()
        seconds = time.perf_counter() - since
    result = {
        "steps_per_s": n_steps / seconds,
        "step_s": seconds / args.steps,
        "workers": n_workers,
    }
    print(json.dumps(result), flush=True)


def main():
    args = parse_args()
    if args.kind == "coordinator":
        coordinate(args)
        return
    strategy = make_strategy(args)
    step = make_step(args, strategy)
    if args.elements and args.kind == "sync":
        # the gradients here are made up, and need no loss that is scaled
        strategy.engine.sums.is_mean = False
        hpcdist.get_strategy()
    if args.elements and args.kind != "all-reduce":
        strategy.engine.planner.prepare()
    for _ in range(args.warm_up):
        step()
    strategy.barrier()
    since = time.perf_counter()
    for _ in range(args.steps):
        step()
    if args.kind != "async":
        strategy.barrier()
    taken_s = time.perf_counter() - since
    slowest_s = max(strategy.world.role_comm.allgather(taken_s))
    if strategy.is_chief:
        staleness = {}
        if args.kind != "all-reduce":
            staleness = strategy.statistics()["staleness"]
        result = {
            "steps_per_s": args.steps * strategy.size / slowest_s,
            "step_s": slowest_s / args.steps,
            "workers": strategy.size,
            "staleness": staleness,
        }
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()

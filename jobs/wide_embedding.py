"""Train a wide embedding, of which a step uses few rows: on parameter servers, or by an all-reduce to compare.

mpirun -n 3 python jobs/wide_embedding.py --roles 'ps:1,worker:*'
mpirun -n 2 python jobs/wide_embedding.py --strategy all-reduce [--dense]

A model of clicks: each row has a few of many features, and the embedding has a row of weights for each feature. With
sparse gradients only the rows that a step used are sent and changed. Servers hold the embedding once, and workers do
not wait for each other.
"""

import argparse
import time
from statistics import mean

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

import hpcdist

WARM_UP_STEPS = 20


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--strategy", choices=["ps", "all-reduce"], default="ps")
    parser.add_argument("--roles", help="of the ranks; default: TF_CONFIG or HPCDIST_ROLES")
    parser.add_argument("--dense", action="store_true", help="let gradients have all rows")
    parser.add_argument("--features", type=int, default=200_000)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument(
        "--batch", type=int, default=256, help="rows of one step on all workers together"
    )
    parser.add_argument("--steps", type=int, default=200)
    return parser.parse_args()


def make_strategy(args):
    resolver = hpcdist.MPIClusterResolver(roles=args.roles) if args.roles else None
    if args.strategy == "all-reduce":
        return hpcdist.MultiWorkerMirroredStrategy(resolver)
    return hpcdist.ParameterServerStrategy(resolver)  # ps ranks serve in it, and end there


def clicks(n_rows, n_features, seed=1):
    """Return ((n_rows, 8) numbers of features, (n_rows,) labels): some features are frequent, as words are."""
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(n_rows, 8, generator=generator)
    skewed = uniform**6
    features = (skewed * n_features).long()
    weights = torch.randn(n_features, generator=generator)
    scores = weights[features].sum(1)
    labels = scores > 0
    return features, labels.float()


def main():
    args = parse_args()
    strategy = make_strategy(args)
    torch.manual_seed(1)
    with strategy.scope():
        is_sparse = not args.dense
        embedding = nn.EmbeddingBag(args.features, args.width, mode="sum", sparse=is_sparse)
        head = nn.Linear(args.width, 1)
        optimizer_class = torch.optim.SparseAdam if is_sparse else torch.optim.Adam
        embedding_optimizer = optimizer_class(embedding.parameters(), lr=0.01)
        head_optimizer = torch.optim.Adam(head.parameters(), lr=0.01)
    n_rows = args.steps * args.batch
    rows = clicks(n_rows, args.features)
    dataset = hpcdist.Dataset.from_tensor_slices(rows)
    dataset = dataset.batch(args.batch)
    batches = strategy.experimental_distribute_dataset(dataset)

    def train_step(features, labels):
        embedding_optimizer.zero_grad()
        head_optimizer.zero_grad()
        sums = embedding(features)
        logits = head(sums)
        logits = logits[:, 0]
        losses = binary_cross_entropy_with_logits(logits, labels, reduction="none")
        loss = hpcdist.compute_average_loss(losses, global_batch_size=args.batch)
        loss.backward()
        embedding_optimizer.step()
        head_optimizer.step()
        return losses.detach().mean()

    started = time.perf_counter()
    losses = []
    for batch in batches:
        loss = strategy.run(train_step, args=batch)
        losses.append(float(loss))
        if len(losses) == WARM_UP_STEPS:
            started = time.perf_counter()
    seconds = time.perf_counter() - started
    if strategy.is_chief:
        first = mean(losses[:20])
        last = mean(losses[-20:])
        kind = "dense" if args.dense else "sparse"
        n_timed_steps = args.steps - WARM_UP_STEPS
        rate = n_timed_steps / seconds
        setting = f"{args.strategy}, {kind}"
        change = f"loss {first:.4f} to {last:.4f}"
        print(f"{setting}: {change}, {rate:.1f} steps/s", flush=True)


if __name__ == "__main__":
    main()

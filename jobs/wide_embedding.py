"""Train a wide embedding, of which a step uses few rows: on parameter servers, or by an all-reduce to compare.

mpirun -n 3 python jobs/wide_embedding.py --roles 'ps:1,worker:*'
mpirun -n 2 python jobs/wide_embedding.py --strategy all-reduce [--dense]

A model of clicks: each row has a few of many features, and the embedding has a row of weights for each feature. With
sparse gradients only the rows that a step used are sent and changed. Servers hold the embedding once, and workers do
not wait for each other.
"""

import argparse
import time

import torch
from torch import nn

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
    skewed = torch.rand(n_rows, 8, generator=generator) ** 6
    features = (skewed * n_features).long()
    weights = torch.randn(n_features, generator=generator)
    scores = weights[features].sum(1)
    return features, (scores > 0).float()


def main():
    args = parse_args()
    strategy = make_strategy(args)
    torch.manual_seed(1)
    with strategy.scope():
        embedding = nn.EmbeddingBag(args.features, args.width, mode="sum", sparse=not args.dense)
        head = nn.Linear(args.width, 1)
        optimizer_class = torch.optim.Adam if args.dense else torch.optim.SparseAdam
        embedding_optimizer = optimizer_class(embedding.parameters(), lr=0.01)
        head_optimizer = torch.optim.Adam(head.parameters(), lr=0.01)
    rows = clicks(args.steps * args.batch, args.features)
    dataset = hpcdist.Dataset.from_tensor_slices(rows).batch(args.batch)
    batches = strategy.experimental_distribute_dataset(dataset)

    def train_step(features, labels):
        embedding_optimizer.zero_grad()
        head_optimizer.zero_grad()
        logits = head(embedding(features))[:, 0]
        losses = nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="none")
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
        first = sum(losses[:20]) / 20
        last = sum(losses[-20:]) / 20
        kind = "dense" if args.dense else "sparse"
        rate = (args.steps - WARM_UP_STEPS) / seconds
        print(
            f"{args.strategy}, {kind}: loss {first:.4f} to {last:.4f}, {rate:.1f} steps/s",
            flush=True,
        )


if __name__ == "__main__":
    main()

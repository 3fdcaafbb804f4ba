"""Two models and two optimizers that train each other: a small GAN on handwritten digits.

mpirun -n 2 python jobs/gan.py
python jobs/gan.py --replicas 4 --steps 200
"""

import argparse
import itertools

import torch
from images import load_digits
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

import hpcdist

NOISE = 16


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--replicas",
        type=int,
        help="replicas of the job on any number of ranks; default: one per rank",
    )
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument(
        "--batch", type=int, default=64, help="rows of one step on all replicas together"
    )
    return parser.parse_args()


def build_generator():
    return nn.Sequential(
        nn.Linear(NOISE, 64),
        nn.ReLU(),
        nn.Linear(64, 64),
        nn.Sigmoid(),
    )


def build_discriminator():
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, 64),
        nn.LeakyReLU(0.2),
        nn.Dropout(0.2),
        nn.Linear(64, 1),
    )


def main():
    args = parse_args()
    torch.manual_seed(1)
    strategy = hpcdist.MultiWorkerMirroredStrategy(num_replicas=args.replicas)
    (images, _), _ = load_digits()
    dataset = hpcdist.Dataset.from_tensor_slices(images).shuffle(seed=1)
    dataset = dataset.repeat().batch(args.batch)
    batches = strategy.experimental_distribute_dataset(dataset)

    with strategy.scope():
        generator = build_generator()
        discriminator = build_discriminator()
        generator_optimizer = torch.optim.Adam(generator.parameters(), lr=2e-3)
        discriminator_optimizer = torch.optim.Adam(discriminator.parameters(), lr=1e-3)

    def judged(images, is_real):
        scores = discriminator(images)
        targets = torch.full_like(scores, float(is_real))
        losses = binary_cross_entropy_with_logits(scores, targets, reduction="none")
        losses = losses[:, 0]
        return hpcdist.compute_average_loss(losses, global_batch_size=args.batch)

    def train_step(real):
        n_rows = len(real)
        noise = torch.randn(n_rows, NOISE)
        generated = generator(noise)
        discriminator_optimizer.zero_grad()
        real_loss = judged(real, is_real=True)
        generated_loss = judged(generated.detach(), is_real=False)
        discriminator_loss = real_loss + generated_loss
        discriminator_loss.backward()
        discriminator_optimizer.step()
        generator_optimizer.zero_grad()
        generator_loss = judged(generated, is_real=True)
        generator_loss.backward()
        generator_optimizer.step()
        return generator_loss.detach(), discriminator_loss.detach()

    for step, real in enumerate(itertools.islice(batches, args.steps), 1):
        replica_losses = strategy.run(train_step, args=(real,))
        if step % 100 == 0 or step == args.steps:
            losses = []
            for loss in replica_losses:
                total = strategy.reduce("sum", loss, axis=None)
                losses.append(total.item())
            if strategy.is_chief:
                text = "generator {:.6f}  discriminator {:.6f}"
                results = text.format(*losses)
                print(f"step {step}  {results}", flush=True)


if __name__ == "__main__":
    main()

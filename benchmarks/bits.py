"""Train with 8 replicas and print digests of the results, which are the same on any number of ranks.

python benchmarks/bits.py                     on 1, 2, 3, 4 and 8 ranks, with the mpirun beside this python, one table
mpirun -n 3 python benchmarks/bits.py --one   on these ranks
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import torch
import xxhash
from torch import nn
from torch.nn.functional import cross_entropy

import hpcdist
from hpcdist.plan.blocks import ceiling_bounds

N_REPLICAS = 8
GLOBAL_BATCH = 37
RANKS = (1, 2, 3, 4, 8)


class Tokens(nn.Module):
    """A small transformer with dropout over rows of pixels."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(8, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 10)

    def forward(self, images):
        """Return (rows, 10) from (rows, 1, 8, 8)."""
        rows = self.embed(images.flatten(1, 2))
        encoded = self.encoder(rows)
        return self.head(encoded.mean(dim=1))


def build_mlp():
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def build_cnn():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(8 * 36, 10),
    )


MODELS = {"mlp": build_mlp, "cnn": build_cnn, "transformer": Tokens}
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
}


def train(strategy, name, kind, n_steps=10):
    """Return digests of all weights and statistics, and of the losses, after some steps of clipped gradients."""
    torch.manual_seed(3)
    with strategy.scope():
        model = MODELS[name]()
        optimizer = OPTIMIZERS[kind](model.parameters())
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(n_steps, GLOBAL_BATCH, 1, 8, 8, generator=generator)
    labels = torch.randint(10, (n_steps, GLOBAL_BATCH), generator=generator)

    def step(images, labels):
        optimizer.zero_grad()
        losses = cross_entropy(model(images), labels, reduction="none")
        loss = hpcdist.compute_average_loss(losses, global_batch_size=GLOBAL_BATCH)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        return loss.detach()

    losses = []
    for number in range(n_steps):
        parts = strategy.experimental_distribute_values_from_function(
            lambda context: part_of(context.replica_id_in_sync_group)
        )
        x = hpcdist.PerReplica([images[number][part] for part in parts.values])
        y = hpcdist.PerReplica([labels[number][part] for part in parts.values])
        loss = strategy.run(step, args=(x, y))
        losses.append(float(strategy.reduce("sum", loss, axis=None)))
    return digest(model.state_dict().values()), digest([torch.tensor(losses)])


def part_of(replica):
    """Return the rows of a replica in each global batch."""
    start, stop = ceiling_bounds(GLOBAL_BATCH, N_REPLICAS, replica)
    return slice(start, stop)


def digest(tensors):
    """Return a digest of the bytes of tensors."""
    content = b"".join(tensor.numpy().tobytes() for tensor in tensors)
    return xxhash.xxh3_64_hexdigest(content)


def train_all():
    """Train every model with every optimizer on these ranks; the chief prints the digests as JSON."""
    torch.set_num_threads(1)
    digests = {}
    for name in MODELS:
        for kind in OPTIMIZERS:
            strategy = hpcdist.MultiWorkerMirroredStrategy(num_replicas=N_REPLICAS)
            digests[f"{name} {kind}"] = train(strategy, name, kind)
    if strategy.is_chief:
        print(json.dumps(digests))


def print_table():
    """Run on each number of ranks, print one table, and return whether all rows are equal."""
    mpirun = Path(sys.executable).with_name("mpirun")
    rows = {}
    for n_ranks in RANKS:
        command = [mpirun, "-n", str(n_ranks), sys.executable, __file__, "--one"]
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
        last_line = done.stdout.strip().splitlines()[-1]
        rows[n_ranks] = json.loads(last_line)
    for case, digests in rows[1].items():
        weights, losses = digests
        verdicts = []
        for n_ranks in RANKS[1:]:
            is_same = rows[n_ranks][case] == digests
            verdicts.append(f"{n_ranks} ranks: {'same' if is_same else 'DIFFERENT'}")
        print(f"{case:18} weights {weights} losses {losses}", end="  ")
        print(*verdicts, sep=", ")
    return all(row == rows[1] for row in rows.values())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--one", action="store_true", help="train on these ranks only")
    if parser.parse_args().one:
        train_all()
    elif not print_table():
        sys.exit("bits differ")


if __name__ == "__main__":
    main()

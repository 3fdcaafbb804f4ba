"""Train with 8 replicas and print digests of the results, which are the same on any number of ranks.

python benchmarks/bits.py                     on 1, 2, 3, 4 and 8 ranks, with the mpirun beside this python, one table
mpirun -n 3 python benchmarks/bits.py --one   on these ranks
"""

import json
import sys

import torch
import xxhash
from command_line import mpirun_command, parser_of, result_of
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
        batch_images = rows_of_replicas(strategy, images[number])
        batch_labels = rows_of_replicas(strategy, labels[number])
        replica_losses = strategy.run(step, args=(batch_images, batch_labels))
        loss = strategy.reduce("sum", replica_losses, axis=None)
        losses.append(float(loss))
    weights = model.state_dict().values()
    return digest(weights), digest([torch.tensor(losses)])


def rows_of_replicas(strategy, rows):
    """Return each replica's rows of a global batch."""

    def rows_of(context):
        replica = context.replica_id_in_sync_group
        start, stop = ceiling_bounds(GLOBAL_BATCH, N_REPLICAS, replica)
        return rows[start:stop]

    return strategy.experimental_distribute_values_from_function(rows_of)


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
    rows = {}
    for n_ranks in RANKS:
        command = mpirun_command(n_ranks, __file__, "--one")
        rows[n_ranks] = result_of(command)
    first_row = rows.pop(1)
    are_same = True
    for case, digests in first_row.items():
        weights, losses = digests
        verdicts = []
        for n_ranks, row in rows.items():
            is_same = row[case] == digests
            are_same = are_same and is_same
            verdict = "same" if is_same else "DIFFERENT"
            verdicts.append(f"{n_ranks} ranks: {verdict}")
        print(case.ljust(18), "weights", weights, "losses", losses, end="  ")
        print(*verdicts, sep=", ")
    return are_same


def main():
    parser = parser_of(__doc__)
    parser.add_argument("--one", action="store_true", help="train on these ranks only")
    if parser.parse_args().one:
        train_all()
    elif not print_table():
        sys.exit("bits differ")


if __name__ == "__main__":
    main()

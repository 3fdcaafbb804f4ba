"""The first example of the tf.distribute guides: one dense unit, weight decay, mean squared error, SGD.

python jobs/linear_regression.py
mpirun -n 2 python jobs/linear_regression.py

It learns y = 1 at x = 1 from 100 equal rows, so that the loss of every epoch can be computed by hand. The warning that
all replicas receive the same rows is expected.
"""

import torch
from torch import nn

import hpcdist

ROWS = 100
GLOBAL_BATCH = 10
EPOCHS = 5
LEARNING_RATE = 0.01
DECAY = 1e-4


def main():
    torch.manual_seed(0)
    strategy = hpcdist.MultiWorkerMirroredStrategy()
    row = (torch.ones(1), torch.ones(1))
    dataset = hpcdist.Dataset.from_tensors(row).repeat(ROWS)
    dataset = dataset.batch(GLOBAL_BATCH)
    batches = strategy.experimental_distribute_dataset(dataset)

    with strategy.scope():
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    nn.init.constant_(model.weight, 0.5)
    nn.init.zeros_(model.bias)

    def train_step(x, y):
        optimizer.zero_grad()
        predictions = model(x)
        errors = predictions - y
        errors = errors[:, 0]
        loss = hpcdist.compute_average_loss(errors.square(), global_batch_size=GLOBAL_BATCH)
        decay = DECAY * model.weight.square()
        loss = loss + hpcdist.scale_regularization_loss(decay)
        loss.backward()
        optimizer.step()
        return loss.detach()

    for epoch in range(EPOCHS):
        losses = []
        for batch in batches:
            replica_losses = strategy.run(train_step, args=batch)
            loss = strategy.reduce("sum", replica_losses, axis=None)
            losses.append(loss.item())
        if strategy.is_chief:
            mean_loss = sum(losses) / len(losses)
            number = epoch + 1
            print(f"epoch {number}  loss {mean_loss:.6f}", flush=True)


if __name__ == "__main__":
    main()

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
    dataset = (
        hpcdist.Dataset.from_tensors((torch.ones(1), torch.ones(1)))
        .repeat(ROWS)
        .batch(GLOBAL_BATCH)
    )
    batches = strategy.experimental_distribute_dataset(dataset)

    with strategy.scope():
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    nn.init.constant_(model.weight, 0.5)
    nn.init.zeros_(model.bias)

    def train_step(x, y):
        optimizer.zero_grad()
        squares = (model(x) - y).square()[:, 0]
        loss = hpcdist.compute_average_loss(squares, global_batch_size=GLOBAL_BATCH)
        loss = loss + hpcdist.scale_regularization_loss(DECAY * model.weight.square())
        loss.backward()
        optimizer.step()
        return loss.detach()

    for epoch in range(EPOCHS):
        losses = [
            strategy.reduce("sum", strategy.run(train_step, args=batch), axis=None).item()
            for batch in batches
        ]
        if strategy.is_chief:
            print(f"epoch {epoch + 1}  loss {sum(losses) / len(losses):.6f}", flush=True)


if __name__ == "__main__":
    main()

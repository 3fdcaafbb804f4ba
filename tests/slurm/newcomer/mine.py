import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hpcdist

hpcdist.experimental_set_strategy(hpcdist.MultiWorkerMirroredStrategy(gradient_op="mean"))
torch.manual_seed(1)
x = torch.randn(6400, 256)
y = x[:, :10].argmax(1)
loader = DataLoader(TensorDataset(x, y), batch_size=128, shuffle=True)
loader = hpcdist.get_strategy().experimental_distribute_dataset(loader)
model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)

for epoch in range(int(sys.argv[1])):
    for step, (rows, labels) in enumerate(loader):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(rows), labels)
        loss.backward()
        optimizer.step()
        if step % 25 == 0 and hpcdist.get_strategy().is_chief:
            print(f"epoch {epoch + 1}  step {step}  loss {loss.item():.4f}", flush=True)

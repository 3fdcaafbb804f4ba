"""Train by Lightning over the backend `hpcdist`; ranks must end with equal weights, and with a smaller loss.

mpirun -n 2 python tests/support/frameworks/lightning_job.py
"""

import lightning
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import MPIEnvironment
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.nn.utils import parameters_to_vector
from torch.utils.data import DataLoader, TensorDataset

import hpcdist.torch_backend


class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 4))
        self.losses = []

    def training_step(self, batch, number):
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.losses.append(float(loss.detach()))
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


lightning.seed_everything(1)
x = torch.randn(256, 20)
rows = TensorDataset(x, x[:, :4].argmax(1))
model = Net()
trainer = lightning.Trainer(
    max_epochs=4,
    accelerator="cpu",
    devices=2,
    strategy=DDPStrategy(process_group_backend="hpcdist", cluster_environment=MPIEnvironment()),
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
trainer.fit(model, DataLoader(rows, batch_size=16))
assert dist.get_backend() == "hpcdist"
assert len(model.losses) == 4 * 256 // 16 // dist.get_world_size(), "each rank has its part of the rows"
assert sum(model.losses[-8:]) < 0.7 * sum(model.losses[:8]), model.losses
weights = parameters_to_vector(model.parameters()).detach()
weights_by_rank = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
dist.all_gather(weights_by_rank, weights)
assert all(torch.equal(rank_parameters, weights) for rank_parameters in weights_by_rank)
print(f"rank {dist.get_rank()}: trained by Lightning over hpcdist {hpcdist.__version__}", flush=True)

"""The models and data of the step benchmarks. Same seeds, same bits on every rank and in every contender."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

#: A model, and the optimizer that steps it.
Trainee = tuple[nn.Module, torch.optim.Optimizer]
#: Rows of a step: (rows, 784) float32 images and (rows,) int64 labels.
Batch = tuple[torch.Tensor, torch.Tensor]
#: Global batches that a contender goes through in turn.
N_BATCHES = 32


class SmallTransformer(nn.Module):
    """Two encoder layers over rows of 28 pixels, about 0.4 M parameters, no dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(28, 128)
        layer = nn.TransformerEncoderLayer(
            128,
            4,
            512,
            dropout=0.0,
            batch_first=True,
            norm_first=True,
        )
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(128, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return (rows, 10) from (rows, 784)."""
        rows = self.embed(images.view(-1, 28, 28))
        encoded = self.encoder(rows)
        return self.head(encoded.mean(dim=1))


def _mlp(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(784, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, 10),
    )


def _cnn() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 28, 28)),
        nn.Conv2d(1, 32, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 13 * 13, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def _deep() -> nn.Module:
    layers = [nn.Linear(784, 64), nn.ReLU()]
    for _ in range(47):
        layers += [nn.Linear(64, 64), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(64, 10))


#: Name -> function that builds the model. "mlp" and "cnn" are the guides' models; "wide" has 5.8 M parameters; "deep"
#: has 98 small parameters.
MODELS = {
    "mlp": lambda: _mlp(256),
    "wide": lambda: _mlp(2048),
    "deep": _deep,
    "transformer": SmallTransformer,
    "cnn": _cnn,
}


def build(name: str, device: str = "cpu") -> nn.Module:
    """Return a model on a device, with the same initial values in every contender."""
    torch.manual_seed(1)
    with torch.device("cpu"):
        model = MODELS[name]()
    return model.to(device)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """Return torch's fastest Adam."""
    return torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)


def batches(global_batch: int, rank: int, size: int, device: str = "cpu") -> list[Batch]:
    """Return this rank's parts of the global batches, on a device."""
    generator = torch.Generator().manual_seed(2)
    images = torch.randn(N_BATCHES, global_batch, 784, generator=generator)
    labels = torch.randint(10, (N_BATCHES, global_batch), generator=generator)
    images = images.to(device)
    labels = labels.to(device)
    start = rank * global_batch // size
    stop = (rank + 1) * global_batch // size
    parts = []
    for number in range(N_BATCHES):
        rank_images = images[number, start:stop]
        rank_labels = labels[number, start:stop]
        parts.append((rank_images.clone(), rank_labels.clone()))
    return parts


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> torch.Tensor:
    """Take one step and return the loss, a mean over this rank's rows. The same code for every contender."""
    images, labels = batch
    optimizer.zero_grad(set_to_none=True)
    loss = cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    return loss.detach()

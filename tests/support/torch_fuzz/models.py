"""The models and rows of the programs: plain torch, built alike for the reference and for hpcdist."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

N_FEATURES = 16
N_TOKENS = 9
N_TAGS = 3
N_OUT = 3

Rows = dict[str, Tensor]


def make_rows(n_rows: int, seed: int, dtype: torch.dtype) -> Rows:
    """Return rows: features, tokens, a tag, targets, a label, a weight, and their number."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(n_rows, N_FEATURES, generator=generator, dtype=torch.float64).to(dtype),
        "tokens": torch.randint(N_TOKENS, (n_rows, 4), generator=generator),
        "tag": torch.randint(N_TAGS, (n_rows,), generator=generator),
        "y": torch.randn(n_rows, N_OUT, generator=generator, dtype=torch.float64).to(dtype),
        "label": torch.randint(N_OUT, (n_rows,), generator=generator),
        "weight": torch.rand(n_rows, generator=generator, dtype=torch.float64).to(dtype),
        "number": torch.arange(n_rows),
    }


class Trunk(nn.Module):
    """What maps rows to outputs; `inputs` names the column it reads."""

    inputs = "x"

    def __init__(self, net: nn.Module, inputs: str = "x") -> None:
        super().__init__()
        self.net = net
        self.inputs = inputs

    def forward(self, rows: Rows) -> Tensor:
        return self.net(rows[self.inputs])


def _mlp(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(N_FEATURES, width), nn.Tanh(), nn.Linear(width, N_OUT))


def _deep(width: int) -> nn.Module:
    layers = [nn.Linear(N_FEATURES, width), nn.SiLU(), nn.Linear(width, width, bias=False), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(width, width), nn.Sigmoid(), nn.Linear(width, N_OUT))


def _normed(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(N_FEATURES, width), nn.LayerNorm(width), nn.GELU(), nn.Linear(width, N_OUT))


def _conv(width: int) -> nn.Module:
    layers = [nn.Unflatten(1, (1, 4, 4)), nn.Conv2d(1, width, 3, padding=1), nn.Tanh(), nn.AvgPool2d(2)]
    return nn.Sequential(*layers, nn.Conv2d(width, 4, 2), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(4, N_OUT))


def _channels_last(width: int) -> nn.Module:
    return _conv(width).to(memory_format=torch.channels_last)


class _Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], width: int) -> None:
        super().__init__()
        self.recurrent = kind(4, width, batch_first=True)
        self.out = nn.Linear(width, N_OUT)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.recurrent(x.reshape(-1, 4, 4))[0][:, -1])


class _Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.enter = nn.Linear(4, 4 * (width // 4 or 1))
        width = self.enter.out_features
        self.layer = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.0, batch_first=True)
        self.out = nn.Linear(width, N_OUT)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layer(self.enter(x.reshape(-1, 4, 4))).mean(1))


class _Embedded(nn.Module):
    def __init__(self, width: int, padding: int | None = None, max_norm: float | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(N_TOKENS, width, padding_idx=padding, max_norm=max_norm)
        self.out = nn.Linear(width, N_OUT)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(torch.tanh(self.embed(tokens).sum(1)))


class _Bag(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(N_TOKENS, width, mode="sum")
        self.out = nn.Linear(width, N_OUT)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(torch.tanh(self.bag(tokens)))


class _Tied(nn.Module):
    """One weight is embedding and output layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(N_TOKENS, width)
        self.score = nn.Linear(width, N_TOKENS, bias=False)
        self.score.weight = self.embed.weight
        self.out = nn.Linear(N_TOKENS, N_OUT)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(torch.tanh(self.score(self.embed(tokens).mean(1))))


class _Reused(nn.Module):
    """One layer is called three times, and registered under two names."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.enter = nn.Linear(N_FEATURES, width)
        self.layer = nn.Linear(width, width)
        self.out = nn.Linear(width, 3)
        self.again = self.layer

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.enter(x))
        for layer in (self.layer, self.again, self.layer):
            hidden = torch.tanh(layer(hidden))
        return self.out(hidden)


class _Experts(nn.Module):
    """A layer for each tag: the part of a replica may have no row for one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.enter = nn.Linear(N_FEATURES, width)
        self.experts = nn.ModuleList(nn.Linear(width, N_OUT) for _ in range(N_TAGS))

    def forward(self, rows: Rows) -> Tensor:
        hidden = torch.tanh(self.enter(rows["x"]))
        parts = [(rows["tag"] == tag).nonzero()[:, 0] for tag in range(N_TAGS)]
        used = []
        for tag, part in enumerate(parts):
            if len(part):
                used.append((part, self.experts[tag](hidden[part])))
        out = hidden[:, :N_OUT] * 0
        for part, expert_output in used:
            out = out.index_add(0, part, expert_output)
        return out


class _Shapes(nn.Module):
    """Parameters without dimensions, without elements, transposed, in a list and in a dict."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.turned = nn.Parameter(torch.randn(N_OUT, N_FEATURES).t() * 0.2)
        self.listed = nn.ParameterList([torch.randn(1, N_OUT, 1), torch.randn(N_OUT)])
        self.named = nn.ParameterDict({"b": torch.randn(2, N_OUT), "a": torch.randn(1)})
        self.unused = nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        out = x @ self.turned * self.scale + self.listed[0][:, :, 0] + self.empty.sum()
        return torch.tanh(out) * self.listed[1] + self.named["b"].sum(0) * self.named["a"]


class _Checkpointed(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(N_FEATURES, width)
        self.out = nn.Linear(width, N_OUT)
        self.middle = nn.Sequential(nn.Tanh(), nn.Linear(width, width), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.out(checkpoint(self.middle, self.first(x), use_reentrant=False))


def _weight_normed(width: int) -> nn.Module:
    first = nn.utils.parametrizations.weight_norm(nn.Linear(N_FEATURES, width))
    return nn.Sequential(first, nn.Tanh(), nn.Linear(width, N_OUT))


def _frozen_batch_norm(width: int) -> nn.Module:
    net = nn.Sequential(nn.Linear(N_FEATURES, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Linear(width, N_OUT))
    nn.init.constant_(net[1].running_mean, 0.25)
    return net.train(mode=False)


def _batch_norm(width: int) -> nn.Module:
    """Return a model whose statistics are those of the global batch: hpcdist converts the layer."""
    layers = [nn.Linear(N_FEATURES, width, bias=False), nn.BatchNorm1d(width), nn.Tanh(), nn.Linear(width, N_OUT)]
    return nn.Sequential(*layers)


#: Trunks by name: a function of the width.
KINDS: dict[str, Callable[[int], nn.Module]] = {
    "mlp": lambda width: Trunk(_mlp(width)),
    "deep": lambda width: Trunk(_deep(width)),
    "normed": lambda width: Trunk(_normed(width)),
    "conv": lambda width: Trunk(_conv(width)),
    "channels_last": lambda width: Trunk(_channels_last(width)),
    "gru": lambda width: Trunk(_Recurrent(nn.GRU, width)),
    "lstm": lambda width: Trunk(_Recurrent(nn.LSTM, width)),
    "attention": lambda width: Trunk(_Attention(width)),
    "embedded": lambda width: Trunk(_Embedded(width), "tokens"),
    "padded": lambda width: Trunk(_Embedded(width, padding=0), "tokens"),
    "max_norm": lambda width: Trunk(_Embedded(width, max_norm=0.5), "tokens"),
    "bag": lambda width: Trunk(_Bag(width), "tokens"),
    "tied": lambda width: Trunk(_Tied(width), "tokens"),
    "reused": lambda width: Trunk(_Reused(width)),
    "experts": _Experts,
    "shapes": lambda width: Trunk(_Shapes(width)),
    "checkpointed": lambda width: Trunk(_Checkpointed(width)),
    "weight_normed": lambda width: Trunk(_weight_normed(width)),
    "frozen_batch_norm": lambda width: Trunk(_frozen_batch_norm(width)),
    "batch_norm": lambda width: Trunk(_batch_norm(width)),
}
#: Trunks that do not take a part without rows, or whose rows are not independent, or that have no second derivative.
NEEDS_ROWS = {"gru", "lstm", "attention"}
HAS_STATISTICS = {"batch_norm"}
NOT_TWICE = {"attention", "checkpointed", "batch_norm", "embedded", "padded", "bag", "tied", "max_norm"}


class Net(nn.Module):
    """A trunk, and heads behind it, of which each forward uses those that it is given."""

    def __init__(self, trunk: nn.Module, n_heads: int, has_counter: bool) -> None:
        super().__init__()
        self.trunk = trunk
        self.heads = nn.ModuleList(nn.Linear(N_OUT, N_OUT) for _ in range(n_heads))
        if has_counter:
            self.register_buffer("n_forwards", torch.zeros(2))

    def forward(self, rows: Rows, heads: str = "all", number: int = 0) -> Tensor:
        out = self.trunk(rows)
        if "n_forwards" in self._buffers:
            self.n_forwards += 0.5
        for index, head in enumerate(self.heads):
            if heads == "tags":
                part = (rows["tag"] == index % N_TAGS).nonzero()[:, 0]
                if len(part):
                    out = out.index_add(0, part, torch.tanh(head(out[part])))
            elif heads == "all" or (heads == "alternate" and (index + number) % 2) or (heads == "rest" and index):
                out = out + torch.tanh(head(out))
        return out


def build_net(kind: str, width: int, n_heads: int, has_counter: bool, dtype: torch.dtype) -> Net:
    """Return a new model; trunks are written for float32 and converted, as programs do."""
    return Net(KINDS[kind](width), n_heads, has_counter).to(dtype)


def build_critic(width: int, dtype: torch.dtype) -> nn.Module:
    """Return a model that judges outputs."""
    return nn.Sequential(nn.Linear(N_OUT, width), nn.Tanh(), nn.Linear(width, 1)).to(dtype)

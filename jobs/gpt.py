"""Train a small GPT to write Python, on the sources of Python's own library. Stop or kill it; it resumes.

mpirun -n 2 python jobs/gpt.py
mpirun -n 2 python jobs/gpt.py --epochs 8 --prompt 'def __init__(self, '
srun --mpi=pmi2 python jobs/gpt.py --width 256 --layers 6 --kib 4096 --precision mixed_bfloat16

It predicts characters, of 2 MiB of text by default. After each epoch of 200 steps it prints the loss in nats per
character, which begins near log(128) = 4.85:

    epoch 1/4  200 steps  ...  loss 2.5  val_loss 2.2
    ...
    epoch 4/4  200 steps  ...  loss 1.6  val_loss 1.6

and at the end it writes: lines with the look of Python, and not yet its sense.
"""

import argparse
import os
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import hpcdist
from hpcdist.callbacks import BackupAndRestore
from hpcdist.losses import SparseCategoricalCrossentropy

N_CHARACTERS = 128  # ASCII


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kib", type=int, default=2048, help="size of the text")
    parser.add_argument("--context", type=int, default=64, help="characters that it sees")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument(
        "--batch", type=int, default=64, help="windows of one step on all ranks together"
    )
    parser.add_argument(
        "--pieces", type=int, default=1, help="in which each rank computes its part of a batch"
    )
    parser.add_argument("--precision", default="float32", help="or mixed_bfloat16")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--steps", type=int, default=200, help="of an epoch")
    parser.add_argument("--prompt", default="def ")
    parser.add_argument("--run-dir", type=Path, default=Path("runs/gpt"))
    return parser.parse_args()


def load_text(n_bytes):
    """Return the first characters of the files of Python's library, as numbers."""
    folder = Path(os.__file__).parent
    source = b""
    for file in sorted(folder.glob("*.py")) + sorted(folder.glob("*/*.py")):
        if len(source) >= n_bytes:
            break
        source += file.read_bytes()
    characters = np.frombuffer(source[:n_bytes], np.uint8)
    return characters[characters < N_CHARACTERS].astype(np.int64)


def windows_of(text, context):
    """Return (n, context) windows of characters, and for each character the next one."""
    n_windows = (len(text) - 1) // context
    n_characters = n_windows * context
    windows = text[:n_characters].reshape(n_windows, context)
    next_characters = text[1 : n_characters + 1].reshape(n_windows, context)
    return windows, next_characters


class Block(nn.Module):
    """Attention to the characters before, then a small network on each character."""

    def __init__(self, width, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.norm_1 = nn.LayerNorm(width)
        self.norm_2 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        """Return (rows, length, width) values of the same shape."""
        rows, length, width = x.shape
        qkv = self.qkv(self.norm_1(x)).view(rows, length, 3, self.n_heads, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attention = scaled_dot_product_attention(query, key, value, is_causal=True)
        attention = attention.transpose(1, 2).reshape(rows, length, width)
        x = x + self.out(attention)
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    """(rows, length) characters -> (rows, length, 128) logits of the next one."""

    def __init__(self, context, width, n_layers, n_heads):
        super().__init__()
        self.characters = nn.Embedding(N_CHARACTERS, width)
        self.places = nn.Embedding(context, width)
        blocks = [Block(width, n_heads) for _ in range(n_layers)]
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, N_CHARACTERS)

    def forward(self, x):
        """Return the logits."""
        places = torch.arange(x.shape[1], device=x.device)
        x = self.characters(x) + self.places(places)
        x = self.blocks(x)
        return self.head(self.norm(x))


def write(model, prompt, context, n_characters=160):
    """Return the prompt and the characters that the model draws after it, the same on every rank."""
    text = [ord(character) for character in prompt]
    draws = np.random.default_rng(1)
    for _ in range(n_characters):
        window = np.array([text[-context:]])
        logits = model.predict_on_batch(window)[0, -1].astype(np.float64)
        chances = np.exp(logits - logits.max())
        chances /= chances.sum()
        character = draws.choice(N_CHARACTERS, p=chances)
        text.append(int(character))
    return "".join(map(chr, text))


def main():
    args = parse_args()
    strategy = hpcdist.MultiWorkerMirroredStrategy()
    hpcdist.set_random_seed(1)
    text = load_text(args.kib << 10)
    n_train = len(text) * 9 // 10
    train_rows = windows_of(text[:n_train], args.context)
    validation_rows = windows_of(text[n_train:], args.context)
    train = hpcdist.Dataset.from_tensor_slices(train_rows)
    validation = hpcdist.Dataset.from_tensor_slices(validation_rows).batch(256)
    with strategy.scope():
        model = hpcdist.Model(GPT(args.context, args.width, args.layers, args.heads))
        model.compile(
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.003),
            loss=SparseCategoricalCrossentropy(from_logits=True),
            global_clipnorm=1.0,
            gradient_accumulation_steps=args.pieces,
            dtype_policy=args.precision,
        )
    model.fit(
        train.shuffle(seed=1).batch(args.batch).repeat(),
        epochs=args.epochs,
        steps_per_epoch=args.steps,
        validation_data=validation,
        validation_steps=10,
        callbacks=[BackupAndRestore(args.run_dir, save_freq=100)],
        verbose=2,
    )
    model.print_once(write(model, args.prompt, args.context))


if __name__ == "__main__":
    main()

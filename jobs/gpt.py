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
    library = Path(os.__file__)
    folder = library.parent
    source = b""
    files = sorted(folder.glob("*.py"))
    files += sorted(folder.glob("*/*.py"))
    for file in files:
        if len(source) >= n_bytes:
            break
        source += file.read_bytes()
    characters = np.frombuffer(source[:n_bytes], np.uint8)
    is_ascii = characters < N_CHARACTERS
    return characters[is_ascii].astype(np.int64)


def windows_of(text, context):
    """Return (n, context) windows of characters, and for each character the next one."""
    shape = (-1, context)
    n_windows = (len(text) - 1) // context
    stop = n_windows * context
    windows = text[:stop]
    next_characters = text[1 : stop + 1]
    return windows.reshape(shape), next_characters.reshape(shape)


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
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
        )

    def forward(self, x):
        """Return (rows, length, width) values of the same shape."""
        rows, length, width = x.shape
        normalized = self.norm_1(x)
        qkv = self.qkv(normalized)
        heads = qkv.view(rows, length, 3, self.n_heads, -1)
        heads = heads.permute(2, 0, 3, 1, 4)
        query, key, value = heads
        attention = scaled_dot_product_attention(query, key, value, is_causal=True)
        attention = attention.transpose(1, 2)
        attention = attention.reshape(rows, length, width)
        x = x + self.out(attention)
        normalized = self.norm_2(x)
        return x + self.mlp(normalized)


class GPT(nn.Module):
    """(rows, length) characters -> (rows, length, 128) logits of the next one."""

    def __init__(self, context, width, n_layers, n_heads):
        super().__init__()
        self.characters = nn.Embedding(N_CHARACTERS, width)
        self.places = nn.Embedding(context, width)
        self.blocks = nn.Sequential()
        for _ in range(n_layers):
            self.blocks.append(Block(width, n_heads))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, N_CHARACTERS)

    def forward(self, x):
        """Return the logits."""
        _, length = x.shape
        numbers = torch.arange(length, device=x.device)
        characters = self.characters(x)
        places = self.places(numbers)
        x = characters + places
        x = self.blocks(x)
        x = self.norm(x)
        return self.head(x)


def write(model, prompt, context, n_characters=160):
    """Return the prompt and the characters that the model draws after it, the same on every rank."""
    text = [ord(character) for character in prompt]
    draws = np.random.default_rng(1)
    for _ in range(n_characters):
        characters = text[-context:]
        window = np.array([characters])
        logits_of_window = model.predict_on_batch(window)
        logits = logits_of_window[0, -1].astype(np.float64)
        logits -= logits.max()
        chances = np.exp(logits)
        chances /= chances.sum()
        character = draws.choice(N_CHARACTERS, p=chances)
        text.append(int(character))
    characters = map(chr, text)
    return "".join(characters)


def main():
    args = parse_args()
    strategy = hpcdist.MultiWorkerMirroredStrategy()
    hpcdist.set_random_seed(1)
    n_bytes = args.kib << 10
    text = load_text(n_bytes)
    n_train = len(text) * 9 // 10
    train_text = text[:n_train]
    validation_text = text[n_train:]
    train_rows = windows_of(train_text, args.context)
    validation_rows = windows_of(validation_text, args.context)
    train = hpcdist.Dataset.from_tensor_slices(train_rows).shuffle(seed=1)
    batches = train.batch(args.batch)
    validation = hpcdist.Dataset.from_tensor_slices(validation_rows)
    with strategy.scope():
        network = GPT(args.context, args.width, args.layers, args.heads)
        model = hpcdist.Model(network)
        model.compile(
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.003),
            loss=SparseCategoricalCrossentropy(from_logits=True),
            global_clipnorm=1.0,
            gradient_accumulation_steps=args.pieces,
            dtype_policy=args.precision,
        )
    backup = BackupAndRestore(args.run_dir, save_freq=100)
    model.fit(
        batches.repeat(),
        epochs=args.epochs,
        steps_per_epoch=args.steps,
        validation_data=validation.batch(256),
        validation_steps=10,
        callbacks=[backup],
        verbose=2,
    )
    written = write(model, args.prompt, args.context)
    model.print_once(written)


if __name__ == "__main__":
    main()

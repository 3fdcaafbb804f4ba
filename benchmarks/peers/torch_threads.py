"""Time training steps of one torch process that has all cores: threads instead of ranks.

python benchmarks/peers/torch_threads.py --model mlp --threads 2 --out out/peers/threads.json
"""

import sys
from pathlib import Path

import torch
from clock import parser, time_rounds, write

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from models import N_BATCHES, adam, batches, build, train_step


def main():
    options = parser(__doc__)
    options.add_argument("--threads", type=int, default=2)
    args = options.parse_args()
    torch.set_num_threads(args.threads)
    model = build(args.model)
    data = batches(args.batch, 0, 1)
    optimizer = adam(model)

    def train(n_steps):
        for number in range(n_steps):
            loss = train_step(model, optimizer, data[number % N_BATCHES])
        return loss.item()

    rounds = time_rounds(train, args)
    name = f"torch, one process, {args.threads} threads"
    environment = {"torch": torch.__version__}
    write(name, rounds, args, environment, is_baseline=False)


if __name__ == "__main__":
    main()

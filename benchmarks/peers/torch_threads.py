"""Time training steps of one torch process that has all cores: threads instead of ranks.

python benchmarks/peers/torch_threads.py --model mlp --threads 2 --out out/peers
"""

import argparse
import json
import resource
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from models import MODELS, N_BATCHES, adam, batches, build, train_step  # noqa: E402


def cpu_s():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for torch-threads-MODEL.json")
    parser.add_argument("--model", choices=MODELS, default="mlp")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=100, help="steps of a block; two blocks a round")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = build(args.model)
    optimizer, data = adam(model), batches(args.batch, 0, 1)

    def block():
        started, cpu_before = time.perf_counter(), cpu_s()
        for number in range(args.steps):
            loss = train_step(model, optimizer, data[number % N_BATCHES])
        times = (time.perf_counter() - started) / args.steps, (cpu_s() - cpu_before) / args.steps
        assert torch.isfinite(loss), f"torch_threads: expected a finite loss, got {loss}"
        return times

    block()
    rounds = [(block(), block()) for _ in range(args.rounds)]
    name = f"torch, one process, {args.threads} threads"
    one = {"case": args.model, "bytes": None, "baselines": []}
    one["samples"] = {name: [(first[0], second[0]) for first, second in rounds]}
    one["cpu"] = {name: [(first[1], second[1]) for first, second in rounds]}
    environment = {"torch": torch.__version__, "threads": args.threads}
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"torch-threads-{args.model}.json"
    path.write_text(json.dumps({"label": "torch", "environment": environment, "cases": [one]}, indent=1))


if __name__ == "__main__":
    main()

"""Scripts of `loops.py` as programs of their own: ranks that are stopped by SIGTERM, or killed by SIGKILL, at random.

python tests/support/loop_processes.py --ranks 2 --scripts 10 --seed 1
"""

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

LOOPS = Path(__file__).with_name("loops.py")
MPIRUN = Path(os.environ.get("TEST_MPIRUN", Path(sys.executable).parent / "mpirun"))
ATTEMPT_S = 60
MAX_ATTEMPTS = 4


def attempt(seed, n_ranks, folder, end=None):
    """Run one attempt of a script; return what it leaves if it finishes, else None, and its output."""
    result = folder / "result.pt"
    command = [MPIRUN, "-n", n_ranks, sys.executable, "-W", "ignore", LOOPS, "--only", seed, "--attempt", result]
    command += ["--folder", folder] + (["--end", *end] if end else [])
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "HPCDIST_TIMEOUT_S": "30"}
    done = subprocess.run(
        list(map(str, command)),
        env=environ,
        capture_output=True,
        text=True,
        timeout=ATTEMPT_S,
        start_new_session=True,
        check=False,
    )
    return (torch.load(result) if result.exists() else None), done.stdout + done.stderr


def check(seed, n_ranks, folder):
    """Return what a script did, and why it is wrong, or nothing."""
    random_numbers = random.Random(seed)
    for name in ("unbroken", "ended"):
        (folder / name).mkdir()
    unbroken, output = attempt(seed, n_ranks, folder / "unbroken")
    if unbroken is None:
        if "UsageError" in output or "expected" in output:
            return ("refused", "")
        return ("failed", output[-2000:])
    for _ in range(MAX_ATTEMPTS):
        step = random_numbers.randint(1, unbroken["steps"])
        end = (random_numbers.choice(("stop", "SIGKILL")), step, random_numbers.randrange(n_ranks))
        ended, output = attempt(seed, n_ranks, folder / "ended", end)
        if ended is not None:
            break
    else:
        ended, output = attempt(seed, n_ranks, folder / "ended")
    if ended is None:
        return "failed", output[-2000:]
    for name, value in unbroken.items():
        if not torch.equal(torch.as_tensor(value), torch.as_tensor(ended[name])):
            return "ran", f"{name} differs after restarts: {value} and {ended[name]}"
    return "ran", ""


def main():
    """Run scripts, and print what went wrong."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--scripts", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    counts = {}
    wrong = []
    started = time.monotonic()
    for seed in range(options.seed, options.seed + options.scripts):
        with tempfile.TemporaryDirectory() as folder:
            outcome, why = check(seed, options.ranks, Path(folder))
        counts[outcome] = counts.get(outcome, 0) + 1
        if why:
            wrong.append(seed)
            print(seed, outcome, why, flush=True)
    print(f"{options.ranks} ranks: {counts}, wrong: {wrong}, {time.monotonic() - started:.0f} s")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()

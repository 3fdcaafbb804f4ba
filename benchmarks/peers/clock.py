"""Functions of all peers: options, timing of blocks, and a report that `step.py --merge` reads."""

import argparse
import json
import resource
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: Wall seconds and CPU-seconds of the two blocks of each round, as in the launches that peers are compared with.
Rounds = list[list[tuple[float, float]]]


def parser(doc: str) -> argparse.ArgumentParser:
    """Return the options that all peers have."""
    options = argparse.ArgumentParser(description=doc.splitlines()[0])
    options.add_argument("--out", type=Path, required=True, help="file for the report, a JSON")
    options.add_argument("--model", default="mlp")
    options.add_argument(
        "--batch",
        type=int,
        default=64,
        help="rows of one step on all ranks together",
    )
    options.add_argument("--rounds", type=int, default=10, help="pairs of blocks")
    options.add_argument("--steps", type=int, default=100, help="steps of a block")
    return options


def time_rounds(
    train: Callable[[int], float], args: argparse.Namespace, n_processes: int = 1
) -> Rounds:
    """Return, per round, wall and CPU-seconds per step of two blocks.

    The CPU-seconds are this process's, times the number of processes. The last block's loss must be below the first.

    Args:
        train: function that takes a number of steps and returns the last loss.
        args: the command line, with `rounds` and `steps`.
        n_processes: number of processes that train together.
    """
    first = train(1)

    def block() -> tuple[float, float]:
        started = time.perf_counter()
        cpu_before = _cpu_s()
        block.loss = train(args.steps)
        wall = time.perf_counter() - started
        cpu = _cpu_s() - cpu_before
        return wall / args.steps, cpu / args.steps * n_processes

    block()
    rounds = [[block(), block()] for _ in range(args.rounds)]
    if not block.loss < first:
        raise AssertionError(
            f"peer: expected a loss below the first, {first}, got {block.loss}; do not use its times."
        )
    return rounds


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def write(
    name: str,
    rounds: Rounds,
    args: argparse.Namespace,
    environment: dict[str, Any],
    is_baseline: bool,
) -> None:
    """Write the report of one contender."""
    wall = []
    cpu = []
    for (wall_1, cpu_1), (wall_2, cpu_2) in rounds:
        wall.append([wall_1, wall_2])
        cpu.append([cpu_1, cpu_2])
    case = {
        "case": args.model,
        "bytes": None,
        "baselines": [name] if is_baseline else [],
        "samples": {name: wall},
        "cpu": {name: cpu},
    }
    report = {"label": name, "environment": environment, "cases": [case]}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=1))


def free_ports(n_ports: int) -> list[int]:
    """Return ports that no other process uses."""
    listeners = [socket.create_server(("localhost", 0)) for _ in range(n_ports)]
    ports: list[int] = []
    for listener in listeners:
        _, port = listener.getsockname()
        ports.append(port)
        listener.close()
    return ports

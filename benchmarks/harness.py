"""The statistics of every benchmark: order of blocks, paired ratios, their interval, and the gate."""

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

#: The same code on both sides must come out within these, else nothing of the case may be quoted.
GATE_LOW = 0.97
GATE_HIGH = 1.03
#: Seconds after which it is said how far the rounds are, and again.
SILENCE_S = 10.0
#: What the second side of the gate is called: the name of the first and this.
AGAIN = " (A/A)"

#: contender -> its two samples of every round, in the order in which they were taken.
Samples = Mapping[str, Sequence[tuple[float, float]]]


@dataclass(frozen=True)
class Interval:
    """A median and the 95 % interval around it."""

    median: float
    low: float
    high: float


def block_order(names: Sequence[str], round_number: int) -> list[str]:
    """Return the blocks of one round: everyone once, then everyone in the opposite order (A B B A).

    A drift that is linear in time cancels out of every pair. Each round starts with another contender.
    """
    start = round_number % len(names)
    forth = [*names[start:], *names[:start]]
    return forth + forth[::-1]


def run_rounds(
    contenders: Mapping[str, Callable[[], tuple[float, float]]], n_rounds: int
) -> tuple[dict[str, list[tuple[float, float]]], dict[str, list[tuple[float, float]]]]:
    """Run every contender twice a round; return wall seconds and CPU-seconds of both blocks of every round.

    Collective where the contenders are: every rank runs the same blocks in the same order.
    """
    began_at = said_at = time.monotonic()
    wall: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    cpu: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    for number in range(n_rounds):
        round_times: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
        for name in block_order(list(contenders), number):
            if time.monotonic() - said_at > SILENCE_S:
                said_at = time.monotonic()
                say(f"round {number + 1} of {n_rounds}, {name}; {said_at - began_at:.0f} s so far")
            round_times[name].append(contenders[name]())
        for name, ((wall_1, cpu_1), (wall_2, cpu_2)) in round_times.items():
            wall[name].append((wall_1, wall_2))
            cpu[name].append((cpu_1, cpu_2))
    return wall, cpu


def say(text: str) -> None:
    """Print a line for whoever waits, on one rank, between blocks, where no time is taken."""
    rank = (
        os.environ.get("PMI_RANK")
        or os.environ.get("OMPI_COMM_WORLD_RANK")
        or os.environ.get("SLURM_PROCID")
        or "0"
    )
    if rank == "0":
        print(text, file=sys.stderr, flush=True)


def per_round(samples: Sequence[tuple[float, float]]) -> np.ndarray:
    """Return one value per round: the mean of its two blocks, in which a linear drift cancels."""
    return np.asarray(samples, dtype=np.float64).mean(axis=1)


def paired_ratios(
    reference: Sequence[tuple[float, float]], contender: Sequence[tuple[float, float]]
) -> np.ndarray:
    """Return, round by round, how many times faster `contender` is than `reference`."""
    if len(reference) != len(contender):
        raise ValueError(
            f"paired_ratios: expected equally many rounds, got {len(reference)} and {len(contender)}."
        )
    return per_round(reference) / per_round(contender)


def bootstrap_interval(values: np.ndarray, n_draws: int = 4000, seed: int = 0) -> Interval:
    """Return the median of `values` with its 95 % percentile bootstrap interval.

    Source: Efron and Tibshirani, An Introduction to the Bootstrap, 1993, chapter 13.
    """
    draws = np.random.default_rng(seed).integers(0, len(values), (n_draws, len(values)))
    low, high = np.percentile(np.median(values[draws], axis=1), [2.5, 97.5])
    return Interval(float(np.median(values)), float(low), float(high))


def gate_ratio(samples: Samples) -> float | None:
    """Return the median ratio of what ran under two names, the one farthest from 1 if several did; None if none did."""
    pairs = [name for name in samples if name + AGAIN in samples]
    ratios = [
        float(np.median(paired_ratios(samples[name], samples[name + AGAIN]))) for name in pairs
    ]
    return max(ratios, key=lambda ratio: abs(np.log(ratio)), default=None)


def passes_gate(ratio: float | None) -> bool:
    """Return whether ratios of this case may be quoted."""
    return ratio is not None and GATE_LOW <= ratio <= GATE_HIGH


def strongest(samples: Samples, baselines: Sequence[str]) -> str:
    """Return the baseline with the lowest median time."""
    return min(
        (name for name in baselines if name in samples),
        key=lambda name: float(np.median(per_round(samples[name]))),
    )

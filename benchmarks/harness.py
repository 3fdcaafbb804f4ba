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
#: Seconds between two lines that say how far the rounds are.
SILENCE_S = 10.0
#: Variables that hold the rank of a process, by launcher.
_RANK_VARIABLES = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")
#: Ending of the name of the gate's second side; before it is the name of the first side.
AGAIN = " (A/A)"

#: Two numbers of a contender: its two samples in a round, or wall seconds and CPU-seconds of a block.
Pair = tuple[float, float]
#: contender -> its two samples in every round, in the order in which they were taken.
Samples = Mapping[str, Sequence[Pair]]
#: The same, while rounds are run.
Rounds = dict[str, list[Pair]]
#: A function that runs a block, and returns its wall seconds and CPU-seconds.
Block = Callable[[], Pair]


@dataclass(frozen=True)
class Interval:
    """A median and the 95 % interval around it."""

    median: float
    low: float
    high: float


def block_order(names: Sequence[str], round_number: int) -> list[str]:
    """Return the names of one round's blocks: each name once, then each in the opposite order (A B B A).

    A drift that is linear in time cancels out of every pair. Each round starts with another contender.
    """
    start = round_number % len(names)
    forward = [*names[start:], *names[:start]]
    backward = forward[::-1]
    return forward + backward


def run_rounds(contenders: Mapping[str, Block], n_rounds: int) -> tuple[Rounds, Rounds]:
    """Run every contender twice a round; return wall seconds and CPU-seconds of both blocks of every round.

    Collective if the contenders are: every rank runs the same blocks in the same order.

    Args:
        contenders: name -> function that runs a block.
        n_rounds: number of rounds.
    """
    began_at = time.monotonic()
    said_at = began_at
    names = list(contenders)
    wall: Rounds = {}
    cpu: Rounds = {}
    for number in range(n_rounds):
        blocks: Rounds = {}
        for name in block_order(names, number):
            now = time.monotonic()
            if now - said_at > SILENCE_S:
                said_at = now
                elapsed_s = round(now - began_at)
                say(f"round {number + 1} of {n_rounds}, {name}; {elapsed_s} s so far")
            block = contenders[name]
            times = block()
            blocks.setdefault(name, []).append(times)
        for name in names:
            first, second = blocks[name]
            wall_pair, cpu_pair = zip(first, second, strict=True)
            wall.setdefault(name, []).append(wall_pair)
            cpu.setdefault(name, []).append(cpu_pair)
    return wall, cpu


def say(text: str) -> None:
    """Print a line for the person who waits, on one rank. Called between blocks, where no time is taken."""
    ranks = [os.environ[variable] for variable in _RANK_VARIABLES if variable in os.environ]
    if not ranks or ranks[0] == "0":
        print(text, file=sys.stderr, flush=True)


def per_round(samples: Sequence[Pair]) -> np.ndarray:
    """Return one value per round: the mean of its two blocks, in which a linear drift cancels."""
    pairs = np.asarray(samples, dtype=np.float64)
    return pairs.mean(axis=1)


def median_of_rounds(samples: Sequence[Pair]) -> float:
    """Return the median over the rounds."""
    return float(np.median(per_round(samples)))


def paired_ratios(reference: Sequence[Pair], contender: Sequence[Pair]) -> np.ndarray:
    """Return, round by round, how many times faster `contender` is than `reference`."""
    n_rounds = len(reference)
    if len(contender) != n_rounds:
        raise ValueError(
            f"paired_ratios: expected equally many rounds, got {n_rounds} and {len(contender)}."
        )
    return per_round(reference) / per_round(contender)


def bootstrap_interval(values: np.ndarray, n_draws: int = 4000, seed: int = 0) -> Interval:
    """Return the median of `values` with its 95 % percentile bootstrap interval.

    Source: Efron and Tibshirani, An Introduction to the Bootstrap, 1993, chapter 13.
    """
    n_values = len(values)
    generator = np.random.default_rng(seed)
    draws = generator.integers(0, n_values, (n_draws, n_values))
    medians = np.median(values[draws], axis=1)
    low, high = np.percentile(medians, [2.5, 97.5])
    median = np.median(values)
    return Interval(float(median), float(low), float(high))


def gate_ratio(samples: Samples) -> float | None:
    """Return the median ratio of the two sides of the gate; None without a gate.

    If several contenders ran under two names, the ratio is the one that is farthest from 1.
    """
    ratios = []
    for name, first_side in samples.items():
        second_side = samples.get(name + AGAIN)
        if second_side is not None:
            ratios_of_rounds = paired_ratios(first_side, second_side)
            ratio = np.median(ratios_of_rounds)
            ratios.append(float(ratio))
    return max(ratios, key=_distance_from_1, default=None)


def _distance_from_1(ratio: float) -> float:
    """Return how far a ratio is from 1; a ratio and its inverse are equally far."""
    return abs(float(np.log(ratio)))


def passes_gate(ratio: float | None) -> bool:
    """Return whether ratios of this case may be quoted."""
    return ratio is not None and GATE_LOW <= ratio <= GATE_HIGH


def strongest(samples: Samples, baselines: Sequence[str]) -> str:
    """Return the baseline with the lowest median time."""
    medians = {}
    for name in baselines:
        if name in samples:
            medians[name] = median_of_rounds(samples[name])
    return min(medians, key=medians.__getitem__)

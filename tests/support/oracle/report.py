"""Counts and differences of replayed programs."""

import argparse
from collections import Counter
from pathlib import Path
from typing import Any

from program import read_lines


def report(paths: list[Path]) -> int:
    """Print the outcomes of each file of replays, the reasons met and every other difference; return their number."""
    reasons: Counter[str] = Counter()
    different = []
    print(f"{'replay':24} {'same':>6} {'intended':>9} {'different':>10} {'unanswered':>11}")
    for path in paths:
        records = list(read_lines(path))
        outcomes = Counter(record["outcome"] for record in records)
        counts = [outcomes[name] for name in ("same", "intended", "different", "unanswered")]
        print("{:24} {:6} {:9} {:10} {:11}".format(path.stem, *counts))
        reasons.update(record["reason"] for record in records if record["outcome"] == "intended")
        different += [(path.stem, record) for record in records if record["outcome"] == "different"]
    for name, count in reasons.most_common():
        print(f"intended: {count:6} {name}")
    print_differences(different)
    return len(different)


def print_differences(different: list[tuple[str, dict[str, Any]]]) -> None:
    """Print each program that differs once, with where it does, and the first text."""
    by_number: dict[int, list[tuple[str, dict[str, Any]]]] = {}
    for name, record in different:
        by_number.setdefault(record["number"], []).append((name, record))
    print(f"{len(by_number)} programs differ")
    for number, occurrences in sorted(by_number.items()):
        name, record = occurrences[0]
        text = next((text for text in record["texts"] if text), "")
        replay_names = ", ".join(replay_name for replay_name, _ in occurrences)
        print(f"program {number}, step {record['step']}, on {replay_names}: {text[:300]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("paths", type=Path, nargs="+")
    raise SystemExit(report(parser.parse_args().paths) > 0)


if __name__ == "__main__":
    main()

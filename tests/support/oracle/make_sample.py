"""Choose the programs that CI replays from those that `make oracle` found to be the same on every number of ranks.

.venv/bin/python tests/support/oracle/make_sample.py --out out/oracle
"""

import argparse
from collections import Counter
from pathlib import Path
from typing import Any

from program import SAMPLE, line_of, read_lines, write_sample
from program_draws import SIZES
from record_programs import path_of

#: Programs of each number of replicas; more of what more numbers of ranks can run.
N_OF_SIZE = {1: 15, 2: 60, 3: 60, 4: 70, 5: 30, 6: 25, 7: 20, 8: 25}
LONGEST_LINE = 8000
TENSORFLOW = "2.21.0"


def agreeing(folder: Path) -> set[int]:
    """Return the numbers of the programs that were replayed, with the same answers in every replay."""
    outcomes: dict[int, set[str]] = {}
    for path in folder.glob("replay-*.jsonl"):
        for record in read_lines(path):
            outcomes.setdefault(record["number"], set()).add(record["outcome"])
    return {number for number, distinct_outcomes in outcomes.items() if distinct_outcomes == {"same"}}


def chosen(records: list[dict[str, Any]], n_wanted: int) -> list[dict[str, Any]]:
    """Return programs of one number of replicas: those whose steps are rarest among the chosen ones first."""
    counts: Counter[str] = Counter()
    selected = []
    candidates = [record for record in records if len(line_of(record)) <= LONGEST_LINE]
    while candidates and len(selected) < n_wanted:
        best = min(candidates, key=lambda record: min(counts[kind] for kind in kinds_of(record)))
        counts.update(kinds_of(best))
        candidates.remove(best)
        selected.append(best)
    return selected


def kinds_of(record: dict[str, Any]) -> set[str]:
    """Return what happens in a program: the calls, those of replicas, and which of them fail."""
    kinds = set()
    for step, answer in zip(record["steps"], record["answer"], strict=True):
        if answer is None:
            outcome = "skipped"
        elif answer["error"]:
            outcome = "error"
        else:
            outcome = "result"
        kinds |= {f"{step['call']} {outcome}"}
        kinds |= {f"{inner['call']} in {step['call']} {outcome}" for inner in step.get("body", ())}
    return kinds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/oracle"))
    folder = parser.parse_args().out
    same = agreeing(folder)
    sample = []
    for size in sorted(set(SIZES)):
        sample += chosen(
            [line for line in read_lines(path_of(folder, size)) if line["number"] in same], N_OF_SIZE[size]
        )
    write_sample(TENSORFLOW, sample)
    print(f"{len(sample)} programs, {SAMPLE.stat().st_size} bytes")


if __name__ == "__main__":
    main()

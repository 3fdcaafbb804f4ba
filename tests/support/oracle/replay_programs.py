"""Replay recorded programs with hpcdist on the ranks of this job, and write what differs.

    mpirun -n 2 python tests/support/oracle/replay_programs.py --answers out/oracle --out out/oracle/replay-2.jsonl

Programs of fewer replicas than ranks are left out, and those that are in the output already. Each line of the output is
the number of a program, its outcome ("same", "intended", "different", "unanswered"), the step, reason and texts.
"""

import argparse
import functools
from pathlib import Path
from typing import Any

from compare import difference
from intended import Meeting, reason_of
from interpreter import Interpreter
from library_hpcdist import Hpcdist
from mpi4py import MPI
from program import line_of, read_lines
from record_programs import path_of


@functools.cache
def library_of(n_replicas: int, is_default: bool) -> Hpcdist:
    return Hpcdist(n_replicas, is_default)


def replay(program: dict[str, Any], comm: Any, is_default: bool = False) -> dict[str, Any]:
    """Return the outcome of one program, equal on all ranks. Steps after a difference are not run.

    Collective: all ranks.
    """
    record = {"number": program["number"], "n_replicas": program["n_replicas"], "step": None, "reason": None}
    if program["answer"] is None:
        return {**record, "outcome": "unanswered", "texts": []}
    library = library_of(program["n_replicas"], is_default)
    owned_replicas = library.strategy.own_replicas
    answers = Interpreter(library, program).answers()
    for number, (step, expected) in enumerate(zip(program["steps"], program["answer"], strict=True)):
        answer = next(answers)
        text = difference(answer, expected, owned_replicas, step.get("exact", False))
        if text:
            reason = reason_of(Meeting(step, program, answer, expected, text, owned_replicas))
        else:
            reason = None
        texts = comm.allgather((text, reason))
        if any(text for text, _ in texts):
            return {**record, "step": number, **verdict(texts)}
    return {**record, "outcome": "same", "texts": []}


def verdict(texts: list[tuple[str, str | None]]) -> dict[str, Any]:
    """Return the outcome where ranks found differences: intended only if each of them is."""
    reasons = [reason for text, reason in texts if text]
    is_intended = all(reason is not None for reason in reasons)
    outcome = "intended" if is_intended else "different"
    return {"outcome": outcome, "reason": reasons[0] if is_intended else None, "texts": [text for text, _ in texts]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--answers", type=Path, default=Path("out/oracle"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--default-strategy", action="store_true", help="of programs with a replica for each rank")
    parser.add_argument("--number", type=int, help="this program alone")
    options = parser.parse_args()
    comm = MPI.COMM_WORLD.Dup()
    done = comm.bcast({record["number"] for record in read_lines(options.out)})
    if options.default_strategy:
        sizes = [comm.size]
    else:
        sizes = range(comm.size, 9)
    for size in sizes:
        for program in read_lines(path_of(options.answers, size)):
            if program["number"] in done or (program["ranks"] and comm.size not in program["ranks"]):
                continue
            if options.number in (None, program["number"]):
                replay_one(program, comm, options)


def replay_one(program: dict[str, Any], comm: Any, options: Any) -> None:
    """Replay a program; rank 0 writes its number before, so that it is known which one ended the job."""
    running = options.out.with_suffix(".running")
    if comm.rank == 0:
        running.write_text(str(program["number"]))
    outcome = replay(program, comm, options.default_strategy)
    if comm.rank == 0:
        with options.out.open("a") as file:
            file.write(line_of(outcome))
        running.unlink()


if __name__ == "__main__":
    main()

"""Record what TensorFlow answers to random programs: one file of lines for each number of replicas, continued if there.

    .venv-tensorflow/bin/python tests/support/oracle/record_programs.py --programs 5000 --out out/oracle

Each number of replicas has processes of its own, since strategies of different sizes would mistake each other's
collectives, and one process at a time runs. A program during which TensorFlow hangs, or aborts its collectives, gets no
answer; what follows is run by a new process.
"""

import argparse
import multiprocessing
import time
from pathlib import Path
from typing import Any

from cases import Error
from program import line_of, read_lines
from program_draws import SIZES, draw_program

PROGRAMS_PER_PROCESS = 400
#: Programs after which it is the turn of the next number of replicas, so that what is there is always a mixture.
PROGRAMS_PER_ROUND = 2700
SECONDS_PER_PROGRAM = 60
ABORTED = ("AbortedError", "CancelledError", "UnavailableError", "DeadlineExceededError")


def is_abort(error: Error) -> bool:
    """Return whether the collectives of the process do not work any more."""
    return error.type in ABORTED or "Collective ops is aborted" in error.message


def path_of(folder: Path, n_replicas: int) -> Path:
    return folder / f"answers-{n_replicas}.jsonl"


def record_some(path: Path, n_replicas: int, numbers: list[int]) -> None:
    """Answer programs, in a process that has not used TensorFlow before, and append each to the file."""
    from interpreter import Interpreter
    from library_tensorflow import TensorFlow, start

    start(n_replicas)
    libraries = {one_device: TensorFlow(n_replicas, one_device) for one_device in (False, True)}
    for number in numbers:
        program = draw_program(number)
        library = libraries[program["one_device"]]
        if any(step.get("as_function") for step in program["steps"]):  # PER_REPLICA changes a strategy for good
            library = TensorFlow(n_replicas, program["one_device"])
        answer = list(Interpreter(library, program).answers())
        for step_answer in answer:
            if step_answer is not None:
                step_answer.pop("raised", None)
        is_aborted = any(
            step_outcome and step_outcome["error"] and is_abort(step_outcome["error"]) for step_outcome in answer
        )
        if is_aborted:
            recorded_answer = None
        else:
            recorded_answer = answer
        append(path, {**program, "answer": recorded_answer})
        if is_aborted:
            return


def append(path: Path, record: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(line_of(record))


def record_size(folder: Path, n_replicas: int, n_programs: int) -> None:
    path = path_of(folder, n_replicas)
    while True:
        done = numbers_in(path)
        unanswered = []
        for n in range(n_programs):
            if SIZES[n % len(SIZES)] == n_replicas and n not in done:
                unanswered.append(n)
        if not unanswered:
            return
        print(f"{n_replicas} replicas: {len(unanswered)} programs to answer", flush=True)
        if not run_watched(path, n_replicas, unanswered[:PROGRAMS_PER_PROCESS]):
            done = numbers_in(path)
            stuck = next(number for number in unanswered if number not in done)
            append(path, {**draw_program(stuck), "answer": None})


def numbers_in(path: Path) -> set[int]:
    """Return the numbers of the programs that have an answer, without those that are drawn otherwise by now."""

    def is_current(record: dict[str, Any]) -> bool:
        program = {name: value for name, value in record.items() if name != "answer"}
        return line_of(program) == line_of(draw_program(record["number"]))

    records = list(read_lines(path))
    current = [record for record in records if is_current(record)]
    if len(current) < len(records):
        path.write_text("".join(map(line_of, current)))
    return {record["number"] for record in current}


def run_watched(path: Path, n_replicas: int, numbers: list[int]) -> bool:
    """Run `record_some` in a process of its own; return False when it hangs or dies."""
    process = multiprocessing.get_context("spawn").Process(target=record_some, args=(path, n_replicas, numbers))
    process.start()
    size = -1
    since = time.monotonic()
    while process.is_alive():
        process.join(0.5)
        now = path.stat().st_size if path.exists() else 0
        if now != size:
            size = now
            since = time.monotonic()
        if time.monotonic() - since > SECONDS_PER_PROGRAM:
            process.kill()
            process.join()
            return False
    return process.exitcode == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=5000)
    parser.add_argument("--out", type=Path, default=Path("out/oracle"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for first in range(0, options.programs, PROGRAMS_PER_ROUND):
        for n_replicas in sorted(set(SIZES)):
            record_size(options.out, n_replicas, min(first + PROGRAMS_PER_ROUND, options.programs))


if __name__ == "__main__":
    main()

"""Runs random training programs on several ranks, and compares each with plain torch in one process.

`python tests/support/fuzz_torch.py --ranks 2 --programs 0:2000 --out out/fuzz-2.jsonl` starts jobs of 2 ranks until
each program has an outcome, a line of JSON; 2,000 take a quarter of an hour. A program that ends its job is recorded,
and the next job begins behind it. What the file has is not run again. `--only 17` prints a program and runs it alone,
with its traceback.

Outcomes:
    equal: the same weights, gradients, and optimizer state as plain torch, and the same bits on all ranks
    refused: an error of hpcdist on all ranks
    one-sided: an error of hpcdist on some ranks, while the others went on or waited for them; it ends a job
    raised: another error, which plain torch raises too, or which the rows of one rank alone make it raise
    plain refused: an error of plain torch alone, such as of a gradient that shares its memory, which a sum does not
    unstable: plain torch itself depends on the order of rows
    differs, ranks differ, other error, hang, died, kept alive: findings
"""

import argparse
import collections
import dataclasses
import faulthandler
import gc
import itertools
import json
import os
import subprocess
import sys
import threading
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

LIMIT_S = 90
#: The error of a rank whose rows reach frozen parameters only.
NO_GRADIENT = "RuntimeError: element 0 of tensors does not require grad"
#: How long a rank waits for the others at the end of a program, after an error and without one.
PATIENCE_S = {True: 5.0, False: 60.0}
FINDINGS = {"differs", "ranks differ", "other error", "hang", "died", "kept alive"}


def parse(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--programs", default="0:100", help="first and last seed, A:B without B")
    parser.add_argument("--out", type=Path, default=Path("out/fuzz.jsonl"), help="file of outcomes")
    parser.add_argument(
        "--ranks", type=int, help="number of ranks of the jobs to start; without it, run as one rank of a job"
    )
    parser.add_argument("--only", type=int, help="one program, with its text")
    return parser.parse_args(arguments)


def outcomes(path):
    """Return the last line of each program in a file."""
    if path.exists():
        lines = path.read_text().splitlines()
    else:
        lines = []
    records = {}
    for line in lines:
        record = json.loads(line)
        if record["outcome"] != "started" or record["program"] not in records:
            records[record["program"]] = record
    return records


# -- a rank of a job -------------------------------------------------------------------------------------------------


class Worker:
    """One rank of a job that runs programs.

    Args:
        comm: the ranks.
        path: of the outcomes; None: they are printed.
    """

    def __init__(self, comm, path):
        self.comm = comm
        self.path = path
        self.program = None

    def record(self, **fields):
        line = json.dumps({"program": self.program, **fields})
        if self.path is None:
            print(f"rank {self.comm.rank}: {line}", flush=True)
            return
        with self.path.open("a") as file:
            file.write(f"{line}\n")

    def run(self, seed):
        """Run one program on all ranks; return its outcome on rank 0."""
        from torch_fuzz.draw import draw_program

        self.program = seed
        program = draw_program(seed)
        if self.comm.rank == 0:
            self.record(outcome="started")
        timer = threading.Timer(LIMIT_S, self.give_up)
        timer.daemon = True
        timer.start()
        local_result = run_guarded(program, self.comm)
        self.meet(local_result)
        outcome = self.judge(program, self.comm.allgather(local_result))
        timer.cancel()
        return outcome

    def give_up(self):
        faulthandler.dump_traceback(sys.stderr)
        self.record(outcome="hang", rank=self.comm.rank)
        os._exit(3)

    def meet(self, local_result):
        """Wait for all ranks; end the job where some do not come."""
        request = self.comm.Ibarrier()
        is_late = time.monotonic() + PATIENCE_S["error" in local_result]
        while not request.Test():
            time.sleep(0.0005)
            if time.monotonic() > is_late:
                error = local_result.get("error")
                if error is None:
                    kind = "hang"
                else:
                    kind = kind_of(local_result, "one-sided")
                self.record(outcome=kind, rank=self.comm.rank, error=error, traceback=local_result.get("traceback"))
                os._exit(3)

    def judge(self, program, results):
        """Return the outcome of what the ranks have, on rank 0; on all ranks whether the job is fit for another one."""
        errors = [rank_result.get("error") for rank_result in results]
        is_apart = len({rank_result["n_collectives"] for rank_result in results}) > 1
        if self.comm.rank == 0:
            outcome = judge_results(program, results)
            if any(rank_result["is_alive"] for rank_result in results):
                outcome = {"outcome": "kept alive", "after": outcome}
            self.record(**outcome)
        if (any(errors) and is_apart) or any(rank_result["is_alive"] for rank_result in results):
            self.comm.Barrier()
            os._exit(3)  # ranks are at different collectives, or another strategy is there: only a new job can follow


def kind_of(local_result, kind_of_ours):
    """Return the outcome of a program that ended with an error on this rank, and not on another one."""
    if local_result["is_ours"]:
        return kind_of_ours
    if local_result["error"].startswith(NO_GRADIENT):
        return "raised"
    return "other error"


def run_guarded(program, comm):
    """Return what a program leaves on this rank, or its error."""
    from torch_fuzz.compare import plain_state
    from torch_fuzz.distributed import cluster_of, run_distributed

    from hpcdist.errors import HpcdistError
    from hpcdist.program import owners

    local_result: dict[str, Any] = {"n_collectives": 0}
    earlier = set(map(id, owners.alive()))  # of other tests
    with cluster_of(program.cluster):
        try:
            state, numbers = run_distributed(program, comm)
            local_result |= {"state": plain_state(state), "numbers": numbers}
            del state
        except Exception as error:
            local_result |= {"error": f"{type(error).__name__}: {error}", "is_ours": isinstance(error, HpcdistError)}
            local_result["traceback"] = traceback.format_exc()
        for owner in owners.alive():
            if id(owner) not in earlier:
                local_result["n_collectives"] = owner.group.journal.n_entered
        owner = None
        gc.collect()
        local_result["is_alive"] = any(id(alive_owner) not in earlier for alive_owner in owners.alive())
    return local_result


def judge_results(program, results):
    from torch_fuzz import compare
    from torch_fuzz.plain import run_plain

    errors = [rank_result.get("error") for rank_result in results]
    if any(errors):
        return judge_errors(program, results, errors)
    states = [rank_result["state"] for rank_result in results]
    if program.cluster.strategy == "central":
        states = [states[0], *({**states[0], **compare.of_all_ranks(state)} for state in states[1:])]
    order = None
    if program.data.is_shuffled:
        order = []
        for batch in zip(*(rank_result["numbers"] for rank_result in results), strict=True):
            order.append(list(itertools.chain.from_iterable(batch)))
    try:
        expected = compare.plain_state(run_plain(program, order))
    except Exception as error:
        return {"outcome": "plain refused", "error": f"{type(error).__name__}: {error}"}
    return compare.judge(states, expected, program.dtype, lambda: list(rounded_otherwise(program, order)))


def rounded_otherwise(program, order):
    """Yield what plain torch leaves with rows in reverse order, with other last bits, and of float32 in float64."""
    import torch
    from torch_fuzz.compare import plain_state
    from torch_fuzz.plain import run_plain

    yield plain_state(run_plain(program, order, is_reversed=True))
    yield plain_state(run_plain(program, order, nudge=4 * torch.finfo(getattr(torch, program.dtype)).eps))
    if program.dtype == "float32":
        yield plain_state(run_plain(dataclasses.replace(program, dtype="float64"), order))


def judge_errors(program, results, errors):
    from torch_fuzz.plain import run_plain

    ranks = [rank for rank, error in enumerate(errors) if error]
    error = errors[ranks[0]]
    if all(results[rank]["is_ours"] for rank in ranks):
        if len(ranks) == len(errors):
            kind = "refused"
        else:
            kind = "one-sided"
        return {"outcome": kind, "ranks": ranks, "error": error}
    foreign = next(results[rank] for rank in ranks if not results[rank]["is_ours"])
    try:
        run_plain(program, [[0]] * 1000 if program.data.is_shuffled else None)
    except Exception as plain_error:
        if type(plain_error).__name__ == foreign["error"].split(":")[0] and len(ranks) == len(errors):
            return {"outcome": "raised", "error": foreign["error"]}
    return {
        "outcome": kind_of(foreign, ""),
        "ranks": ranks,
        "error": foreign["error"],
        "traceback": foreign["traceback"],
    }


def work(options):
    import torch
    import torch._dynamo  # torch would import it at its first optimizer
    import torch_fuzz.distributed
    import torch_fuzz.draw  # noqa: F401
    from mpi4py import MPI

    from hpcdist.runtime.process import make_world

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    make_world()
    gc.collect()
    gc.freeze()  # modules stay: collections between programs need not look at them
    comm = MPI.COMM_WORLD.Dup()
    if options.only is not None:
        from torch_fuzz.draw import draw_program

        if comm.rank == 0:
            print(json.dumps(json.loads(draw_program(options.only).to_json()), indent=1))
        Worker(comm, None).run(options.only)
        return
    first, last = map(int, options.programs.split(":"))
    done = comm.bcast(sorted(outcomes(options.out)) if comm.rank == 0 else None, 0)
    worker = Worker(comm, options.out)
    for seed in range(first, last):
        if seed not in set(done):
            worker.run(seed)


# -- what starts the jobs --------------------------------------------------------------------------------------------


def supervise(options):
    """Start jobs until each program has an outcome; return whether there is no finding."""
    options.out.parent.mkdir(parents=True, exist_ok=True)
    first, last = map(int, options.programs.split(":"))
    mpirun = Path(sys.executable).with_name("mpirun")
    command = [mpirun, "-n", str(options.ranks), sys.executable, __file__]
    command += ["--programs", options.programs, "--out", str(options.out)]
    environ = {"OMP_NUM_THREADS": "1", "HPCDIST_TIMEOUT_S": "40", **os.environ}
    while True:
        before = len(outcomes(options.out))
        code = subprocess.run(command, env=environ, check=False).returncode
        records = outcomes(options.out)
        for seed, record in records.items():
            if record["outcome"] == "started":
                with options.out.open("a") as file:
                    file.write(json.dumps({"program": seed, "outcome": "died", "code": code}) + "\n")
        if all(seed in records for seed in range(first, last)):
            break
        if len(records) == before:
            sys.exit(f"fuzz: expected progress, got jobs that end with {code} before a program begins")
    return report({seed: final_record for seed, final_record in outcomes(options.out).items() if first <= seed < last})


def report(records):
    """Print how many programs have which outcome, and the findings; return whether there is none."""
    counts = collections.Counter(program_record["outcome"] for program_record in records.values())
    print(f"fuzz: {len(records)} programs: " + ", ".join(f"{n} {kind}" for kind, n in counts.most_common()))
    for record in records.values():
        if record["outcome"] in FINDINGS:
            print(json.dumps(record)[:400])
    return not FINDINGS & set(counts)


def main():
    options = parse()
    if options.ranks is None:
        work(options)
    else:
        sys.exit(0 if supervise(options) else 1)


if __name__ == "__main__":
    main()

"""Run the tests of torch.distributed that come with torch over the backend `hpcdist`; print what became of each.

It proves that the backend keeps torch's own contract.

mpirun -n 3 python tests/support/torch_own_tests.py FOLDER
torchrun --nproc-per-node 3 tests/support/torch_own_tests.py FOLDER

Left out: what needs GPUs, and what lets ranks wait for each other on purpose (`monitored_barrier` is gloo's alone).
"""

import contextlib
import json
import os
import re
import sys
import traceback
import unittest
from collections import Counter

if "RANK" in os.environ:  # torchrun's
    RANK = int(os.environ["RANK"])
    SIZE = int(os.environ["WORLD_SIZE"])
else:
    from mpi4py import MPI

    RANK = MPI.COMM_WORLD.rank
    SIZE = MPI.COMM_WORLD.size
WANTED = r"^test_(all_gather|all_reduce|all_to_all|barrier|broadcast|gather|scatter|reduce|send|isend|irecv)"
UNWANTED = r"cuda|nccl|timeout|monitored"


def load():
    """Return torch's test class for ranks that are started already."""
    folder = sys.argv[1]
    os.environ.update(BACKEND="gloo", WORLD_SIZE=str(SIZE), TEMP_DIR=folder)  # torch's module asks for them
    os.makedirs(os.path.join(folder, "barrier"), exist_ok=True)
    from torch.testing._internal.common_utils import TestCase
    from torch.testing._internal.distributed import distributed_test

    distributed_test.BACKEND = "hpcdist"
    os.environ["BACKEND"] = "mpi"  # tests of groups ask for eight ranks else

    class OfThisJob(distributed_test.DistributedTest._DistTestBase, TestCase):
        rank = RANK
        world_size = SIZE

    return OfThisJob


def outcome_of(case, name):
    """Return "ok", "skipped", or what went wrong, on this rank."""
    import torch

    torch.manual_seed(7)
    try:
        getattr(case(name), name)()
    except unittest.SkipTest:
        return "skipped"
    except SystemExit as error:  # torch's way to skip
        if error.code:
            return "skipped"
        return "ended"
    except Exception:
        return traceback.format_exc(limit=-3)
    return "ok"


def main():
    case = load()
    import torch.distributed as dist

    import hpcdist.torch_backend

    dist.init_process_group("hpcdist", init_method="hpcdist://")
    names = []
    for name in sorted(dir(case)):
        if re.search(WANTED, name) and not re.search(UNWANTED, name):
            names.append(name)
    outcomes_by_name = {}
    for name in names:
        outcomes = [None] * SIZE
        with contextlib.redirect_stdout(sys.stderr):
            dist.all_gather_object(outcomes, outcome_of(case, name))
        if len(set(outcomes)) == 1:
            outcomes_by_name[name] = outcomes[0]
        else:
            outcomes_by_name[name] = "\n".join(outcomes)
    if RANK == 0:
        outcome_counts = Counter(
            outcome if outcome in ("ok", "skipped") else "failed" for outcome in outcomes_by_name.values()
        )
        failed = {}
        for name, text in outcomes_by_name.items():
            if text not in ("ok", "skipped"):
                failed[name] = text
        passed = [name for name in names if outcomes_by_name[name] == "ok"]
        print(
            "\n" + json.dumps({**outcome_counts, "failures": failed, "passed": passed, "version": hpcdist.__version__})
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

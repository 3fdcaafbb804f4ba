"""Timing of blocks on all ranks together, and facts about the machine and the libraries meanwhile."""

import os
import platform
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from command_line import parse_bytes
from harness import Pair
from report import Case, publish

from hpcdist.runtime.mpi import MPI

#: Beginnings of environment variables that change what is measured.
_TELLING = (
    "OMP_",
    "MKL_",
    "OMPI_MCA_",
    "PRTE_MCA_",
    "UCX_",
    "FI_",
    "MPIR_CVAR_",
    "GLOO_",
    "HPCDIST_",
    "MPI4PY_",
)


def timed_block(comm: MPI.Comm, run: Callable[[], None], n_calls: int) -> Pair:
    """Return wall seconds (of the slowest rank) and CPU-seconds (of all ranks and their threads) per call.

    All ranks enter `run` together. Collective over `comm`.

    Args:
        comm: the ranks.
        run: function that makes the calls.
        n_calls: number of its calls.
    """
    comm.Barrier()
    cpu_before = cpu_s()
    started = time.perf_counter()
    run()
    wall = time.perf_counter() - started
    cpu = cpu_s() - cpu_before
    slowest = comm.allreduce(wall, MPI.MAX)
    total = comm.allreduce(cpu, MPI.SUM)
    return slowest / n_calls, total / n_calls


def cpu_s() -> float:
    """Return the CPU-seconds of this process and its threads, in user and kernel mode."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def last_cache_bytes() -> int:
    """Return the size of the last level cache; 32 MiB if Linux does not tell it."""
    folder = Path("/sys/devices/system/cpu/cpu0/cache")
    sizes = []
    for path in folder.glob("index*/size"):
        text = path.read_text().strip()
        sizes.append(parse_bytes(text))
    return max(sizes, default=32 << 20)


class Environment:
    """The facts that a figure depends on besides the code: recorded at the start, completed at the end.

    The constructor and `record` are collective over `comm`.
    """

    def __init__(self, comm: MPI.Comm) -> None:
        self._comm = comm
        self._before = _counters()

    def record(self) -> dict[str, Any]:
        """Return the record. Switches are summed over the ranks; load and steal are rank 0's machine's.

        Collective over the ranks.
        """
        before = self._before
        after = _counters()
        switches = self._comm.allreduce(after["switches"] - before["switches"])
        hosts = self._comm.allgather(MPI.Get_processor_name())
        cores = sorted(os.sched_getaffinity(0))
        library_version = MPI.Get_library_version().strip(" \n\0")
        first_line, _, _ = library_version.partition("\n")
        variables = {}
        for name in sorted(os.environ):
            if name.startswith(_TELLING):
                variables[name] = os.environ[name]
        return {
            "mpi": first_line,
            "mpi_standard": list(MPI.Get_version()),
            "thread_level": MPI.Query_thread(),
            "ranks": self._comm.size,
            "hosts": sorted(set(hosts)),
            "cores": self._comm.allgather(cores),
            "last_cache_bytes": last_cache_bytes(),
            "cpu": _cpu_name(),
            "kernel": platform.release(),
            "python": platform.python_version(),
            "numpy": np.__version__,
            "torch": _torch_version(),
            "variables": variables,
            "utc": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "load_before": before["load"],
            "load_after": after["load"],
            "steal_s": after["steal_s"] - before["steal_s"],
            "involuntary_switches": switches,
        }

    def publish(self, cases: list[Case], folder: Path, stem: str, label: str = "") -> None:
        """Publish the cases of this launch with this record, on rank 0. Collective over the ranks.

        Args:
            cases: cases of the report.
            folder: folder for the files.
            stem: name of the files.
            label: name of the launch, by default the MPI library's.
        """
        record = self.record()
        if self._comm.rank == 0:
            label = label or record["mpi"]
            publish(
                {"label": label, "environment": record, "cases": cases},
                folder,
                stem,
            )


def _counters() -> dict[str, Any]:
    """Return counters of this process and of the machine."""
    first_line, _, _ = Path("/proc/stat").read_text().partition("\n")
    counters = first_line.split()
    usage = resource.getrusage(resource.RUSAGE_SELF)
    load, _, _ = os.getloadavg()
    return {
        "switches": usage.ru_nivcsw,
        "steal_s": int(counters[8]) / os.sysconf("SC_CLK_TCK"),
        "load": load,
    }


def _cpu_name() -> str:
    """Return the model of the processor, or the machine type if Linux does not tell the model."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            _, _, name = line.partition(":")
            return name.strip()
    return platform.machine()


def _torch_version() -> str:
    import torch

    return f"{torch.__version__}, {torch.get_num_threads()} threads per rank"

"""`hpcdist bench`: starts the benchmarks of benchmarks/ by the launcher that belongs to this MPI library."""

import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import click

from hpcdist.cli.launcher import (
    as_text,
    find_launcher,
    launch_command,
    mpi_library,
    request_here,
    require_no_launcher,
)
from hpcdist.cli.output import echo
from hpcdist.cli.run import n_ranks_on
from hpcdist.cli.shipped import shipped_folder
from hpcdist.cluster.environment import read_environment
from hpcdist.errors import UsageError


class _Benchmark(NamedTuple):
    """A benchmark of benchmarks/.

    Attributes:
        script: name of the script.
        arguments: arguments that choose a part of the script.
        is_on_ranks: whether ranks run the script; otherwise it starts jobs by itself.
        quick_options: options for a smoke test.
    """

    script: str
    arguments: tuple[str, ...]
    is_on_ranks: bool
    quick_options: tuple[str, ...]


_BENCHMARKS = {
    "allreduce": _Benchmark("allreduce.py", (), True, ("--quick",)),
    "step": _Benchmark("step.py", (), True, ("--rounds", "2", "--steps", "20")),
    "ckpt": _Benchmark("checkpoint.py", (), False, ("--rounds", "2", "--megabytes", "40")),
    "ps": _Benchmark("servers.py", ("speed",), False, ("--rounds", "1")),
}

#: Variables by which mpirun of Open MPI starts more ranks than there are cores.
_CROWDED = {
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
}


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("name", type=click.Choice(list(_BENCHMARKS)))
@click.option(
    "-n",
    "--ranks",
    type=click.IntRange(1),
    help="Number of ranks (allreduce and step); default: 2.",
)
@click.option(
    "--hosts", metavar="LIST", help="Hosts and their ranks (allreduce and step), such as n1:4,n2:4."
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="Folder for samples and picture; default: out/bench.",
)
@click.option("--quick", is_flag=True, help="A smoke test of a minute; do not quote its figures.")
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
def command(
    name: str,
    ranks: int | None,
    hosts: str | None,
    out: Path | None,
    quick: bool,
    options: tuple[str, ...],
) -> int:
    """Time hpcdist on this machine beside its alternatives: a table, samples as JSON, and a picture as PNG.

    \b
    allreduce  sums of 4 bytes to 256 MiB, beside MPI and gloo
    step       training steps, beside DDP and no synchronization
    ckpt       400 MB to the disk, beside a plain write and torch.save
    ps         two workers and a parameter server, beside the all-reduce

    The contenders take turns: in one launch, or for ps in one launch each. If the baseline, timed twice in a launch,
    differs from itself by more than 3 %, the machine is too noisy, and no factor is printed (but for ps). OPTIONS are
    those of the script in benchmarks/, such as --sizes 1K,4M.

    \b
    hpcdist bench allreduce -n 4 --sizes 64K,16M
    hpcdist bench step --quick
    """
    environ = read_environment()
    require_no_launcher("hpcdist bench", environ)
    benchmark = _BENCHMARKS[name]
    if not benchmark.is_on_ranks and (ranks or hosts):
        raise UsageError(
            f"hpcdist bench: expected -n and --hosts with allreduce and step, got {name}; leave them out."
        )
    script = shipped_folder("benchmarks", "allreduce.py") / benchmark.script
    if out is None:
        out = Path("out") / "bench"
    program = [sys.executable, str(script), *benchmark.arguments, "--out", str(out)]
    if quick:
        program += benchmark.quick_options
    program += options
    threads = {}
    if not environ.get("OMP_NUM_THREADS"):
        threads["OMP_NUM_THREADS"] = "1"
    n_ranks = _n_ranks(ranks, hosts)
    request = request_here(n_ranks, program, environ, hosts or "", benchmark.is_on_ranks)
    launcher = find_launcher(mpi_library(), environ if benchmark.is_on_ranks else {})
    line, guards = launch_command(launcher, request, {**environ, **threads})
    added = {**threads, **guards}
    if not benchmark.is_on_ranks:
        line = program
        if name == "ps":
            line = [*program, "--mpirun", launcher.path]
        if launcher.kind == "openmpi":
            # ps starts jobs of up to four ranks by itself
            added |= _CROWDED
    echo(f"+ {as_text(line, added)}", err=True)
    code = subprocess.run(line, env={**environ, **added}).returncode
    if code < 0:  # Python's way to say that a signal ended it
        return 128 - code
    return code


def _n_ranks(ranks: int | None, hosts: str | None) -> int:
    """Return the number of ranks to start: `ranks`, else the ranks on the hosts, else 2."""
    if ranks is not None:
        return ranks
    return n_ranks_on(hosts) if hosts else 2

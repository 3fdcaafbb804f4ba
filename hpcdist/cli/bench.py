"""`hpcdist bench`: the benchmarks of benchmarks/, started by the launcher that belongs to this MPI library."""

import subprocess
import sys
from pathlib import Path

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

#: Name -> the script and its part, whether it is started on ranks, and its options for a first look.
_BENCHES: dict[str, tuple[tuple[str, ...], bool, tuple[str, ...]]] = {
    "allreduce": (("allreduce.py",), True, ("--quick",)),
    "step": (("step.py",), True, ("--rounds", "2", "--steps", "20")),
    "ckpt": (("checkpoint.py",), False, ("--rounds", "2", "--megabytes", "40")),
    "ps": (("servers.py", "speed"), False, ("--rounds", "1")),
}


_CROWDED = {
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
}


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("name", type=click.Choice(list(_BENCHES)))
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

    The contenders take turns: in one launch, or for ps in one launch each. Where the same code on both sides of a
    launch differs by more than 3 %, the machine is too noisy, and no factor is printed. OPTIONS are those of the script
    in benchmarks/, such as --sizes 1K,4M.

    \b
    hpcdist bench allreduce -n 4 --sizes 64K,16M
    hpcdist bench step --quick
    """
    environ = read_environment()
    require_no_launcher("hpcdist bench", environ)
    (script, *part), is_on_ranks, look = _BENCHES[name]
    if not is_on_ranks and (ranks or hosts):
        raise UsageError(
            f"hpcdist bench: expected -n and --hosts with allreduce and step, got {name}; leave them out."
        )
    program = [
        sys.executable,
        str(shipped_folder("benchmarks", "allreduce.py") / script),
        *part,
        "--out",
        str(out or Path("out") / "bench"),
    ]
    program += [*(look if quick else ()), *options]
    threads = {} if environ.get("OMP_NUM_THREADS") else {"OMP_NUM_THREADS": "1"}
    n_ranks = ranks or (n_ranks_on(hosts) if hosts else 2)
    request = request_here(n_ranks, program, environ, hosts or "", is_bound=is_on_ranks)
    launcher = find_launcher(mpi_library(), environ if is_on_ranks else {})
    line, guards = launch_command(launcher, request, {**environ, **threads})
    added = {**threads, **guards}
    if not is_on_ranks:
        line = [*program, *(["--mpirun", launcher.path] if name == "ps" else [])]
        # ps starts jobs of up to four ranks by itself, whose mpirun lets more ranks than cores through by these
        added |= _CROWDED if launcher.kind == "openmpi" else {}
    echo(f"+ {as_text(line, added)}", err=True)
    return subprocess.run(line, env={**environ, **added}).returncode

"""RUN_DIR/config.json: the settings of an attempt, where each of them comes from, and the hosts."""

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hpcdist.checkpoint import durable
from hpcdist.checkpoint.read import read_text
from hpcdist.cluster.environment import (
    HPCDIST_VARIABLES,
    job_end,
    job_end_origin,
    job_id,
    origin_of,
    read_environment,
)
from hpcdist.errors import CheckpointError, log
from hpcdist.runtime.mpi import MPI
from hpcdist.runtime.world import World

#: Settings that are variables only, with their defaults.
_DEFAULTS = {"debug": "nothing", "log": "text", "trace": "some"}
#: Number of hosts that the line at the start names.
_N_NAMED = 8
#: Longest config.json that is read.
_MAX_BYTES = 16 << 20


def settings_of(
    world: World, environ: Mapping[str, str], program_end: float | None
) -> dict[str, tuple[str, str]]:
    """Return each setting of a run as its value and its origin.

    The program's own arguments come first, then TF_CONFIG (roles only), variables HPCDIST_*, hpcdist.toml, defaults. Of
    two times at which the job ends the earlier one counts.

    Args:
        world: the ranks of the job.
        environ: environment variables of this rank.
        program_end: time at which the job will be ended, in seconds since 1970, as the program says; None if it does
            not.
    """
    settings = {
        "roles": (str(world.spec).replace(", ", ","), world.roles_from),
        "timeout_s": (f"{world.timeout_s:g}", origin_of(environ, "HPCDIST_TIMEOUT_S")),
    }
    for name, default in _DEFAULTS.items():
        variable = f"HPCDIST_{name.upper()}"
        value = environ.get(variable) or default
        settings[name] = (value, origin_of(environ, variable))
    end = job_end(environ)
    if program_end is not None and (end is None or program_end < end):
        settings["ends_at"] = (_text_of(program_end), "the program")
    elif end is not None:
        settings["ends_at"] = (_text_of(end), job_end_origin(environ))
    return settings


def hosts_of(world: World) -> dict[str, str]:
    """Return the hosts of chief and workers with their ranks, such as {"n1": "0-7"}, on the chief; {} elsewhere.

    Collective over the ranks of the role, right after they have agreed on something.
    """
    host_name = ""
    if world.node_comm.rank == 0:
        host_name = MPI.Get_processor_name()
    ranks_and_names = world.role_comm.gather((world.rank, host_name))
    if not ranks_and_names:
        return {}
    host_ranks: dict[str, str] = {}
    for role_ranks in world.hosts.placement.hosts:
        name = ranks_and_names[role_ranks[0]][1] or "unknown"
        ranks = [ranks_and_names[role_rank][0] for role_rank in role_ranks]
        if name in host_ranks:  # containers may share a name
            host_ranks[name] += f",{_text_of_ranks(ranks)}"
        else:
            host_ranks[name] = _text_of_ranks(ranks)
    return host_ranks


def _text_of_ranks(ranks: list[int]) -> str:
    """Return ranks as text, such as "0-7" or "0,2,4"."""
    first_rank = ranks[0]
    last_rank = ranks[-1]
    is_range = ranks == list(range(first_rank, last_rank + 1))
    if is_range and len(ranks) > 1:
        return f"{first_rank}-{last_rank}"
    return ",".join(map(str, ranks))


def begin_config(
    world: World,
    folder: Path,
    attempt: int,
    program_end: float | None,
    facts: Callable[[], dict[str, Any]],
) -> None:
    """Write the settings and hosts of this attempt to `config.json`, and as one line to the log.

    Collective over chief and workers.

    Args:
        world: the ranks of the job.
        folder: the run folder.
        attempt: number of the attempt; valid on the chief only.
        program_end: time at which the job will be ended, see `settings_of`.
        facts: returns versions, threads, and how gradients are summed; called on the chief.

    Raises:
        CheckpointError: if the file cannot be written; on all ranks.
    """
    hosts = hosts_of(world)
    with world.agreed(world.role_comm):
        if world.is_chief:
            environ = read_environment()
            job = job_id(environ)
            settings = settings_of(world, environ, program_end)
            variables = {name: environ[name] for name in HPCDIST_VARIABLES if name in environ}
            content = {
                "attempt": attempt,
                "began": _text_of(time.time()),
                "program": [sys.executable, *sys.argv],
                "folder": os.getcwd(),
                "job": job,
                "ranks": world.size,
                "hosts": hosts,
                "settings": _with_origins(settings),
                "variables": variables,
                "versions": facts(),
            }
            _write(folder / "config.json", content)
            log(_line(folder, attempt, job, hosts, world.role_comm.size, settings))


def _with_origins(settings: Mapping[str, tuple[str, str]]) -> dict[str, dict[str, str]]:
    """Return settings as they stand in `config.json`."""
    return {name: {"value": value, "from": origin} for name, (value, origin) in settings.items()}


def _line(
    folder: Path,
    attempt: int,
    job: str | None,
    hosts: Mapping[str, str],
    n_ranks: int,
    settings: Mapping[str, tuple[str, str]],
) -> str:
    """Return the line of the log that an attempt begins with."""
    named_hosts = list(hosts.items())[:_N_NAMED]
    host_list = ", ".join(f"{name} ({ranks})" for name, ranks in named_hosts)
    if len(hosts) > _N_NAMED:
        host_list += f" and {len(hosts) - _N_NAMED} more"
    values = []
    for name, (value, origin) in settings.items():
        values.append(f"{name} {value} ({origin})")
    subject = f"attempt {attempt} of {folder}"
    if job:
        subject += f" in job {job}"
    ranks = "rank" if n_ranks == 1 else "ranks"
    return f"{subject}: {n_ranks} {ranks} on {host_list}; {', '.join(values)}"


def _write(path: Path, content: dict[str, Any]) -> None:
    """Replace the file, unless the program has a file of this name."""
    if not _is_ours(path):
        log(
            f"config: expected no file or one of an earlier attempt at {path}, got another file; it is left as it is."
        )
        return
    disk = durable.Disk()

    def replace() -> None:
        durable.sweep_temporary(disk, path.parent, f"{path.name}.")
        durable.replace_text(disk, path, json.dumps(content, indent=1) + "\n")

    try:
        durable.patiently(replace)
    except OSError as error:
        raise CheckpointError(
            f"config: expected to write {path}, got {error.strerror}; free space or choose another run folder. "
            f"Checkpoints are untouched."
        ) from None


def _is_ours(path: Path) -> bool:
    try:
        config = json.loads(read_text(path, _MAX_BYTES))
    except FileNotFoundError:
        return True
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(config, dict) and {"attempt", "settings", "versions"} <= set(config)


def _text_of(time_s: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time_s))

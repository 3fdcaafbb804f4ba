"""The text of a batch script for Slurm, PBS or LSF. Pure: every value is quoted for the shell.

The tests run scripts of Slurm on a real one. Those of PBS and LSF follow their manuals, and are checked as shell only.
"""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass

#: What stands for the number of an array's task in the program's arguments.
TASK = "{task}"
#: What the comment of a job of Slurm begins with, before its run folder: `hpcdist status JOB` finds it there.
COMMENT = "hpcdist:"


@dataclass(frozen=True)
class BatchJob:
    """A batch job.

    Attributes:
        name: of the job.
        n_nodes: nodes. n_per_node: ranks of each.
        limit: time limit: as Slurm writes it, H:MM:SS for the others; empty for the default of the site.
        options: of the batch system, such as "--partition=gpu" or "-q long"; Slurm's replace those that every job has.
        run_dir: run folder, which may hold `TASK`.
        command: of one rank.
        launcher: what starts the ranks, such as ("srun",), or mpirun and its options.
        job_program: path of slurm/job.py.
        lead_s: seconds before the time limit at which Slurm and LSF signal the job; PBS does not.
        setup: lines of shell before the program starts.
        array: of tasks, such as "1-8"; empty for none.
        is_chained: whether each job submits its successor, where jobs are not requeued.
        n_servers: ranks that are parameter servers.
        drill_s: seconds after the first start at which the job is preempted, once; 0 for no drill.
        script: path that the script is written to.
        folder: from which it was submitted, where its paths begin.
    """

    name: str
    n_nodes: int
    n_per_node: int
    limit: str
    options: tuple[str, ...]
    run_dir: str
    command: tuple[str, ...]
    launcher: tuple[str, ...]
    job_program: str
    lead_s: int = 120
    setup: tuple[str, ...] = ()
    array: str = ""
    is_chained: bool = False
    n_servers: int = 0
    drill_s: int = 0
    script: str = ""
    folder: str = "."


def last_of_each(options: Sequence[str]) -> list[str]:
    """Return options such as "--time=1:00:00", of each name the last one."""
    return list({option.partition("=")[0]: option for option in options}.values())


def slurm_script(job: BatchJob) -> str:
    """Return a job's script for Slurm."""
    is_srun = job.launcher[0] == "srun"
    header = [
        f"--job-name={job.name}",
        f"--signal={'' if is_srun else 'B:'}USR1@{job.lead_s}",
        "--no-requeue" if job.is_chained else "--requeue",
        "--no-kill",
        *([] if job.array or job.is_chained else ["--dependency=singleton"]),
        "--open-mode=append",
        f"--output={'%x-%A_%a.log' if job.array else '%x-%j.log'}",
    ]
    lines = _beginning(
        [f"#SBATCH {option}" for option in last_of_each([*header, *job.options])], job
    )
    if is_srun:
        lines += [
            "# MPICH: UCX's address is sometimes too long for Slurm's pmi2, and MPI fails to start."
        ]
        lines += ["export MPIR_CVAR_CH4_NETMOD=${MPIR_CVAR_CH4_NETMOD:-ofi}"]
    if job.drill_s:
        this = "${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}" if job.array else "$SLURM_JOB_ID"
        preempt = f'scancel{"" if is_srun else " --batch"} --signal=USR1 "{this}"'
        has_begun = '[ "$RUN_DIR/decision.json" -nt "$RUN_DIR/jobs/$SLURM_JOB_ID" ]'
        act = f'{{ sleep 1; mkdir "$RUN_DIR/drill" 2> /dev/null && {preempt}; break; }}'
        lines += [
            f"# A drill: preempted once, {job.drill_s} s after its first start, when the program has begun."
        ]
        lines += [
            f"(sleep {job.drill_s}; for _ in $(seq 600); do {has_begun} && {act}; sleep 1; done) &"
        ]
    if job.is_chained:
        after = f'sbatch --parsable --dependency=afterany:"$SLURM_JOB_ID" {shlex.quote(job.script)}'
        lines += [f"successor=$({after}) || exit 1"]
    return _ended(lines, job, _start_of(job.launcher), job.is_chained)


def pbs_script(job: BatchJob) -> str:
    """Return a job's script for PBS, where users may not requeue jobs: each submits its successor before it trains."""
    n = job.n_per_node
    header = [f"-N {job.name}", f"-l select={job.n_nodes}:ncpus={n}:mpiprocs={n}"]
    header += [f"-l walltime={job.limit}"] if job.limit else []
    lines = _beginning([f"#PBS {option}" for option in [*header, "-j oe", *job.options]], job)
    lines += [
        f'successor=$(qsub -W depend=afterany:"$PBS_JOBID" {shlex.quote(job.script)}) || exit 1'
    ]
    return _ended(
        lines, job, f'{shlex.join(job.launcher)} -n "$(wc --lines < "$PBS_NODEFILE")"', True
    )


def lsf_script(job: BatchJob) -> str:
    """Return a job's script for LSF, which signals it before its limit and requeues it."""
    n_ranks = job.n_nodes * job.n_per_node
    minutes = -(-job.lead_s // 60)
    header = [f"-J {job.name}", f"-n {n_ranks}", f'-R "span[ptile={job.n_per_node}]"']
    header += [f"-W {_minutes_of(job.limit)}"] if job.limit else []
    header += ["-r", f"-wa USR1 -wt {minutes}", "-o %J.log", *job.options]
    lines = _beginning([f"#BSUB {option}" for option in header], job)
    return _ended(lines, job, f'{shlex.join(job.launcher)} -n "$LSB_DJOB_NUMPROC"', False)


def _minutes_of(limit: str) -> int:
    """Return H:MM:SS in minutes, rounded up."""
    hours, minutes, seconds = (int(part) for part in limit.split(":"))
    return hours * 60 + minutes + (seconds > 0)


def _beginning(header: Sequence[str], job: BatchJob) -> list[str]:
    """Return the lines up to the variables."""
    lines = [
        "#!/usr/bin/env bash",
        "# Made by `hpcdist submit`. What happens to the job: docs/slurm.md of hpcdist.",
    ]
    lines += [*header, "", f"cd {shlex.quote(job.folder)} || exit 78", *job.setup]
    lines += [f"export RUN_DIR={_quoted(job.run_dir, job)}"]
    return [
        *lines,
        *([f"export HPCDIST_ROLES='ps:{job.n_servers},worker:*'"] if job.n_servers else []),
    ]


def _ended(lines: Sequence[str], job: BatchJob, start: str, has_successor: bool) -> str:
    """Return a whole script: job.py around the command that starts the ranks."""
    program = " ".join(_quoted(part, job) for part in job.command)
    successor = ' --successor "$successor"' if has_successor else ""
    run = f"exec {shlex.quote(sys.executable)} -E -S {shlex.quote(job.job_program)}{successor}"
    return "\n".join([*lines, f"{run} \\", f"  {start} \\", f"  {program}"]) + "\n"


def _start_of(launcher: Sequence[str]) -> str:
    """Return the command that starts the ranks under Slurm; job.py fills in the nodes of each launch."""
    if launcher[0] == "srun":
        options = (
            "--kill-on-bad-exit=1 --overlap --nodelist=%nodes --nodes=%n_nodes --ntasks=%n_ranks"
        )
        return f'{shlex.join(launcher)} {options} --cpus-per-task="${{SLURM_CPUS_PER_TASK:-1}}"'
    return f"{shlex.join(launcher)} --host %hosts -n %n_ranks"


def _quoted(value: str, job: BatchJob) -> str:
    """Return a value for the shell; in an array `TASK` is the number of the task."""
    parts = value.split(TASK) if job.array else [value]
    return (
        '"$SLURM_ARRAY_TASK_ID"'.join(shlex.quote(part) if part else "" for part in parts) or "''"
    )

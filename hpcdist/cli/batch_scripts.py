"""The text of a batch script for Slurm, PBS or LSF. Pure.

Paths, the program and its arguments are quoted for the shell; lines of `setup` are taken as they are.

The tests run scripts of Slurm on a real one. Those of PBS and LSF follow their manuals, and are checked as shell only.
"""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass

#: Placeholder for the number of an array's task, in the program's arguments and the run folder.
TASK = "{task}"
#: Beginning of the comment of a job of Slurm. The run folder follows: `hpcdist status JOB` finds it there.
COMMENT = "hpcdist:"


@dataclass(frozen=True)
class BatchJob:
    """A batch job.

    Attributes:
        name: name of the job.
        n_nodes: number of nodes.
        n_per_node: number of ranks on each node.
        limit: time limit, in Slurm's notation, or as H:MM:SS for PBS and LSF; empty for the default of the site.
        options: options of the batch system, such as "--partition=gpu" or "-q long". An option of Slurm replaces the
            one of the same name that every job has.
        run_dir: run folder, which may hold `TASK`.
        command: command of one rank.
        launcher: command that starts the ranks, such as ("srun",), or mpirun and its options.
        job_program: path of slurm/job.py.
        lead_s: seconds before the time limit at which Slurm and LSF signal the job; PBS does not.
        setup: lines of shell before the program starts.
        array: numbers of the array's tasks, such as "1-8"; empty for no array.
        is_chained: for Slurm, whether each job submits its successor, where jobs are not requeued. Jobs of PBS always
            do.
        n_servers: number of ranks that are parameter servers.
        drill_s: seconds after the first start at which the job is preempted, once; 0 for no drill.
        script: path of the file that holds the script.
        folder: folder in which the job was submitted; relative paths begin there.
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
    """Return options such as "--time=1:00:00" without the ones that a later option of the same name replaces."""
    option_of = {option.partition("=")[0]: option for option in options}
    return list(option_of.values())


def slurm_script(job: BatchJob) -> str:
    """Return a job's script for Slurm."""
    options = last_of_each([*_options_of_all(job), *job.options])
    lines = _head([f"#SBATCH {option}" for option in options], job)
    if _uses_srun(job):
        lines += [
            "# MPICH: UCX's address is sometimes too long for Slurm's pmi2, and MPI fails to start.",
            "export MPIR_CVAR_CH4_NETMOD=${MPIR_CVAR_CH4_NETMOD:-ofi}",
        ]
    if job.drill_s:
        lines += _drill(job)
    if job.is_chained:
        submit = (
            f'sbatch --parsable --dependency=afterany:"$SLURM_JOB_ID" {shlex.quote(job.script)}'
        )
        lines.append(f"successor=$({submit}) || exit 1")
    return _whole_script(lines, job, _start_of(job.launcher), job.is_chained)


def _options_of_all(job: BatchJob) -> list[str]:
    """Return the options of sbatch that every job has."""
    signal_option = f"--signal=USR1@{job.lead_s}"
    if not _uses_srun(job):
        # "B:" signals the batch script alone, which passes the signal on to mpirun
        signal_option = f"--signal=B:USR1@{job.lead_s}"
    options = [
        f"--job-name={job.name}",
        signal_option,
        "--no-requeue" if job.is_chained else "--requeue",
        "--no-kill",
    ]
    if not job.array and not job.is_chained:
        options.append("--dependency=singleton")
    log_name = "%x-%A_%a.log" if job.array else "%x-%j.log"
    return [*options, "--open-mode=append", f"--output={log_name}"]


def _drill(job: BatchJob) -> list[str]:
    """Return the lines that preempt a job of Slurm once, after its program has begun to train."""
    job_id = "$SLURM_JOB_ID"
    if job.array:
        job_id = "${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}"
    preempt = f'scancel --signal=USR1 "{job_id}"'
    if not _uses_srun(job):
        preempt = f'scancel --batch --signal=USR1 "{job_id}"'
    # made by job.py before it starts the program; the decision may be one of an earlier job
    started = '"$RUN_DIR/jobs/$SLURM_JOB_ID"'
    has_begun = f'[ -e {started} ] && [ "$RUN_DIR/decision.json" -nt {started} ]'
    # a program that has ended by then leaves the drill to a later job
    missed = '{ rmdir "$RUN_DIR/drill"; echo "drill: not sent, as the job has ended or Slurm did not answer" >&2; }'
    act = f'mkdir "$RUN_DIR/drill" 2> /dev/null && {{ {preempt} 2> /dev/null || {missed}; }}'
    wait_and_act = f"{{ sleep {job.drill_s}; {act}; break; }}"
    return [
        f"# A drill: preempted once, {job.drill_s} s after the program has begun to train.",
        f"(for _ in $(seq 600); do {has_begun} && {wait_and_act}; sleep 1; done) &",
    ]


def _uses_srun(job: BatchJob) -> bool:
    return job.launcher[0] == "srun"


def pbs_script(job: BatchJob) -> str:
    """Return a job's script for PBS, where users may not requeue jobs: each submits its successor before it trains."""
    n = job.n_per_node
    options = [f"-N {job.name}", f"-l select={job.n_nodes}:ncpus={n}:mpiprocs={n}"]
    if job.limit:
        options.append(f"-l walltime={job.limit}")
    options += ["-j oe", *job.options]
    lines = _head([f"#PBS {option}" for option in options], job)
    submit = f'qsub -W depend=afterany:"$PBS_JOBID" {shlex.quote(job.script)}'
    lines.append(f"successor=$({submit}) || exit 1")
    start = f'{shlex.join(job.launcher)} -n "$(wc --lines < "$PBS_NODEFILE")"'
    return _whole_script(lines, job, start, has_successor=True)


def lsf_script(job: BatchJob) -> str:
    """Return a job's script for LSF, which signals it before its limit and requeues it."""
    n_ranks = job.n_nodes * job.n_per_node
    lead_minutes = -(-job.lead_s // 60)
    options = [f"-J {job.name}", f"-n {n_ranks}", f'-R "span[ptile={job.n_per_node}]"']
    if job.limit:
        options.append(f"-W {_minutes_of(job.limit)}")
    options += ["-r", f"-wa USR1 -wt {lead_minutes}", "-o %J.log", *job.options]
    lines = _head([f"#BSUB {option}" for option in options], job)
    start = f'{shlex.join(job.launcher)} -n "$LSB_DJOB_NUMPROC"'
    return _whole_script(lines, job, start, has_successor=False)


def _minutes_of(limit: str) -> int:
    """Return H:MM:SS in minutes, rounded up."""
    hours, minutes, seconds = (int(part) for part in limit.split(":"))
    return hours * 60 + minutes + (seconds > 0)


def _head(header: Sequence[str], job: BatchJob) -> list[str]:
    """Return the lines from the first one to the exported variables.

    Args:
        header: lines with the options of the batch system.
        job: job of the script.
    """
    lines = [
        "#!/usr/bin/env bash",
        "# Made by `hpcdist submit`. What happens to the job: docs/how-to/slurm.md of hpcdist.",
        *header,
        "",
        f"cd {shlex.quote(job.folder)} || exit 78",
        *job.setup,
        f"export RUN_DIR={_quoted(job.run_dir, job)}",
    ]
    if job.n_servers:
        lines.append(f"export HPCDIST_ROLES='ps:{job.n_servers},worker:*'")
    return lines


def _whole_script(lines: Sequence[str], job: BatchJob, start: str, has_successor: bool) -> str:
    """Return a whole script: job.py around the command that starts the ranks."""
    run = f"exec {shlex.quote(sys.executable)} -E -S {shlex.quote(job.job_program)}"
    if has_successor:
        run += ' --successor "$successor"'
    program = " ".join(_quoted(part, job) for part in job.command)
    return "\n".join([*lines, f"{run} \\", f"  {start} \\", f"  {program}", ""])


def _start_of(launcher: Sequence[str]) -> str:
    """Return the command that starts the ranks under Slurm; job.py fills in the nodes of each launch."""
    if launcher[0] == "srun":
        options = (
            "--kill-on-bad-exit=1 --overlap --nodelist=%nodes --nodes=%n_nodes --ntasks=%n_ranks"
        )
        return f'{shlex.join(launcher)} {options} --cpus-per-task="${{SLURM_CPUS_PER_TASK:-1}}"'
    return f"{shlex.join(launcher)} --host %hosts -n %n_ranks"


def _quoted(value: str, job: BatchJob) -> str:
    """Return a value for the shell; in an array `TASK` is replaced by the number of the task."""
    if not job.array:
        return shlex.quote(value)
    parts = [shlex.quote(part) if part else "" for part in value.split(TASK)]
    return '"$SLURM_ARRAY_TASK_ID"'.join(parts) or "''"

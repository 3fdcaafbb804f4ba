"""Run a training program in a batch job: launch it, restart it on the nodes that are left, have the job requeued.

    RUN_DIR=FOLDER python -E -S slurm/job.py [--successor JOB] LAUNCHER ... PROGRAM ... --run-dir FOLDER

The recipes of this folder call it. In the command it replaces %nodes by the names of the nodes, such as n1,n2; %hosts
by the names with the number of ranks on each, such as n1:4,n2:4; %n_nodes by the number of nodes; and %n_ranks by the
number of ranks.

The launcher's exit code does not suffice: a killed job has none, and mpirun was seen to exit 0 after its ranks were
killed. So at any time `decision.json` in the run folder states what to do if the program dies now: "requeue" (run it
again), "stop" (attempts made no progress, ranks differ, the checkpoint is of another model, or a person stopped the job
for good) or "finished". hpcdist writes it; this program only reads it.

It needs nothing but the standard library, and starts in about 20 ms.
"""

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import IO, TextIO

from batch_systems import SLURM, WAITED_FOR, Facts, batch_system, output_of, receive_signals
from placement import failed_node, filled, restart_nodes
from restart_rule import (
    FINISHED,
    HAND_BACK,
    JOB,
    RESTART,
    RUN_AGAIN,
    STOP,
    Launch,
    Situation,
    action_after,
    is_of_signal,
    not_begun,
)
from run_folder import Decision, RunFolder, UnreadableError

#: Most restarts inside one allocation.
MAX_RESTARTS = 6
#: Seconds before the time limit. A launch that ends this close to the limit was ended by it.
LIMIT_IS_NEAR_S = 180
#: Most bytes of a launcher's output that are kept to find the node that failed.
_TAIL_BYTES = 1 << 16
#: Seconds until a look that is never due: longer than any job.
NO_LOOK_S = 1e8


class Job:
    """This batch job.

    Args:
        environ: variables of the job. Two are for tests and unusual sites: REQUEUE_PAUSES_S, the pauses before tries to
            requeue; LIMIT_MARGIN_S, how long before its time limit a job is requeued whose program has not ended.
        successor: the job that is queued to continue this one, as JOB or JOB;CLUSTER; empty without one.
    """

    def __init__(self, environ: Mapping[str, str], successor: str = "") -> None:
        self.environ = environ
        self.successor = successor
        self._system = batch_system(environ)
        self.is_slurm = self._system is SLURM
        self.id = environ[self._system.id_variable]
        self._name = self.id
        # The last task of an array shares the id of the whole array, so it is named by its number. The variables may
        # also be inherited from the job that submitted this one; then they differ from its id.
        if self.is_slurm and environ.get("SLURM_ARRAY_JOB_ID") == self.id:
            self._name = f"{self.id}_{environ['SLURM_ARRAY_TASK_ID']}"
        self.folder = RunFolder(environ, self.id)
        self._watch: subprocess.Popen[bytes] | None = None
        self._end_s: float | None = None
        end_variable = environ.get("SLURM_JOB_END_TIME", "")
        if self.is_slurm and end_variable.isdecimal():
            self._end_s = float(end_variable)
        self.n_restarts = self._count_restarts(self.look().n_restarts)

    def _count_restarts(self, earlier_count: int | None) -> int:
        """Return how often this job was restarted.

        Args:
            earlier_count: the number by the batch system; None without an answer.
        """
        variable = ""
        if self.is_slurm:
            variable = self.environ.get("SLURM_RESTART_COUNT", "0")
        if not variable.isdecimal():
            return earlier_count or 0
        if earlier_count is None:
            return int(variable)
        # the variable may be inherited
        return min(earlier_count, int(variable))

    def log(self, text: str) -> None:
        """Print a line to the log."""
        time_text = time.strftime("%Y-%m-%dT%H:%M:%S")
        name = self.environ.get("SLURM_JOB_NAME", "job")
        line = f"{time_text} {name} {self.id}: {text}"
        with contextlib.suppress(OSError):  # a full disk must not end the job
            print(line, file=sys.stderr, flush=True)

    # -- the batch system ------------------------------------------------------------------------------------------

    def look(self) -> Facts:
        """Return what the batch system knows of the job."""
        text = output_of(self._command(self._system.show), SLURM_TIME_FORMAT="%s")
        facts = Facts()
        if text is not None:
            facts = self._system.read(text, time.time())
        if facts.end_s is None:
            # no answer: the end of the last answer holds, or the one in the variable
            return facts._replace(end_s=self._end_s)
        self._end_s = facts.end_s
        return facts

    def _command(self, command: Sequence[str], job: str = "") -> list[str]:
        """Return a command of the batch system for a job, by default for this one."""
        return [part.replace("{job}", job or self._name) for part in command]

    def names_of(self, nodes: str) -> list[str]:
        """Return the names in a list of nodes as Slurm writes it; an empty list without Slurm."""
        if not self.is_slurm:
            return []
        names = output_of(["scontrol", "show", "hostnames", nodes]) or ""
        return names.split()

    def cancel(self) -> None:
        """End this job."""
        output_of(self._command(self._system.cancel))

    # -- one launch ------------------------------------------------------------------------------------------------

    def launch(self, command: Sequence[str]) -> tuple[Launch, str | None]:
        """Run a command; return how it ended, and the node whose rank a signal ended first, by what it printed."""
        before = None
        with contextlib.suppress(UnreadableError):
            before = self.folder.decision()
        signal.sigtimedwait({signal.SIGUSR1}, 0)  # one that was meant for an earlier launch
        try:
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=receive_signals
            )
        except OSError as error:
            self.log(f"cannot start {command[0]}: {error.strerror}")
            return self._ended(127, False, before), None
        assert process.stdout is not None
        assert process.stderr is not None
        stdout = _PassedOn(process.stdout, sys.stdout)
        stderr = _PassedOn(process.stderr, sys.stderr)
        self._wait_for(process)
        code = process.returncode
        if code < 0:
            code = 128 - code
        stdout_node = failed_node(stdout.text())
        stderr_node = failed_node(stderr.text())
        is_signalled = is_of_signal(code, command[0])
        launch = self._ended(code, is_signalled, before)
        return launch, stdout_node or stderr_node

    def _ended(self, code: int, is_signalled: bool, before: Decision | None) -> Launch:
        """Return how a launch ended.

        Args:
            code: exit code of the launcher.
            is_signalled: whether the exit code means that a signal ended the launch.
            before: decision before the launch; None if there was none.
        """
        try:
            decision = self.folder.decision()
        except UnreadableError:
            decision = before
        if decision is None:  # a person may have removed it, to try again
            return Launch(code, is_signalled=is_signalled)
        if before is not None and decision.stamp == before.stamp:
            reason = ""
            if before.verdict == "stop":
                reason = before.reason
            return Launch(code, reason=reason, earlier=before.verdict, is_signalled=is_signalled)
        if decision.job != self.id:
            return Launch(code, "another", decision.job, is_signalled=is_signalled)
        self.folder.forget_early_deaths()
        return Launch(code, decision.verdict, decision.reason, is_signalled=is_signalled)

    def _wait_for(self, process: "subprocess.Popen[bytes]") -> None:
        """Wait for the program's end, and guard the time limit.

        SIGUSR1 is passed on. SIGTERM is not: Slurm sends it to the ranks too, and Open MPI's mpirun would exit at once.
        """
        look_at = time.monotonic()
        while process.poll() is None:
            if time.monotonic() >= look_at:
                look_at = time.monotonic() + self._guard_limit()
            pause_s = max(0.0, look_at - time.monotonic())
            received = signal.sigtimedwait(WAITED_FOR, pause_s)
            if received is not None and received.si_signo == signal.SIGUSR1:
                process.send_signal(signal.SIGUSR1)

    def _guard_limit(self) -> float:
        """Have the job requeued if its time limit is near: Slurm does not requeue a job that has reached its limit.

        Returns:
            Seconds until the next look.
        """
        facts = self.look()
        # a cancelled job's time is over, too
        if self.successor or facts.is_ending or not facts.can_requeue:
            return NO_LOOK_S
        if facts.end_s is None:
            return 300.0
        margin_s = float(self.environ.get("LIMIT_MARGIN_S", "20"))
        left_s = facts.end_s - time.time() - margin_s
        if left_s > 0:
            return min(left_s, 300.0)
        if not self._is_to_be_requeued():
            return NO_LOOK_S
        if facts.state and self._try_requeue():
            self.folder.note_requeue(self.n_restarts)
            self.log("the time limit is near, and the program has not ended: requeued")
            return NO_LOOK_S
        return 2.0  # a busy slurmctld may not answer at once

    def _is_to_be_requeued(self) -> bool:
        """Return whether this job has written the decision to run again."""
        try:
            decision = self.folder.decision()
        except UnreadableError:
            return False
        if decision is None or decision.job != self.id:
            return False
        return decision.verdict == "requeue"

    def _try_requeue(self) -> bool:
        """Ask the batch system to requeue the job; return whether it has accepted."""
        return output_of(self._command(self._system.requeue)) is not None

    # -- all launches ----------------------------------------------------------------------------------------------

    def train(self, command: Sequence[str]) -> int:
        """Launch the program, and again on the nodes that are left where it died; return the job's exit code."""
        node_list = self.environ.get("SLURM_JOB_NODELIST", "")
        nodes: Sequence[str] = self.names_of(node_list)
        for restart in range(1, MAX_RESTARTS + 2):
            self._watch_from(nodes)
            launch, failed = self.launch(self._filled(command, nodes))
            os.environ.pop("HPCDIST_PREEMPTED", None)
            facts = self.look()
            situation = Situation(JOB, facts.is_preempted, is_out_of_time(facts))
            remaining = None
            if launch.has_died and not (situation.is_preempted or situation.is_out_of_time):
                remaining = restart_nodes(launch, nodes, self._answering(nodes), failed)
            may_restart = remaining is not None and restart <= MAX_RESTARTS
            has_lost_node = remaining != nodes
            situation = situation._replace(may_restart=may_restart, has_lost_node=has_lost_node)
            action = action_after(launch, situation)
            if action.verb != RESTART or remaining is None:
                break
            names = ",".join(remaining) or "it"
            left_out = set(nodes) - set(remaining)
            if left_out:
                out_names = ",".join(sorted(left_out))
                names += f"; {out_names} stays out until this allocation ends"
            self.log(
                f"exit code {launch.code}: restart {restart} inside the allocation, on {names}"
            )
            nodes = remaining
        if launch.decision != "finished" and launch.code != RUN_AGAIN:
            self._forget_copies(nodes)
        return self.leave(launch)

    def _filled(self, command: Sequence[str], nodes: Sequence[str]) -> list[str]:
        """Return a command for some nodes; for the whole allocation if their names are not known without scontrol."""
        node_list = ",".join(nodes)
        n_nodes = len(nodes)
        if not nodes:
            node_list = self.environ.get("SLURM_JOB_NODELIST", "")
            n_nodes = int(self.environ.get("SLURM_JOB_NUM_NODES", "1"))
        ranks_per_node = int(self.environ.get("SLURM_NTASKS_PER_NODE", "1"))
        return filled(command, node_list, n_nodes, ranks_per_node)

    def _answering(self, nodes: Sequence[str]) -> list[str]:
        """Return the nodes that can start a process. All are asked at the same time, as a lost node does not answer."""
        answers: dict[str, bool] = {}

        def ask(node: str) -> None:
            answers[node] = self._step([node], "true")

        threads = [threading.Thread(target=ask, args=(node,)) for node in nodes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [node for node in nodes if answers[node]]

    def _step(self, nodes: Sequence[str], *command: str) -> bool:
        """Run a command once on each of some nodes; return whether it succeeded."""
        count = str(len(nodes))
        options = (
            "--quiet",
            "--overlap",
            f"--nodes={count}",
            f"--ntasks={count}",
            f"--nodelist={','.join(nodes)}",
        )
        return output_of(["srun", *options, *command]) is not None

    def _forget_copies(self, nodes: Sequence[str]) -> None:
        """Remove the copies of the state from the memory of nodes: a job that died could not."""
        if nodes:
            pattern = f"/dev/shm/hpcdist-{os.getuid()}-{self.id}-*"
            self._step(nodes, "sh", "-c", f"rm -rf {pattern}")

    def _watch_from(self, nodes: Sequence[str]) -> None:
        """Start watch.py on the last of some nodes, as a job may survive the loss of the node of its script."""
        self.end_watch()
        if len(nodes) < 2:
            return
        # No memory and no GPUs: before Slurm 22.05 a step kept them from other steps in spite of --overlap.
        step = [
            "srun",
            "--quiet",
            "--overlap",
            "--mem=0",
            "--gres=none",
            "--nodes=1",
            "--ntasks=1",
            f"--nodelist={nodes[-1]}",
        ]
        folder = os.path.dirname(__file__)
        script = os.path.join(folder, "watch.py")
        program = [sys.executable, "-E", "-S", script, self.successor]
        nowhere = subprocess.DEVNULL
        with contextlib.suppress(OSError):  # a job can run without a watch
            self._watch = subprocess.Popen(
                [*step, *program],
                stdin=nowhere,
                stdout=nowhere,
                stderr=nowhere,
                preexec_fn=receive_signals,
            )

    def end_watch(self) -> None:
        """End the watch, if there is one, without waiting for it, as its node may be lost."""
        if self._watch is not None:
            self._watch.terminate()

    # -- the end ---------------------------------------------------------------------------------------------------

    def leave(self, launch: Launch, is_script_lost: bool = False) -> int:
        """Requeue the job if it is to run again; return its exit code."""
        facts = self.look()
        situation = Situation(JOB, facts.is_preempted, is_out_of_time(facts))
        action = action_after(launch, situation)
        end = f"exit code {launch.code}"
        note = f"job {self.id}: {end}"
        is_early = action.verb == HAND_BACK and action.is_early
        if is_early and not self.folder.may_repeat(note):
            action = not_begun(launch.code)
        if action.verb in (FINISHED, STOP):
            if action.why:
                self.log(f"not run again: {action.why}")
            return action.code
        if self.successor:
            self.log(f"{end}, job {self.successor} continues: {action.why}")
            return RUN_AGAIN
        self.log(f"{end}, to be requeued: {action.why}")
        if not (facts.is_preempted or is_script_lost):
            self.folder.note_requeue(self.n_restarts)
        return self._requeue()

    def _requeue(self) -> int:
        """Have the batch system start the job again. A busy slurmctld has a minute to answer. Return the exit code."""
        for pause_s in self.environ.get("REQUEUE_PAUSES_S", "0 2 4 8 16 32").split():
            time.sleep(float(pause_s))
            facts = self.look()  # without an answer the job may have been cancelled
            if facts.is_ending:
                self.log("left to the batch system, which is ending the job, or requeues it itself")
                return RUN_AGAIN
            if facts.n_restarts is not None and facts.n_restarts > self.n_restarts:
                self.log(
                    "not requeued: the batch system has given up this node and restarted the job"
                )
                return 76
            # Needed even if preempted: before 24.05 Slurm does not requeue a job that ends within its grace time.
            if facts.state and self._system.requeue and self._try_requeue():
                return RUN_AGAIN
        requeue = self._command(self._system.requeue)
        command = shlex.join(requeue) or "the command that submitted the job"
        self.log(f"to resume, run: {command}")
        return RUN_AGAIN

    def withdraw_successor(self) -> None:
        """Cancel the job that is queued to continue this one."""
        job, _, cluster = self.successor.partition(";")
        command = self._command(self._system.cancel, job)
        if cluster:
            command.insert(1, f"--clusters={cluster}")
        if output_of(command) is None:
            self.log(f"to end the chain, run: {shlex.join(command)}")


def is_out_of_time(facts: Facts) -> bool:
    """Return whether the time limit is near or over."""
    if facts.end_s is None:
        return False
    left_s = facts.end_s - time.time()
    return left_s < LIMIT_IS_NEAR_S


class _PassedOn:
    """Copies the output of a process to a stream of this process, and keeps its last 64 KiB."""

    def __init__(self, source: IO[bytes], to: TextIO) -> None:
        self._tail = b""
        self._thread = threading.Thread(target=self._copy, args=(source, to), daemon=True)
        self._thread.start()

    def _copy(self, source: IO[bytes], to: TextIO) -> None:
        while piece := os.read(source.fileno(), _TAIL_BYTES):
            self._tail = (self._tail + piece)[-_TAIL_BYTES:]
            with contextlib.suppress(OSError):  # a full disk must not end the program
                while piece:
                    piece = piece[os.write(to.fileno(), piece) :]

    def text(self) -> str:
        """Return the last 64 KiB of the output, after at most a second: a process left behind may hold the pipe."""
        self._thread.join(1.0)
        return self._tail.decode(errors="replace")


def main(arguments: list[str]) -> int:
    """Run the command; return the job's exit code."""
    signal.pthread_sigmask(signal.SIG_BLOCK, WAITED_FOR)
    successor = ""
    if arguments[:1] == ["--successor"]:
        successor = arguments[1]
        arguments = arguments[2:]
    job = Job(os.environ, successor)
    code = 1
    try:
        code = begin(job, arguments) or job.train(arguments)
    finally:
        job.end_watch()
        if successor and code != RUN_AGAIN:  # whatever failed: a chain must not go on without end
            job.withdraw_successor()
    return code


def begin(job: Job, arguments: Sequence[str]) -> int:
    """Make the run folder at the job's first start, and set variables for the program; return an exit code or 0."""
    options = [part for part in arguments if part.partition("=")[0] == "--run-dir"]
    if len(options) > 1:
        job.log(
            f"expected the run folder in the variable RUN_DIR, got the option {options[0]}; set RUN_DIR=FOLDER before "
            "submitting the job"
        )
        return 2
    if job.n_restarts == 0:
        try:
            job.folder.make_marker()
        except OSError as error:
            job.log(
                f"expected to make {job.folder.marker}, got {error.strerror}; make the folder writable, or choose "
                "another one"
            )
            return 74
    elif not job.folder.has_marker():
        marker = job.folder.marker
        host = socket.gethostname()
        job.log(
            f"expected {marker}, as this job has started before, got none on {host}: is the file system mounted? "
            f"nothing was made; if the job never began, run: mkdir -p {job.folder.path}/jobs && touch {marker}, and "
            f"requeue it"
        )
        return 74
    elif not job.folder.was_requeued(job.n_restarts - 1):
        os.environ["HPCDIST_PREEMPTED"] = "1"
    n_cpus = os.environ.get("SLURM_CPUS_PER_TASK", "1")
    os.environ.setdefault("OMP_NUM_THREADS", n_cpus)
    end_s = job.look().end_s
    if end_s is not None:
        # older versions of Slurm do not set SLURM_JOB_END_TIME
        end_variable = "SLURM_JOB_END_TIME" if job.is_slurm else "HPCDIST_JOB_END_S"
        os.environ[end_variable] = str(int(end_s))
    if not job.is_slurm:
        os.environ["HPCDIST_JOB_ID"] = job.id  # Flux's launcher sets another one
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

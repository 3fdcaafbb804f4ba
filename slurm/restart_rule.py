"""The rule of restarts, from a launch's decision and exit code to what follows. job.py and `hpcdist run` obey it.

The first row that fits counts. "As it died": the launch left no word of its end in the ledger, as it was killed or an
error ended it.

| decision of the launch | exit code | besides | then | exit code afterwards |
|---|---|---|---|---|
| finished | 0, or of a signal | | finished | 0 |
| finished | other, as of an error behind the training | | finished | the launch's |
| any | 2, 76, 78 | | stop | the launch's |
| stop, or another job's | any | | stop | 76 |
| requeue, as it died | any but 74, 75 | a restart is possible | restart now | |
| requeue, as it died | 74 | `hpcdist run`, a restart is possible | restart now | |
| requeue, as it died | any | | hand back | job.py: 75; `hpcdist run`: the launch's, 1 for 0 |
| requeue, other reason | any | | hand back | 75; `hpcdist run`: 70 and 74 stay |
| none | 0 | `hpcdist run`, no earlier "requeue" | finished | 0 |
| none | any but 74, 75 | job.py: a node is lost, a restart is possible | restart now | |
| none | 0, or of a signal | preempted | hand back | job.py: 75; `hpcdist run`: the launch's, 1 for 0 |
| none | 0, or of a signal | out of time | hand back, few times | job.py: 75; `hpcdist run`: the launch's, 1 for 0 |
| none | of a signal | `hpcdist run`, a restart is possible | restart now | |
| none | any but 75 | `hpcdist run`, a restart is possible, an earlier "requeue" | restart now | |
| none | of a signal | | hand back, few times | job.py: 75; `hpcdist run`: the launch's, 1 for 0 |
| none | any | an earlier "requeue" | hand back, few times | job.py: 75; `hpcdist run`: the launch's, 1 for 0 |
| none | any | | stop | the launch's, 1 for 0 |

"Hand back" has job.py requeue the job; `hpcdist run` has no batch system, and ends. So a program that died before it
had begun is restarted at once by `hpcdist run`, and handed back by job.py. A restart is possible where restarts and
nodes are left, the job is not preempted or out of time, and nobody has asked `hpcdist run` to end (Ctrl-C). "Few times"
is counted in the run folder.

Needs the standard library only: job.py starts as `python -E -S`.
"""

import os
from typing import NamedTuple

#: Exit codes of hpcdist after which the same command would end in the same way: usage, "do not requeue", configuration.
FINAL_CODES = (2, 76, 78)
#: The exit code of an internal error.
INTERNAL = 70
#: The exit code of a file system that did not read or write a checkpoint.
CHECKPOINT_IO = 74
#: The exit code that asks to be run again.
RUN_AGAIN = 75
#: The exit code after which nothing may be run again.
DO_NOT_REQUEUE = 76

#: Verbs of an `Action`.
FINISHED = "finished"
RESTART = "restart now"
HAND_BACK = "hand back"
STOP = "stop"
#: Callers of the rule.
JOB = "job.py"
RUN = "hpcdist run"
#: Larger codes, such as 255 of `sys.exit(-1)`, mean no signal.
_LAST_SIGNAL = 64
#: Signals by whose numbers MPICH's mpirun exits: ILL, ABRT, BUS, FPE, KILL, USR1, SEGV, USR2, TERM.
_MPIRUN_SIGNALS = (4, 6, 7, 8, 9, 10, 11, 12, 15)


class Launch(NamedTuple):
    """How a launch ended.

    Attributes:
        code: exit code of the launcher; 128 + n if signal n ended it.
        decision: "requeue", "stop" or "finished"; "none" if the launch wrote no decision, "another" if another job has
            taken over the run.
        reason: reason of the decision, or of the earlier one if that is "stop"; for "another", the other job's id.
        earlier: decision before the launch, of any job; "none" if there was none, or the launch has replaced it.
        is_signalled: whether the exit code is that of a signal.
    """

    code: int
    decision: str = "none"
    reason: str = ""
    earlier: str = "none"
    is_signalled: bool = False

    @property
    def has_died(self) -> bool:
        """Whether the launch died: it left no word of its end, as it was killed, or an error ended it."""
        if self.code in (*FINAL_CODES, CHECKPOINT_IO, RUN_AGAIN):
            return False
        if self.decision == "requeue":
            return self.reason.startswith("died")
        return self.decision == "none"


class Situation(NamedTuple):
    """The facts besides the launch.

    Attributes:
        caller: JOB or RUN.
        is_preempted: whether the batch system is taking the job's nodes away.
        is_out_of_time: whether the time limit is near.
        may_restart: whether restarts and nodes are left, and nobody has asked the caller to end.
        has_lost_node: whether a node of the launch does not answer any more.
    """

    caller: str
    is_preempted: bool = False
    is_out_of_time: bool = False
    may_restart: bool = False
    has_lost_node: bool = False


class Action(NamedTuple):
    """The action that follows a launch.

    Attributes:
        verb: FINISHED, RESTART, HAND_BACK or STOP.
        code: exit code to leave with; before a restart, the exit code of the launch.
        why: reason, for the log; empty at a good end.
        is_early: whether the program had not begun, so that it is handed back only a few times in a row.
    """

    verb: str
    code: int
    why: str = ""
    is_early: bool = False


def action_after(launch: Launch, situation: Situation) -> Action:
    """Return the action that follows a launch, by the table of this file."""
    if launch.decision == "finished":
        if launch.code == 0 or launch.is_signalled:
            return Action(FINISHED, 0)
        return Action(FINISHED, launch.code, f"finished, and then exit code {launch.code}")
    if launch.code in FINAL_CODES:
        reason = f"exit code {launch.code}"
        is_of_earlier = launch.code == DO_NOT_REQUEUE and launch.earlier == "stop"
        if launch.decision == "stop" or is_of_earlier:
            reason = launch.reason or reason
        return Action(STOP, launch.code, reason)
    if launch.decision == "stop":
        return Action(STOP, DO_NOT_REQUEUE, launch.reason)
    if launch.decision == "another":
        return Action(STOP, DO_NOT_REQUEUE, f"job {launch.reason} has taken over the run folder")
    if launch.decision == "requeue":
        return _after_requeue(launch, situation)
    return _after_no_decision(launch, situation)


def _after_requeue(launch: Launch, situation: Situation) -> Action:
    """Return the action after a launch with the decision "requeue"."""
    code = launch.code
    reason = launch.reason
    was_cut_by_disk = code == CHECKPOINT_IO and reason.startswith("died")
    # job.py waits for the disk by being requeued
    may_pass = was_cut_by_disk and situation.caller == RUN
    if (launch.has_died or may_pass) and _is_restart_possible(situation):
        return Action(RESTART, code, reason)
    if situation.caller == JOB:
        return Action(HAND_BACK, RUN_AGAIN, reason)
    if launch.has_died:
        return Action(HAND_BACK, code or 1, reason)
    if code in (INTERNAL, CHECKPOINT_IO):
        return Action(HAND_BACK, code, reason)
    return Action(HAND_BACK, RUN_AGAIN, reason)


def _after_no_decision(launch: Launch, situation: Situation) -> Action:
    """Return the action after a launch that has written no decision."""
    was_under_way = launch.earlier == "requeue"
    is_run = situation.caller == RUN
    if is_run and launch.code == 0 and not was_under_way:
        return Action(FINISHED, 0)
    can_restart = _is_restart_possible(situation) and launch.code != RUN_AGAIN
    if can_restart and not is_run and situation.has_lost_node and launch.has_died:
        return Action(RESTART, launch.code, "a node is lost")
    code = RUN_AGAIN
    if is_run:
        code = launch.code or 1
    may_be_ended_from_outside = launch.code == 0 or launch.is_signalled
    if may_be_ended_from_outside and situation.is_preempted:
        return Action(HAND_BACK, code, "preempted before training had begun")
    if may_be_ended_from_outside and situation.is_out_of_time:
        return Action(HAND_BACK, code, "out of time before training had begun", is_early=True)
    if not launch.is_signalled and not was_under_way:
        return not_begun(launch.code)
    if can_restart and is_run:
        return Action(RESTART, code, "died before training had begun")
    return Action(HAND_BACK, code, "died before training had begun", is_early=True)


def _is_restart_possible(situation: Situation) -> bool:
    return situation.may_restart and not situation.is_preempted and not situation.is_out_of_time


def not_begun(code: int) -> Action:
    """Return the end of a job whose program did not begin. It is no success, whatever the launcher says."""
    why = f"exit code {code} before training had begun"
    return Action(STOP, code or 1, why)


def is_of_signal(code: int, launcher: str) -> bool:
    """Return whether an exit code means that a signal ended a rank or the launcher.

    Args:
        code: exit code of the launcher.
        launcher: path of the launcher. MPICH's mpirun exits with the number of a rank's signal; 128 + n means a signal
            everywhere. The name does not say whose mpirun it is, so these numbers count for Open MPI's, too.
    """
    is_mpirun = os.path.basename(launcher).startswith("mpi")
    return 128 < code <= 128 + _LAST_SIGNAL or (is_mpirun and code in _MPIRUN_SIGNALS)

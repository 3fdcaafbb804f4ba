"""Stand-ins for programs of Slurm, in a folder that comes first on a test's PATH."""

#: Answers as the variables STATE, RESTARTS, PREEMPTED and REFUSALS say. Asked for an array, it tells of all its tasks.
SCONTROL = """#!/usr/bin/env bash
if [[ $2 == hostnames ]]; then
  if [[ $3 != n2 ]]; then echo n1; fi
  echo n2
  exit
fi
if [[ $1 == requeue ]]; then
  echo >> "$0.tries"
  mapfile -t tries < "$0.tries"
  if ((${#tries[@]} <= REFUSALS)); then exit 1; fi
  echo "requeued $2" >> "${0%/*}/calls"
  exit
fi
if [[ -z $STATE || $SLURM_TIME_FORMAT != %s ]]; then exit 1; fi
if [[ ${SLURM_ARRAY_JOB_ID:-} == "$SLURM_JOB_ID" && $4 != *_* ]]; then
  echo "JobId=6 ArrayJobId=7 ArrayTaskId=1 JobState=CANCELLED Restarts=0 StartTime=1000" \
    "EndTime=1030 PreemptTime=4600"
fi
echo "JobId=$SLURM_JOB_ID JobName=job JobState=$STATE Reason=None Requeue=1 Restarts=$RESTARTS BatchFlag=1" \
  "StartTime=1000 EndTime=$END Deadline=N/A PreemptEligibleTime=1000" \
  "PreemptTime=$PREEMPTED BatchHost=n1 NodeList=$NODES StdErr=$RUN_DIR/log"
"""

#: The variables of a job that runs, and what the stand-in for scontrol answers.
JOB = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NAME": "job",
    "STATE": "RUNNING",
    "PREEMPTED": "None",
    "RESTARTS": "0",
    "REFUSALS": "0",
    "END": "Unknown",
    "NODES": "n[1-2]",
}


def add_program(folder, name, text):
    """Make a program in a folder."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)

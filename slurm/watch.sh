#!/usr/bin/env bash
# Put a job into the queue again whose batch script is lost with its node: with --no-kill Slurm lets such a job run on,
# without a script, until its time is over. train.sbatch has this run on another node.
trap '' USR1 PIPE # all steps get the first before the time is over; the second comes when what reads our output is lost
source slurm/requeue.sh

# Whether Slurm has taken the script's node away from the job, as it does when a node has not answered for SlurmdTimeout.
is_script_lost() {
  local host left newline=$'\n'
  look_up
  host=$(field BatchHost)
  left=$(scontrol show hostnames "$(field NodeList)" 2> /dev/null)
  # safety: a job that runs is watched
  [[ $(field JobState) == RUNNING && -n $host && -n $left && $newline$left$newline != *"$newline$host$newline"* ]]
}

state=
while sleep "${WATCH_PAUSE_S:-30}"; do # for ever: who requeues or ends the job ends this too
  if ! is_script_lost; then continue; fi # safety: requeued only if the script is lost
  log=$(field StdErr)
  if [[ -f $log ]]; then exec 2>> "$log"; fi
  say "the node of the batch script is lost"
  if ! await_decision; then continue; fi # safety: watch on while no decision can be read
  code=137 verdict=none earlier=$(fact decision)
  if is_own; then verdict=$earlier; fi
  (leave)
  if (($? != 75)) && is_script_lost; then scancel "$job"; fi # nobody else would end it
done

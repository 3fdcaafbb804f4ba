#!/usr/bin/env bash
# Requeue a job whose batch script was lost with its node: with --no-kill Slurm keeps such a job running without a script
# until its time is over. train.sbatch starts this on another node.
trap '' USR1 PIPE # Slurm sends USR1 to all steps near the time limit; PIPE arrives if the reader of the output is lost
# shellcheck disable=SC2034  # requeue.sh reads it
is_watch=1
source slurm/requeue.sh

# Whether Slurm has removed the script's node from the job, as it does once a node has not answered for SlurmdTimeout.
is_script_lost() {
  local host left newline=$'\n'
  look_up
  host=$(field BatchHost)
  left=$(scontrol show hostnames "$(field NodeList)" 2> /dev/null)
  # safety: a job that runs is watched
  [[ $(field JobState) == RUNNING && -n $host && -n $left && $newline$left$newline != *"$newline$host$newline"* ]]
}

state=
while sleep "${WATCH_PAUSE_S:-30}"; do # endless: requeueing or ending the job ends this step too
  if ! is_script_lost; then continue; fi # safety: requeued only if the script is lost
  log=$(field StdErr)
  if [[ -f $log ]]; then exec 2>> "$log"; fi
  say "the node of the batch script is lost"
  if ! await_decision; then continue; fi # safety: watch on while no decision can be read
  is_node_lost=1 # Slurm's doing
  code=137 verdict=none earlier=$(fact decision)
  if is_own; then verdict=$earlier; fi
  (leave)
  if (($? != 75)) && is_script_lost; then scancel "$job"; fi # nothing else would end it
done

# shellcheck shell=bash
# What the recipes share: launch, and then do as the run's decision.json says. Source it in the repository's folder.
#
# Exit codes of launchers are not enough: a job that is killed has none, and an mpirun was seen to exit 0 after its ranks
# were killed. So the program says in decision.json, at any time, what to do should it die now: "requeue" (run it again),
# "stop" (three attempts in a row came no further) or "finished".
#
# Lines marked "safety" are those that tests/mutants.py takes out one by one: a test must fail then.

set -uo pipefail
: "${RUN_DIR:=runs/$SLURM_JOB_NAME}" "${PYTHON:=.venv/bin/python}" # to be set before sbatch, if need be
# What scontrol calls this job: the last task of an array has the id of the whole. (The variables of an array may also be left
# from the job that submitted this one; they differ from its id then.)
job=$SLURM_JOB_ID
# safety: id of an array's task, id left by another array
if [[ ${SLURM_ARRAY_JOB_ID:-} == "$job" ]]; then job+=_$SLURM_ARRAY_TASK_ID; fi
early_deaths=$RUN_DIR/early-deaths # a line for each launch in a row that ended before its program had begun
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}

say() { echo "$(date +%FT%T) ${SLURM_JOB_NAME} ${SLURM_JOB_ID}: $*" >&2; }

for option; do
  if [[ $option == --run-dir || $option == --run-dir=* ]]; then
    say "expected the run folder in the variable RUN_DIR, got the option $option; set RUN_DIR=FOLDER before sbatch"
    exit 2
  fi
done

# Print a field of decision.json: each has a line.
fact() { sed -n "/^ *\"$1\": /{s///;s/,\$//;s/^\"\(.*\)\"\$/\1/;s/\\\\\(.\)/\1/g;p}" "$RUN_DIR/decision.json" 2> /dev/null; }

# Whether this job wrote decision.json, not one that has the run folder by now, or had it before.
is_own() { [[ $(fact job) == "$SLURM_JOB_ID" ]]; } # safety: only this job's decision

# Print what differs after every write of decision.json, which replaces it: its time has whole seconds, and attempts count
# from 1 again where the checkpoints were removed. `cat` comes first: on NFS what `stat` says is fresh after an open.
stamp() { { cat "$RUN_DIR/decision.json" && stat --format='%i %y' "$RUN_DIR/decision.json"; } 2> /dev/null; }

# Wait until decision.json can be read, or is not there. A file server may be away for a while, and may be what ended the
# program; 1 if it stays away.
await_decision() {
  local pause names
  for pause in ${READ_PAUSES_S:-2 4 8 16 32} last; do
    if names=$(ls "$RUN_DIR/" 2> /dev/null); then
      if [[ -n $(fact decision) ]] || ! grep --quiet --line-regexp decision.json <<< "$names"; then return 0; fi
    fi
    if [[ $pause != last ]]; then sleep "$pause"; fi
  done
  return 1
}

# Run a command and set `code` to its exit code, and `verdict` to the decision that it wrote: "none" where it ended before
# it could write one, "another" where another job writes in the run folder by now. `earlier` is what stood there before, of
# any job, if it still stands, or cannot be read any more.
launch() {
  local before
  mkdir -p "$RUN_DIR" # a new run has none yet
  before=$(stamp) earlier=$(fact decision)
  "$@"
  code=$?
  verdict=none
  if ! await_decision || [[ $(stamp) == "$before" ]]; then return; fi # safety: a decision that cannot be read
  earlier=none
  if is_own; then
    verdict=$(fact decision)
    rm -f "$early_deaths"
  elif [[ -n $(fact decision) ]]; then # it has not been removed
    verdict=another # safety: the run was taken over
  fi
}

# Whether a signal ended the launch, as far as its exit code tells.
is_signalled() { ((code > 128)); }

# Whether the launch ended without having been asked to, and without a reason of its own.
has_died() {
  case $code:$verdict in
    2:* | 74:* | 75:* | 76:* | 78:*) return 1 ;;
    *:requeue) [[ $(fact reason) == died* ]] ;;
    *) [[ $verdict == none ]] ;;
  esac
}

# Set `state` to what Slurm says of this job, on one line.
look_up() { state=$(SLURM_TIME_FORMAT=standard scontrol --oneliner show job "$job" 2> /dev/null); }

# Print a field of `state`, such as JobState.
field() {
  local pattern=" $1=([^ ]+)"
  [[ " $state" =~ $pattern ]] && echo "${BASH_REMATCH[1]}"
}

# Whether the job was preempted, since it started last.
is_preempted() {
  local state preempted
  look_up
  preempted=$(field PreemptTime)
  [[ $preempted == [0-9]* && ! $preempted < $(field StartTime) ]]
}

# Print when the job's time is over, in seconds since 1970; nothing if that is not known.
end_time() {
  local state end
  look_up
  if ! { end=$(field EndTime) && date --date="$end" +%s 2> /dev/null; }; then echo "${SLURM_JOB_END_TIME:-}"; fi
}

is_out_of_time() {
  local end
  end=$(end_time)
  [[ $end =~ ^[0-9]+$ ]] && ((end - $(date +%s) < 180))
}
# For the program: older versions of Slurm do not set it, and leave that of the job which submitted this one.
SLURM_JOB_END_TIME=$(end_time)
export SLURM_JOB_END_TIME

# Whether Slurm has asked the job to end.
is_called_off() { is_out_of_time || is_preempted; }

# Print the nodes of the allocation that start a process, with commas: Slurm takes minutes to notice one that is lost.
answering_nodes() {
  local node
  for node in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do
    (timeout --kill-after=5 30 srun --quiet --overlap --nodes=1 --ntasks=1 --nodelist="$node" true < /dev/null 2> /dev/null && echo "$node") &
  done | sort --version-sort | paste --serial --delimiters=,
}

# Give back the memory of some nodes, which has copies of the state: a job that died could not remove them. Where another
# job has the run by now, they are left: it may use them on the same nodes.
forget_copies() {
  local id
  if [[ -z $1 ]] || ! is_own; then return 0; fi
  id=$(cat "$RUN_DIR/checkpoints/run-id" 2> /dev/null)
  if ! [[ $id =~ ^[0-9a-f]+$ ]]; then return 0; fi
  timeout --kill-after=5 30 srun --quiet --overlap --nodelist="$1" --nodes="$2" --ntasks="$2" \
    rm -rf "/dev/shm/hpcdist-$UID-$id" < /dev/null
}

# Have the last of some nodes watch over the node of this script, which ends that watch: no news for the log.
watch_from() {
  if [[ -n ${watcher:-} ]]; then kill "$watcher" 2> /dev/null; fi
  # It takes no memory and no GPUs: before 22.05 a step kept them from others, in spite of --overlap.
  RUN_DIR=$RUN_DIR srun --quiet --overlap --mem=0 --gres=none --nodes=1 --ntasks=1 \
    --nodelist="$(scontrol show hostnames "$1" | tail -1)" bash slurm/watch.sh < /dev/null &> /dev/null &
  watcher=$!
  trap 'kill "$watcher" 2> /dev/null' EXIT
}

# Put the job into the queue again. It starts from the top, in its old log. A busy slurmctld has about a minute to answer.
requeue() {
  local pause state=
  say "exit code $code, to be requeued: $1"
  for pause in ${REQUEUE_PAUSES_S:-0 2 4 8 16 32}; do
    type -P scontrol > /dev/null || break
    sleep "$pause"
    look_up # without an answer it is not known whether the job was cancelled
    if [[ $(field JobState) == @(CANCELLED|COMPLETING) ]]; then # safety: a cancelled job stays cancelled
      say "not requeued: Slurm ends the job"
      exit 75
    fi
    if (($(field Restarts) + 0 > ${SLURM_RESTART_COUNT:-0})); then # safety: not requeued if Slurm has restarted it
      say "not requeued: Slurm gave up this node, and has started the job again"
      exit 76
    fi
    # Also when preempted: before 24.05 Slurm requeues no job that ends in time.
    if [[ -n $state ]] && scontrol requeue "$job"; then exit 75; fi
  done
  say "to go on, run: scontrol requeue $job"
  exit 75
}

# Whether a launch that ended before it had begun is to be repeated: three times in a row.
is_repeated() {
  local deaths
  echo "$(date +%FT%T) job $SLURM_JOB_ID: exit code $code" >> "$early_deaths" || return 1
  mapfile -t deaths < "$early_deaths"
  if ((${#deaths[@]} <= 3)); then return 0; fi # safety: early deaths end a chain
  rm -f "$early_deaths" # who submits it again wants other tries
  return 1
}

# End the script as decision.json says.
leave() {
  local why
  case $code:$verdict in
    2:* | 76:* | 78:*) why="exit code $code" ;; # safety: codes that end a chain
    *:finished) exit "$code" ;;
    *:requeue) requeue "$(fact reason)" ;;
    *:stop) why=$(fact reason) code=76 ;;
    *:another) why="job $(fact job) has taken over $RUN_DIR" code=76 ;;
    *)
      why= # what ran before may run again, and what a signal ended too: a wrong command ends with 127 at most
      if [[ $earlier == requeue ]] || is_signalled; then why="died before it had begun"; fi
      if ((code == 0)) || is_signalled; then
        if is_preempted; then requeue "preempted before it had begun"; fi # that may well happen many times
        if is_out_of_time; then why="out of time before it had begun"; fi # or a start that hangs: it counts
      fi
      if [[ -n $why ]] && is_repeated; then requeue "$why"; fi
      why="exit code $code before it had begun"
      if ((code == 0)); then code=1; fi # safety: no code 0 without a decision
      ;;
  esac
  say "not run again: $why"
  exit "$code"
}

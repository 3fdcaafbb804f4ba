# shellcheck shell=bash
# Shared by the recipes: launch the program, then act on the run's decision.json. Source it in the repository's folder.
#
# Launchers' exit codes do not suffice: a killed job has none, and mpirun was seen to exit 0 after its ranks were killed.
# So at any time decision.json states what to do if the program dies now: "requeue" (run it again), "stop" (attempts
# made no progress, ranks differ, or the checkpoint is of another model) or "finished".
#
# `make mutants` removes the lines marked "safety" one by one and checks that a test fails.

set -uo pipefail
: "${RUN_DIR:=runs/$SLURM_JOB_NAME}" "${PYTHON:=.venv/bin/python}" # may be set before sbatch
# The job's id for scontrol: the last task of an array shares the id of the whole array. (The array variables may also be
# inherited from the job that submitted this one; then they differ from its id.)
job=$SLURM_JOB_ID
# safety: id of an array's task, id left by another array
if [[ ${SLURM_ARRAY_JOB_ID:-} == "$job" ]]; then job+=_$SLURM_ARRAY_TASK_ID; fi
early_deaths=$RUN_DIR/early-deaths # one line per consecutive launch that ended before its program had begun
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}

say() { echo "$(date +%FT%T) ${SLURM_JOB_NAME} ${SLURM_JOB_ID}: $*" >&2; }

for option; do
  if [[ $option == --run-dir || $option == --run-dir=* ]]; then
    say "expected the run folder in the variable RUN_DIR, got the option $option; set RUN_DIR=FOLDER before sbatch"
    exit 2
  fi
done

# Set `state` to Slurm's record of this job, on one line, with times in seconds since 1970: a time of day may come twice.
look_up() { state=$(SLURM_TIME_FORMAT=%s scontrol --oneliner show job "$job" 2> /dev/null); }

# Print a field of `state`, such as JobState.
field() {
  local pattern=" $1=([^ ]+)"
  [[ " $state" =~ $pattern ]] && echo "${BASH_REMATCH[1]}"
}

# The job's own record in the run folder: it is made at the job's first start, which also makes the folder. A later start that
# does not find it is on a node that does not see the folder: it would train anew, somewhere else.
marker=$RUN_DIR/jobs/$SLURM_JOB_ID
look_up
n_restarts=${SLURM_RESTART_COUNT:-0} # may be inherited from the job that submitted this one: never more than Slurm says
if (($(field Restarts) + 0 < n_restarts)) && [[ -n $state ]]; then n_restarts=$(field Restarts); fi
if ((n_restarts == 0)) && [[ -z ${is_watch:-} ]]; then # safety: only the batch script makes the run folder
  mkdir -p "$RUN_DIR/jobs" && touch "$marker"
else
  for pause in ${READ_PAUSES_S:-2 4 8 16 32} 0; do
    if [[ -e $marker ]]; then break; fi
    sleep "$pause"
  done
  if [[ ! -e $marker ]]; then # safety: no start anew where the run folder is not there
    say "expected $marker, as this job has started before, got none on $(hostname): is the file system mounted? nothing was made;" \
      "if the job never began, run: mkdir -p $RUN_DIR/jobs && touch $marker && scontrol requeue $job"
    exit 74
  fi
  # safety: what Slurm ends does not count
  if ((n_restarts > 0)) && ! grep --quiet --line-regexp "requeued after restart $((n_restarts - 1))" "$marker"; then export HPCDIST_PREEMPTED=1; fi
fi

# Note that the requeue that follows is not Slurm's doing: the attempt counts if it made no progress.
note_requeue() { echo "requeued after restart $n_restarts" >> "$marker"; }

# Print a field of decision.json, which has one field per line.
fact() { sed -n "/^ *\"$1\": /{s///;s/,\$//;s/^\"\(.*\)\"\$/\1/;s/\\\\\(.\)/\1/g;p}" "$RUN_DIR/decision.json" 2> /dev/null; }

# Whether this job wrote decision.json, and not an earlier or later job with the same run folder.
is_own() { [[ $(fact job) == "$SLURM_JOB_ID" ]]; } # safety: only this job's decision

# Print text that changes with every write of decision.json. Its content may repeat: its time has whole seconds, and attempts
# restart at 1 if the checkpoints were removed. `cat` comes first, as on NFS an open refreshes what `stat` prints.
stamp() { { cat "$RUN_DIR/decision.json" && stat --format='%i %y' "$RUN_DIR/decision.json"; } 2> /dev/null; }

# Wait until decision.json is readable or known to be absent; return 1 if neither happens. A file server may be unreachable
# for a while, and that may have ended the program.
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

# Run a command and set `code` to its exit code and `verdict` to its decision: "none" if it ended before it wrote one,
# "another" if another job has taken over the run folder. `earlier` is the previous decision, of any job, unless this launch
# has replaced it.
launch() {
  local before guard
  before=$(stamp) earlier=$(fact decision)
  guard_limit &
  guard=$!
  "$@"
  code=$?
  kill "$guard" 2> /dev/null
  unset HPCDIST_PREEMPTED
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

# Whether a signal ended the launch, judging by its exit code.
is_signalled() { ((code > 128)); }

# Whether the launch died: neither stopped on request nor ended with an error of its own.
has_died() {
  case $code:$verdict in
    2:* | 74:* | 75:* | 76:* | 78:*) return 1 ;;
    *:requeue) [[ $(fact reason) == died* ]] ;;
    *) [[ $verdict == none ]] ;;
  esac
}

# Whether the job was preempted since its last start.
is_preempted() {
  local state preempted
  look_up
  preempted=$(field PreemptTime)
  [[ $preempted =~ ^[0-9]+$ ]] && ((preempted >= $(field StartTime)))
}

# Print the end of the job's time, in seconds since 1970; nothing if unknown.
end_time() {
  local state end
  look_up
  end=$(field EndTime)
  if [[ $end =~ ^[0-9]+$ ]]; then echo "$end"; else echo "${SLURM_JOB_END_TIME:-}"; fi
}

is_out_of_time() {
  local end
  end=$(end_time)
  [[ $end =~ ^[0-9]+$ ]] && ((end - $(date +%s) < 180))
}
# Requeue the job shortly before its time is over, unless the program has ended by then: Slurm does not requeue a job that has
# reached its limit. The program gets a SIGTERM and KillWait from that.
guard_limit() {
  local end left clock state=
  exec {clock}<> <(:) # `read` from it only waits, and ends with this function: `sleep` would outlive it
  while end=$(end_time) && [[ $end =~ ^[0-9]+$ ]]; do
    left=$((end - $(date +%s) - ${LIMIT_MARGIN_S:-20}))
    if ((left <= 0)); then break; fi
    read -r -t "$((left < 300 ? left : 300))" -u "$clock" _
  done
  if ! [[ $end =~ ^[0-9]+$ && $(fact decision) == requeue ]] || ! is_own; then return; fi
  for ((left = 6; left > 0; left--)); do # a busy slurmctld may not answer at once
    look_up
    if [[ -n $state && $(field Requeue) != 1 ]]; then return; fi # such as a chain, whose successor is queued
    if [[ -n $state ]] && scontrol requeue "$job"; then
      note_requeue
      say "the time limit is near, and the program has not ended: requeued"
      return
    fi
    read -r -t 2 -u "$clock" _
  done
}
# For the program: older versions of Slurm do not set it, so it may be inherited from the submitting job.
SLURM_JOB_END_TIME=$(end_time)
export SLURM_JOB_END_TIME

# Whether Slurm has asked the job to end.
is_called_off() { is_out_of_time || is_preempted; }

# Print the nodes of the allocation that can start a process, joined by commas: Slurm takes minutes to detect a lost node.
answering_nodes() {
  local node
  for node in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do
    (timeout --kill-after=5 30 srun --quiet --overlap --nodes=1 --ntasks=1 --nodelist="$node" true < /dev/null 2> /dev/null && echo "$node") &
  done | sort --version-sort | paste --serial --delimiters=,
}

# Remove the copies of the state from the memory of some nodes: a job that died could not. If another job has taken over the
# run, they stay: it may use them on the same nodes.
forget_copies() {
  local id
  if [[ -z $1 ]] || ! is_own; then return 0; fi
  read -r id _ 2> /dev/null < "$RUN_DIR/checkpoints/run-id" # the second word is the folder's inode
  if ! [[ $id =~ ^[0-9a-f]+$ ]]; then return 0; fi
  timeout --kill-after=5 30 srun --quiet --overlap --nodelist="$1" --nodes="$2" --ntasks="$2" \
    rm -rf "/dev/shm/hpcdist-$UID-$id" < /dev/null
}

# Start watch.sh on the last of some nodes, to watch the node of this script. Its end is not worth a line in the log.
watch_from() {
  if [[ -n ${watcher:-} ]]; then kill "$watcher" 2> /dev/null; fi
  # It requests no memory and no GPUs: before 22.05 a step blocked them for others in spite of --overlap.
  RUN_DIR=$RUN_DIR srun --quiet --overlap --mem=0 --gres=none --nodes=1 --ntasks=1 \
    --nodelist="$(scontrol show hostnames "$1" | tail -1)" bash slurm/watch.sh < /dev/null &> /dev/null &
  watcher=$!
  trap 'kill "$watcher" 2> /dev/null' EXIT
}

# Requeue the job. It starts from the beginning and appends to its log. A busy slurmctld has about a minute to answer.
requeue() {
  local pause state=
  say "exit code $code, to be requeued: $1"
  if [[ -z ${is_node_lost:-} ]] && ! is_preempted; then note_requeue; fi
  for pause in ${REQUEUE_PAUSES_S:-0 2 4 8 16 32}; do
    type -P scontrol > /dev/null || break
    sleep "$pause"
    look_up # without an answer the job may have been cancelled
    # safety: a cancelled job stays cancelled
    if [[ $(field JobState) == @(CANCELLED|COMPLETING) && $(field Reason) != TimeLimit ]]; then
      say "not requeued: Slurm is ending the job"
      exit 75
    fi
    if (($(field Restarts) + 0 > n_restarts)); then # safety: not requeued if Slurm has restarted it
      say "not requeued: Slurm has given up this node and restarted the job"
      exit 76
    fi
    # Needed even if preempted: before 24.05 Slurm does not requeue a job that ends within its grace time.
    if [[ -n $state ]] && scontrol requeue "$job"; then exit 75; fi
  done
  say "to resume, run: scontrol requeue $job"
  exit 75
}

# Whether to repeat a launch that ended before its program had begun: at most three times in a row.
is_repeated() {
  local deaths
  echo "$(date +%FT%T) job $SLURM_JOB_ID: exit code $code" >> "$early_deaths" || return 1
  mapfile -t deaths < "$early_deaths"
  if ((${#deaths[@]} <= 3)); then return 0; fi # safety: early deaths end a chain
  rm -f "$early_deaths" # submitting the job again permits new tries
  return 1
}

# Exit or requeue according to decision.json.
leave() {
  local why
  case $code:$verdict in
    2:* | 76:* | 78:*) why="exit code $code" ;; # safety: codes that end a chain
    *:finished) exit "$code" ;;
    *:requeue) requeue "$(fact reason)" ;;
    *:stop) why=$(fact reason) code=76 ;;
    *:another) why="job $(fact job) has taken over $RUN_DIR" code=76 ;;
    *)
      why= # repeat if the run has begun before, or if a signal ended the launch: a wrong command exits with 127 at most
      if [[ $earlier == requeue ]] || is_signalled; then why="died before it had begun"; fi
      if ((code == 0)) || is_signalled; then
        if is_preempted; then requeue "preempted before it had begun"; fi # not counted: it may happen many times
        if is_out_of_time; then why="out of time before it had begun"; fi # counted, as the start may hang
      fi
      if [[ -n $why ]] && is_repeated; then requeue "$why"; fi
      why="exit code $code before it had begun"
      if ((code == 0)); then code=1; fi # safety: no code 0 without a decision
      ;;
  esac
  say "not run again: $why"
  exit "$code"
}

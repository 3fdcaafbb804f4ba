#!/usr/bin/env bash
# Train under Flux:   flux batch -N 2 -n 4 slurm/train.flux [options of jobs/train.py]
# Written from the manual of Flux, and not tried on one. Flux does not requeue jobs: each job submits its successor before
# it trains, and cancels it if it is not needed.
# flux: --job-name=hpcdist-train
# flux: --time-limit=1h

[[ -f slurm/job.py ]] || { echo "expected the repository's folder, got $PWD; submit from there" >&2; exit 78; }
PYTHON=${PYTHON:-.venv/bin/python}
type -P "$PYTHON" > /dev/null || { echo "expected Python at $PYTHON, got none; run make train, or set PYTHON" >&2; exit 78; }
export RUN_DIR=${RUN_DIR:-runs/hpcdist-train}
FLUX_JOB_ID=$(flux getattr jobid) || exit 1
export FLUX_JOB_ID
n_nodes=$(flux getattr size)
replicas=${RANKS:-$(flux resource list --states=up --no-header --format '{ncores}')}

successor=$(flux --parent batch --dependency=afterany:"$FLUX_JOB_ID" -N "$n_nodes" -n "$replicas" \
  slurm/train.flux "$@") || exit 1

exec "$PYTHON" -E -S slurm/job.py --successor "$successor" flux run -N "$n_nodes" -n "$replicas" \
  "$PYTHON" jobs/train.py --replicas "$replicas" "$@" --run-dir "$RUN_DIR"

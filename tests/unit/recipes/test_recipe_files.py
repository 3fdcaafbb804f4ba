"""What the recipes do around their launches, with stand-ins for Slurm's programs: restarts, copies, options, chains."""

import os
import subprocess
import sys

import pytest
from stand_ins import JOB, SCONTROL, add_program

pytestmark = pytest.mark.timeout(60)
RECIPES = ("train", "train-mpirun", "train-ps", "train-array", "train-chain")
SRUN = """#!/usr/bin/env bash
case " $* " in
  *" true ") exit ;;
  *" sh -c rm -rf "*) echo "removes ${*: -1}" >> "${0%/*}/calls"; exit ;;
  *"/watch.py "*) echo "$*" >> "$0.watches"; exec sleep 60 ;;
esac
echo >> "$0.launches"
mapfile -t launches < "$0.launches"
for ((wait = 0; wait < 100 && SLURM_JOB_NUM_NODES > 1; wait++)); do  # until the watch has started too
  mapfile -t watches < "$0.watches"
  if ((${#watches[@]} >= ${#launches[@]})); then break; fi
  sleep 0.1
done 2> /dev/null
job=$SLURM_JOB_ID
if ((${#launches[@]} == TAKEN_OVER_AT)); then job=8; fi
printf '{\n "decision": "requeue",\n "reason": "died",\n "attempt": %d,\n "job": "%s"\n}\n' ${#launches[@]} $job \
  > "$RUN_DIR/decision.json"
exit "$CODE"
"""


@pytest.fixture
def run_recipe(root, tmp_path, clean_environ):
    """Return run_recipe(name, **environ): a recipe in a job of its own; its exit code and output."""
    add_program(tmp_path / "bin", "scontrol", SCONTROL)

    def run_recipe(name, *options, **environ):
        job_environ = {
            **JOB,
            "PATH": f"{tmp_path / 'bin'}:{clean_environ['PATH']}",
            "PYTHON": sys.executable,
            "RUN_DIR": str(tmp_path / "run"),
            "SLURM_JOB_NODELIST": "n[1-2]",
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_JOB_PARTITION": "low",
            "SLURM_NTASKS_PER_NODE": "2",
            "TAKEN_OVER_AT": "0",
        }
        command = ["bash", f"slurm/{name}.sbatch", *options]
        done = subprocess.run(
            command, env={**job_environ, **environ}, cwd=root, capture_output=True, text=True, timeout=30
        )
        calls = tmp_path / "bin" / "calls"
        return done.returncode, done.stdout + done.stderr + (calls.read_text() if calls.exists() else "")

    return run_recipe


@pytest.fixture
def train(run_recipe, tmp_path):
    """Return train(): the recipe for srun, where all launches end alike; its exit code, number of launches, output."""
    add_program(tmp_path / "bin", "srun", SRUN)

    def train(code, **environ):
        exit_code, output = run_recipe("train", CODE=str(code), **environ)
        return exit_code, len((tmp_path / "bin" / "srun.launches").read_text().splitlines()), output

    return train


def test_each_restart_that_is_announced_takes_place(train):
    exit_code, n_launches, output = train(137)
    assert exit_code == 75
    assert n_launches == 7
    assert [f"restart {number} inside the allocation, on n1,n2" in output for number in range(1, 8)] == [True] * 6 + [
        False
    ]
    assert output.count(f"removes rm -rf /dev/shm/hpcdist-{os.getuid()}-7-*\n") == 1
    assert "requeued 7\n" in output


def test_another_node_watches_over_that_of_the_script_at_each_launch(train, root, tmp_path):
    """And no longer than the script is there: else this would wait for it."""
    _, n_launches, _ = train(137)
    watches = tmp_path / "bin" / "srun.watches"
    command = f" --nodes=1 --ntasks=1 --nodelist=n2 {sys.executable} -E -S {root}/slurm/watch.py \n"
    assert watches.read_text().count(command) == n_launches == 7
    watches.unlink()
    train(75, SLURM_JOB_NODELIST="n2", SLURM_JOB_NUM_NODES="1")
    assert not watches.exists()


@pytest.mark.parametrize(
    ("code", "taken_over_at"), [(76, "0"), (76, "1"), (137, "1")], ids=["its own", "taken over", "killed, taken over"]
)
def test_copies_of_a_job_that_did_not_end_in_good_order_are_removed(train, code, taken_over_at):
    exit_code, n_launches, output = train(code, TAKEN_OVER_AT=taken_over_at)
    assert (exit_code, n_launches) == (76, 1)
    assert output.count("removes") == 1, "those of another job have its id in their names"


@pytest.mark.parametrize("options", [["--run-dir", "here"], ["--epochs", "3", "--run-dir=here"]])
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_run_folder_is_no_option(run_recipe, tmp_path, recipe, options):
    for name in ("sbatch", "scancel"):
        add_program(tmp_path / "bin", name, SBATCH)
    code, output = run_recipe(recipe, *options, SLURM_ARRAY_TASK_ID="1", SUBMITTED="8", REFUSED="none")
    assert code == 2
    if len(options) > 2:
        named_option = options[-1]
    else:
        named_option = options[0]
    assert f"got the option {named_option}; set RUN_DIR=FOLDER" in output
    assert not (tmp_path / "run").exists()
    assert ("scancel 8\n" in output) == (recipe == "train-chain"), "its successor would end in the same way"


@pytest.mark.parametrize("recipe", RECIPES)
def test_submitted_from_another_folder(root, tmp_path, clean_environ, recipe):
    job_environ = {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "job", "SLURM_ARRAY_TASK_ID": "1"}
    command = ["bash", root / "slurm" / f"{recipe}.sbatch"]
    done = subprocess.run(
        command, env={**clean_environ, **job_environ}, cwd=tmp_path, capture_output=True, text=True, timeout=20
    )
    assert done.returncode == 78
    assert f"expected the repository's folder, got {tmp_path}; submit from there" in done.stderr
    assert "command not found" not in done.stderr


def test_copies_are_left_when_the_job_ends_in_good_order(train):
    exit_code, n_launches, output = train(75)
    assert (exit_code, n_launches) == (75, 1)
    assert "removes" not in output


@pytest.mark.parametrize(("code", "expected"), [(15, 75), (6, 75), (7, 75), (10, 75), (143, 75), (3, 3), (127, 127)])
def test_mpich_s_mpirun_that_a_signal_ended_before_it_had_begun(run_recipe, tmp_path, code, expected):
    """It ends with the number of the signal, where others add 128 to it."""
    add_program(tmp_path / "bin", "mpirun", f"#!/usr/bin/env bash\nexit {code}\n")
    exit_code, output = run_recipe("train-mpirun", MPIRUN="mpirun")
    assert exit_code == expected
    assert ("requeued 7" in output) == (expected == 75)


SBATCH = """#!/usr/bin/env bash
if [[ ${0##*/} == "$REFUSED" ]]; then echo "refused" >&2; exit 1; fi
if [[ $0 == */sbatch ]]; then echo "$SUBMITTED"; else echo "${0##*/} $*" >> "${0%/*}/calls"; fi
"""


@pytest.fixture
def chain(run_recipe, tmp_path):
    """Return chain(): the recipe for chains, whose program finishes; its exit code and output."""
    (tmp_path / "run").mkdir()
    for name in ("sbatch", "scancel"):
        add_program(tmp_path / "bin", name, SBATCH)
    add_program(tmp_path / "bin", "srun", SRUN.replace("requeue", "finished"))
    return lambda **environ: run_recipe("train-chain", **{"CODE": "0", "SUBMITTED": "8", "REFUSED": "none", **environ})


@pytest.mark.feature("slurm.chain-of-jobs")
@pytest.mark.parametrize(("submitted", "withdrawn"), [("8", "scancel 8"), ("8;c1", "scancel --clusters=c1 8")])
def test_a_chain_that_is_finished_withdraws_its_next_job(chain, submitted, withdrawn):
    exit_code, output = chain(SUBMITTED=submitted)
    assert exit_code == 0
    assert withdrawn in output.splitlines()
    _, output = chain(SUBMITTED=submitted, REFUSED="scancel")
    assert f"to end the chain, run: {withdrawn}\n" in output


def test_a_chain_without_a_next_job_does_not_begin(chain, tmp_path):
    assert chain(REFUSED="sbatch")[0] == 1
    assert not (tmp_path / "run" / "decision.json").exists()


def test_a_chain_ends_whatever_fails(chain, tmp_path):
    (tmp_path / "file").touch()
    exit_code, output = chain(RUN_DIR=str(tmp_path / "file" / "run"))
    assert exit_code == 74
    assert "got Not a directory; make the folder writable, or choose another one" in output
    assert "Traceback" not in output
    assert "scancel 8\n" in output


def test_no_successor_is_submitted_without_python(chain, tmp_path):
    submitted = tmp_path / "submitted"
    add_program(tmp_path / "bin", "sbatch", f"#!/usr/bin/env bash\ntouch {submitted}\n")
    exit_code, output = chain(PYTHON="/nowhere/python")
    assert exit_code == 78
    assert "expected Python at /nowhere/python, got none; run make train, or set PYTHON" in output
    assert not submitted.exists()

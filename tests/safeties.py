"""The safeties of checkpoints, stops and recipes, and how each can be taken out: see mutants.py."""

from dataclasses import dataclass

FOLDER, FILE = "unit/test_checkpoint_folder.py", "unit/test_checkpoint_file.py"
CUTS, FAULTS, HOSTILE = "unit/test_power_cuts.py", "unit/test_disk_faults.py", "unit/test_hostile_files.py"
RANKS, MEMORY, DESYNC = "mpi/test_checkpoint.py", "mpi/test_fast_tier.py", "mpi/test_desync.py"
STOP, DEADLINE, DECISION = "unit/test_stop.py", "unit/test_deadline.py", "unit/test_decision.py"
HANDLER, AGREE = "mpi/test_preemption.py", "mpi/test_agreement.py"
RECIPES, METRICS = "unit/test_requeue.py", "unit/test_metrics_file.py"
OWN_MEMORY, TREE = "unit/test_memory_of_others.py", "unit/test_checkpoint_tree.py"
TWO = "mpi/test_two_managers.py"


@dataclass(frozen=True)
class Mutant:
    """A change that takes a safety away.

    Attributes:
        what: the safety.
        path: of the file.
        text: occurs there once.
        instead: what it is replaced by.
        tests: the file that has a test which must fail.
    """

    what: str
    path: str
    text: str
    instead: str
    tests: str


DURABLE, MANIFEST, SAFE = (
    "hpcdist/checkpoint/durable.py",
    "hpcdist/checkpoint/manifest.py",
    "hpcdist/checkpoint/safe_open.py",
)
READER = "hpcdist/checkpoint/reader.py"
PREEMPTION, SAVES, NEWEST = (f"hpcdist/resilience/{name}.py" for name in ("preemption", "saves", "newest"))
METRICS_FILE = "hpcdist/resilience/metrics_file.py"
CHECKPOINTS, GENERATIONS, MANAGER = (
    "hpcdist/checkpoint/folder.py",
    "hpcdist/checkpoint/generations.py",
    "hpcdist/resilience/manager.py",
)

IN_ORDER = """            with self._as_newest():
                durable.replace_file(self._disk, path, image.blocks(digest), image.nbytes)
            manifest = Manifest(step, path.name, image.nbytes, digest.hexdigest(), written, **more)
            with self._as_newest():
                durable.replace_text(self._disk, self._own / f"step-{step:08d}.json", manifest.to_text())
"""
MANIFEST_FIRST = """            blocks = list(image.blocks(digest))
            manifest = Manifest(step, path.name, image.nbytes, digest.hexdigest(), written, **more)
            durable.replace_text(self._disk, self._own / f"step-{step:08d}.json", manifest.to_text())
            durable.replace_file(self._disk, path, blocks, image.nbytes)
"""

MUTANTS = [
    Mutant("fsync of a file", DURABLE, "        os.fsync(descriptor)\n\n    def close", "\n    def close", FAULTS),
    Mutant("fsync of a folder", DURABLE, "            os.fsync(descriptor)\n", "            pass\n", FAULTS),
    Mutant("sync before rename", DURABLE, "\n        disk.sync(descriptor)\n", "\n", FOLDER),
    Mutant("sync of the folder after it", DURABLE, "    disk.sync_folder(path.parent)\n", "", FOLDER),
    Mutant(
        "writing beside",
        DURABLE,
        'path.with_name(f"{path.name}.tmp-{os.getpid()}")',
        "path",
        FOLDER,
    ),
    Mutant(
        "names of new folders", DURABLE, "        disk.sync_folder(folder.parent)\n\n\ndef _sync", "\n\ndef _sync", CUTS
    ),
    Mutant(
        "names of folders of the killed", DURABLE, "    _sync_name_if_new(disk, missing", "    (disk, missing", CUTS
    ),
    Mutant("what signals interrupt", DURABLE, "suppress(InterruptedError)", "suppress(ZeroDivisionError)", FAULTS),
    Mutant("EINVAL of direct writes", DURABLE, "not (is_direct and error.errno == errno.EINVAL)", "True", FAULTS),
    Mutant("no room to allocate", DURABLE, "raise\n\n    def write", "return\n\n    def write", FAULTS),
    Mutant("the fence", CHECKPOINTS, "        if newest > self.generation:", "        if newest < 0:", FOLDER),
    Mutant(
        "verify before prune",
        CHECKPOINTS,
        "        newest.verify(self._own / newest.file, self._count_block)\n",
        "",
        FOLDER,
    ),
    Mutant("an error is no damage", SAFE, "        if number in _NO_FILE:\n", "        if True:\n", FOLDER),
    Mutant("list again", READER, "(isinstance(error, CheckpointMissing) and n_looks == 1)", "False", FOLDER),
    Mutant("list as often as it changes", READER, "listed != found or", "", FOLDER),
    Mutant("what was pruned is not damaged", READER, "if place in listed:", "if True:", FOLDER),
    Mutant("verify before reading", READER, "                manifest.verify(path, self._count_block)\n", "", HOSTILE),
    Mutant("step and name", READER, "if manifest.step != place.step or", "if False and", FOLDER),
    Mutant("file before manifest", CHECKPOINTS, IN_ORDER, MANIFEST_FIRST, FOLDER),
    Mutant("room before writing", CHECKPOINTS, "            self._check_space(image.nbytes)\n", "", FOLDER),
    Mutant(
        "order of generations",
        READER,
        "found, self.damaged = self.places()[::-1], []",
        "found, self.damaged = sorted(self.places(), key=lambda place: -place.step), []",
        FOLDER,
    ),
    Mutant("another name for a step saved again", CHECKPOINTS, "while name in names and", "while False and", FOLDER),
    Mutant("the dead are counted", CHECKPOINTS, "if newest.step > self._last_before:", "if True:", FOLDER),
    Mutant("steps go up", CHECKPOINTS, "        if step < last:", "        if step < -1:", FOLDER),
    Mutant("damaged ones set aside", CHECKPOINTS, "for place in self.damaged:", "for place in ():", FOLDER),
    Mutant(
        "no silent start anew",
        READER,
        "        if found:\n            raise",
        "        if 0:\n            raise",
        FOLDER,
    ),
    Mutant(
        "sweep of the half-written",
        CHECKPOINTS,
        "            durable.sweep_temporary(self._disk, self.path / generations.folder_name(generation))\n",
        "",
        FOLDER,
    ),
    Mutant(
        "room for the first save",
        CHECKPOINTS,
        'with self._tolerated("what was left half written stays"):\n            self._remove_orphans()',
        "pass",
        FOLDER,
    ),
    Mutant(
        "names before removals",
        CHECKPOINTS,
        "        if unnamed:\n            self._disk.sync_folder(folder)\n",
        "",
        CUTS,
    ),
    Mutant(
        "replaced while it writes",
        CHECKPOINTS,
        "except FileNotFoundError:  # r",
        "except ZeroDivisionError:  # r",
        FOLDER,
    ),
    Mutant("full disks are no suspects", MANAGER, "                self._history.note_save(step)\n", "", RANKS),
    Mutant("digest of the manifest", MANIFEST, "if _digest(body_text) != digest:", "if False:", FILE),
    Mutant(
        "digest of the file", MANIFEST, "if found != (self.nbytes, self.xxh3_128):", "if found[0] != self.nbytes:", FILE
    ),
    Mutant("types of the manifest", MANIFEST, "        _check_types(own)\n", "", HOSTILE),
    Mutant("regular files", MANIFEST, "stat.S_ISREG(status.st_mode) and", "", HOSTILE),
    Mutant("links", SAFE, "if not isinstance(group.get(name, getlink=True), h5py.HardLink):", "if False:", HOSTILE),
    Mutant("layouts", SAFE, "dataset.id.get_create_plist().get_layout() in _LAYOUTS", "True", HOSTILE),
    Mutant(
        "external storage",
        SAFE,
        "        and not dataset.external\n        and dataset.ndim",
        "        and dataset.ndim",
        HOSTILE,
    ),
    Mutant("dtypes", SAFE, "        and dataset.dtype == dtype\n", "", HOSTILE),
    Mutant("size of the data", SAFE, "(index, *found.values())) > os.path.getsize(path)", "()) > 0", HOSTILE),
    Mutant("rows fill the datasets", SAFE, "    if ends != sizes:", "    if False:", HOSTILE),
    Mutant("format", SAFE, "    if found > FORMAT:", "    if found > 99:", FILE),
    Mutant("died twice", GENERATIONS, "steps.count(step) >= 2", "steps.count(step) >= 1", FOLDER),
    Mutant(
        "one generation each",
        GENERATIONS,
        "except FileExistsError:  # another",
        "except ZeroDivisionError:  # another",
        FOLDER,
    ),
    Mutant("suspects", MANAGER, "suspects = self._history.suspects()", "pass", RANKS),
    Mutant("set aside on restore", MANAGER, "self._tier.folder.go_on_from(place)", "pass", RANKS),
    Mutant("an end of its own", MANAGER, "self._history.note_end()\n        self", "pass\n        self", RANKS),
    Mutant(
        "a failed read-back is told",
        "hpcdist/checkpoint/tier.py",
        "            tidying.result()\n",
        "            pass\n",
        RANKS,
    ),
    Mutant("order of bytes", "hpcdist/checkpoint/tree.py", 'array.dtype.newbyteorder("=")', "array.dtype", TREE),
    Mutant(
        "shapes of states",
        "hpcdist/resilience/checkpoint.py",
        "            _check_shape(name, item, loaded[name], source)\n",
        "",
        HOSTILE,
    ),
    Mutant("objects and kinds", "hpcdist/resilience/checkpoint.py", "nodes.keys() != kinds.keys()", "False", HOSTILE),
    Mutant("a signal is a wish", "hpcdist/resilience/stop.py", "if received is not None:", "if False:", STOP),
    Mutant(
        "handlers of others",
        "hpcdist/resilience/stop.py",
        "        if callable(earlier):\n",
        "        if False:\n",
        STOP,
    ),
    Mutant("forked children end", "hpcdist/resilience/stop.py", "        flag.reset()", "        pass", STOP),
    Mutant(
        "no answer is no stop file",
        "hpcdist/resilience/stop.py",
        "os.path.exists(self._file)",
        "self._file.stat()",
        STOP,
    ),
    Mutant("the stop file is removed", PREEMPTION, "self._flag.remove_file()", "pass", HANDLER),
    Mutant("slack", "hpcdist/resilience/deadline.py", "max(MIN_SLACK_S, step.spread + save.spread)", "0.0", DEADLINE),
    Mutant("the save under way", "hpcdist/resilience/deadline.py", "+ n_saves * save.p99 +", "+ save.p99 +", DEADLINE),
    Mutant("a third death", "hpcdist/resilience/decision.py", "if n_fruitless < MAX_FRUITLESS:", "if True:", DECISION),
    Mutant("a third stop", "hpcdist/resilience/decision.py", "if n_idle >= MAX_FRUITLESS:", "if False:", DECISION),
    Mutant("no stop inside a step", PREEMPTION, "if self._is_busy or self._is_done", "if self._is_done", HANDLER),
    Mutant("no signal while leaving", PREEMPTION, "            self._flag.ignore_signals()\n", "", HANDLER),
    Mutant(
        "starts are counted",
        "hpcdist/resilience/attempt.py",
        "            self._manager.note_start()  #",
        "            pass  #",
        HANDLER,
    ),
    Mutant(
        "wishes ride",
        "hpcdist/resilience/agreement.py",
        "return self._world.notices.take()",
        "return Want.NOTHING",
        AGREE,
    ),
    Mutant("wishes without sums", "hpcdist/resilience/agreement.py", "return Want(want)", "return Want.NOTHING", AGREE),
    Mutant(
        "compared before a save",
        SAVES,
        "        if self._schedule.compare_every_steps is not None:\n",
        "        if False:\n",
        DESYNC,
    ),
    Mutant(
        "compared at the end again",
        SAVES,
        "        self._compared_at = None  #",
        "        pass  #",
        DESYNC,
    ),
    Mutant("saved by hand", PREEMPTION, "            self._saves.note_saved()\n", "            pass\n", HANDLER),
    Mutant(
        "a save whose manager is gone",
        "hpcdist/resilience/at_exit.py",
        "weakref.finalize(owner, _finish_later,",
        "weakref.finalize(print, _finish_later,",
        RANKS,
    ),
    Mutant("metrics are claimed", MANAGER, "                checkpoint.claim_files()\n", "", RANKS),
    Mutant(
        "ranks that differ",
        "hpcdist/resilience/desync.py",
        "MPI.MIN, comm) == highest",
        "MPI.MIN, comm) <= highest",
        DESYNC,
    ),
    Mutant(
        "copies of ranks that differ",
        MANAGER,
        "            self.forget_copies()  # made since",
        "            pass  # made since",
        DESYNC,
    ),
    Mutant(
        "memory that others write to",
        "hpcdist/resilience/fast_tier.py",
        "status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)",
        "status.st_mode & 0",
        OWN_MEMORY,
    ),
    Mutant(
        "memory of others",
        "hpcdist/resilience/fast_tier.py",
        "or status.st_uid != os.getuid()",
        "or False",
        OWN_MEMORY,
    ),
    Mutant(
        "links in memory", "hpcdist/resilience/fast_tier.py", "os.lstat(self._path)", "os.stat(self._path)", OWN_MEMORY
    ),
    Mutant(
        "copies are nobody else's to read",
        "hpcdist/resilience/fast_tier.py",
        "self._disk.make_folder(self._path, 0o700)",
        "self._disk.make_folder(self._path)",
        OWN_MEMORY,
    ),
    Mutant(
        "no copies of others",
        "hpcdist/resilience/fast_tier.py",
        "            self._require_own()\n            return",
        "            return",
        OWN_MEMORY,
    ),
    Mutant("names of runs", "hpcdist/resilience/fast_tier.py", 're.sub(r"\\W", "-", run_id)', "run_id", OWN_MEMORY),
    Mutant(
        "nothing is removed through a link",
        "hpcdist/resilience/fast_tier.py",
        "        self._require_own()  # a link",
        "        pass  # a link",
        OWN_MEMORY,
    ),
    Mutant("suspects in memory", NEWEST, "found.place.step in suspects", "False", MEMORY),
    Mutant("newer on disk", NEWEST, "on_disk[-1] > in_memory", "False", MEMORY),
    Mutant("from memory to the disk", MANAGER, "        if self._is_in_memory:", "        if False:", MEMORY),
    Mutant(
        "memory of a later attempt",
        "hpcdist/resilience/fast_tier.py",
        "if generation <= self._folder.generation:",
        "if True:",
        MEMORY,
    ),
    Mutant(
        "metrics after the checkpoint",
        METRICS_FILE,
        "record[1] is None or record[1] <= last_step",
        "True",
        METRICS,
    ),
    Mutant(
        "damaged metrics are set aside",
        METRICS_FILE,
        "        self._replace(aside, ",
        "        print(aside, ",
        METRICS,
    ),
    Mutant(
        "half a record is cut off",
        METRICS_FILE,
        "        self._is_durable = self._is_cut = False\n",
        "        self._is_durable = False\n",
        METRICS,
    ),
    Mutant(
        "metrics are durable",
        METRICS_FILE,
        "self._disk.sync(self._file.fileno())",
        "pass",
        METRICS,
    ),
    Mutant("whose decision", "slurm/requeue.sh", '[[ $(fact job) == "$SLURM_JOB_ID" ]]', "true", RECIPES),
    Mutant(
        "codes that end a chain", "slurm/requeue.sh", '    2:* | 76:* | 78:*) why="exit code $code" ;;\n', "", RECIPES
    ),
    Mutant("early deaths end a chain", "slurm/requeue.sh", "if ((${#deaths[@]} <= 3)); then", "if true; then", RECIPES),
    Mutant("code 0 without a word", "slurm/requeue.sh", "if ((code == 0)); then code=1; fi", ":", RECIPES),
    Mutant("cancelled jobs", "slurm/requeue.sh", "@(CANCELLED|COMPLETING)", "NEVER", RECIPES),
    Mutant("started again elsewhere", "slurm/requeue.sh", "+ 0 > ${SLURM_RESTART_COUNT:-0}", "< 0", RECIPES),
    Mutant("a task of an array", "slurm/requeue.sh", "job+=_$SLURM_ARRAY_TASK_ID; fi", ":; fi", RECIPES),
    Mutant(
        "left of another array",
        "slurm/requeue.sh",
        '${SLURM_ARRAY_JOB_ID:-} == "$job"',
        "-n ${SLURM_ARRAY_JOB_ID:-}",
        RECIPES,
    ),
    Mutant("a decision that is away", "slurm/requeue.sh", "if ! await_decision || ", "if ", RECIPES),
    Mutant(
        "the watch over the script", "slurm/watch.sh", "if ! is_script_lost; then continue; fi", "continue", RECIPES
    ),
    Mutant("a watch that goes on", "slurm/watch.sh", "  if ! await_decision; then continue; fi\n", "", RECIPES),
    Mutant("a watch that errs", "slurm/watch.sh", "$(field JobState) == RUNNING && ", "", RECIPES),
    Mutant("taken over", "slurm/requeue.sh", "    verdict=another", "    verdict=none", RECIPES),
    Mutant("a chain is withdrawn", "slurm/train-chain.sbatch", '! "${withdraw[@]}"', "false", "unit/test_recipes.py"),
    Mutant("heard after an evaluation", PREEMPTION, "poll(at_once=self._is_long_since)", "poll()", HANDLER),
    Mutant("a stop beside a save", "hpcdist/notices.py", "SAVE = 1\n    STOP = 2", "STOP = 1\n    SAVE = 2", AGREE),
    Mutant(
        "own saves",
        SAVES,
        "return step == self._manager.saved_step",
        "return step == self._manager.checkpoint.step",
        TWO,
    ),
    Mutant("own schedule", SAVES, "step, self._manager.saved_step)", "step, self._manager.checkpoint.step)", TWO),
    Mutant(
        "names of dtypes",
        "hpcdist/checkpoint/layout.py",
        "_NUMBERS[_STORED_AS.get(dtype, dtype)]",
        "np.dtype(_STORED_AS.get(dtype, dtype))",
        HOSTILE,
    ),
    Mutant("depth of states", SAFE, "if is_too_deep(index):", "if False:", FILE),
    Mutant("depth of nests", "hpcdist/checkpoint/tree.py", "if depth > MAX_DEPTH:", "if False:", TREE),
    Mutant("unlimited memory", CHECKPOINTS, "if status.f_blocks and free", "if free", FOLDER),
]

"""The safeties of checkpoints, stops and recipes, and a change that removes each: see mutants.py.

A mutant is located by names, not by the text of a file: code may be moved and reformatted, and comments rewritten.
"""

from dataclasses import dataclass

_CHECKPOINT, _RESILIENCE = "unit/checkpoint/test_{}.py".format, "unit/resilience/test_{}.py".format
FOLDER, FILE, TREE = (_CHECKPOINT(f"checkpoint_{name}") for name in ("folder", "file", "tree"))
CUTS, FAULTS, HOSTILE = map(_CHECKPOINT, ("power_cuts", "disk_faults", "hostile_files"))
STOP, DEADLINE, DECISION = map(_RESILIENCE, ("stop", "deadline", "decision"))
SCRIPTS, CHAIN = "unit/house/test_requeue.py", "unit/house/test_recipe_parts.py"
METRICS, OWN_MEMORY = _RESILIENCE("metrics_file"), _CHECKPOINT("memory_of_others")
RANKS, MEMORY, DESYNC = "mpi/test_checkpoint.py", "mpi/test_fast_tier.py", "mpi/test_desync.py"
HANDLER, AGREE, TWO = "mpi/test_preemption.py", "mpi/test_agreement.py", "mpi/test_two_managers.py"


@dataclass(frozen=True)
class Mutant:
    """A change of the package that removes a safety.

    Attributes:
        what: the safety.
        where: the qualified name of a function, class or constant, such as "Disk.sync"; with the end of its module's
            path, such as "checkpoint/tree:encode", where several modules have one.
        old: an expression or a statement that is there once, however it is written; `...` stands for any expression,
            and at the end of a list for all that follows: `f(...)` is any call of f.
        new: an expression, or statements, in its place.
        tests: the file that has a test which must fail.
    """

    what: str
    where: str
    old: str
    new: str
    tests: str


@dataclass(frozen=True)
class MarkedLine:
    """A change of the line that a comment marks, "# safety: NAME, NAME"; of the next line if it has no code.

    Attributes:
        what: the safety; the name in the mark.
        pattern: a regular expression that the code of the line matches once.
        new: the text in its place.
        tests: as of `Mutant`.
    """

    what: str
    pattern: str
    new: str
    tests: str


WHOLE_LINE = r"\S.*"
#: Writes what `CheckpointFolder.commit` writes, the manifest first.
MANIFEST_FIRST = """
blocks = list(image.blocks(digest))
manifest = Manifest(step, path.name, image.nbytes, digest.hexdigest(), written, **more)
durable.replace_text(self._disk, self._own / f"step-{step:08d}.json", manifest.to_text())
durable.replace_file(self._disk, path, blocks, image.nbytes)
"""

ON_DISK = [
    Mutant("fsync of a file", "Disk.sync", "os.fsync(...)", "pass", FAULTS),
    Mutant("fsync of a folder", "Disk.sync_folder", "os.fsync(...)", "pass", FAULTS),
    MarkedLine("sync before rename", r"disk\.sync\(descriptor\)", "pass", FOLDER),
    Mutant("sync of the folder after rename", "replace_file", "disk.sync_folder(...)", "pass", FOLDER),
    Mutant("write to a temporary name", "replace_file", "path.with_name(...)", "path", FOLDER),
    Mutant("new folders are synced", "make_folders", "disk.sync_folder(...)", "pass", CUTS),
    Mutant("folders of a killed attempt are synced", "make_folders", "_sync_name_if_new(...)", "pass", CUTS),
    Mutant("interrupted calls are repeated", "_repeat", "InterruptedError", "ZeroDivisionError", FAULTS),
    Mutant("EINVAL ends direct writes only", "_write_block", "error.errno == errno.EINVAL", "False", FAULTS),
    Mutant("a failed allocation is raised", "Disk.allocate", "raise", "return", FAULTS),
    Mutant(
        "a superseded attempt is fenced off",
        "CheckpointFolder.check_current",
        "newest > self.generation",
        "False",
        FOLDER,
    ),
    Mutant("verify before prune", "CheckpointFolder.prune", "newest.verify(...)", "pass", FOLDER),
    Mutant("a read error is not damage", "read_patiently", "number in _NO_FILE", "True", FOLDER),
    Mutant(
        "list again if a file is missing",
        "CheckpointReader._first_sound",
        "isinstance(error, CheckpointMissing)",
        "False",
        FOLDER,
    ),
    Mutant("list again while the listing changes", "CheckpointReader._first_sound", "listed != found", "False", FOLDER),
    Mutant("a pruned file is not damaged", "CheckpointReader._first_sound", "place in listed", "True", FOLDER),
    Mutant("verify before reading", "CheckpointReader._first_sound", "manifest.verify(...)", "pass", HOSTILE),
    Mutant("step and name agree", "CheckpointReader.manifest", "manifest.step != place.step or ...", "False", FOLDER),
    Mutant("file before manifest", "CheckpointFolder.commit", "durable.replace_file(...)", MANIFEST_FIRST, FOLDER),
    Mutant("room before writing", "CheckpointFolder.commit", "self._check_space(...)", "pass", FOLDER),
    Mutant(
        "newest generation first",
        "CheckpointReader._first_sound",
        "found, self.damaged = self.places()[::-1], []",
        "found, self.damaged = sorted(self.places(), key=lambda place: -place.step), []",
        FOLDER,
    ),
    Mutant("a step saved again gets a new name", "CheckpointFolder.new_data_path", "name in names", "False", FOLDER),
    Mutant("dead attempts are counted", "CheckpointFolder.prune", "newest.step > self._last_before", "True", FOLDER),
    Mutant("steps only increase", "CheckpointFolder.new_data_path", "step < last", "False", FOLDER),
    Mutant("damaged checkpoints are set aside", "CheckpointFolder.resume_from", "self.damaged", "()", FOLDER),
    Mutant(
        "no silent start from scratch",
        "CheckpointReader._first_sound",
        "raise self._none_sound() from None",
        "pass",
        FOLDER,
    ),
    Mutant(
        "half-written files are swept",
        "CheckpointFolder._remove_orphans",
        "durable.sweep_temporary(self._disk, self.path / ...)",
        "pass",
        FOLDER,
    ),
    Mutant(
        "orphans are removed before the first save", "CheckpointFolder.begin", "self._remove_orphans()", "pass", FOLDER
    ),
    Mutant(
        "names are synced before files are removed",
        "CheckpointFolder._remove_unnamed",
        "self._disk.sync_folder(...)",
        "pass",
        CUTS,
    ),
    Mutant(
        "a folder replaced during a write",
        "CheckpointFolder._as_newest",
        "FileNotFoundError",
        "ZeroDivisionError",
        FOLDER,
    ),
    Mutant("a full disk makes no suspect", "CheckpointManager._save", "self._history.note_save(...)", "pass", RANKS),
    Mutant("digest of the manifest", "read_manifest", "_digest(...) != digest", "False", FILE),
    Mutant(
        "digest of the file",
        "Manifest.verify",
        "found != (self.nbytes, self.xxh3_128)",
        "found[0] != self.nbytes",
        FILE,
    ),
    Mutant("types in the manifest", "read_manifest", "_check_types(...)", "pass", HOSTILE),
    Mutant("regular files only", "Manifest.verify", "stat.S_ISREG(...)", "True", HOSTILE),
    Mutant("no links in HDF5", "_check_members", "isinstance(..., h5py.HardLink)", "True", HOSTILE),
    Mutant("plain HDF5 layouts", "_plain", "... in _LAYOUTS", "True", HOSTILE),
    Mutant("no external storage", "_plain", "not dataset.external", "True", HOSTILE),
    Mutant("dtypes of datasets", "_plain", "dataset.dtype == dtype", "True", HOSTILE),
    Mutant("no more data than bytes", "_safe_datasets", "sum(...)", "0", HOSTILE),
    Mutant("rows fill the datasets", "_arrays_of", "ends != sizes", "False", HOSTILE),
    Mutant("newer formats", "check_format", "found > FORMAT", "False", FILE),
    Mutant("suspect only after two deaths", "crashed_twice", "steps.count(step) >= 2", "True", FOLDER),
    Mutant("a generation for each attempt", "make_generation", "FileExistsError", "ZeroDivisionError", FOLDER),
    Mutant(
        "suspects are skipped",
        "CheckpointManager.begin_attempt",
        "self._history.suspects()",
        "set()",
        RANKS,
    ),
    Mutant("set aside on restore", "CheckpointManager._restore", "self._tier.folder.resume_from(...)", "pass", RANKS),
    Mutant("an orderly end is recorded", "CheckpointManager.end_attempt", "self._history.note_end()", "pass", RANKS),
    Mutant("a failed read-back is raised", "Tier.finish", "tidying.result()", "pass", RANKS),
    Mutant("byte order", "checkpoint/tree:encode", "array.dtype.newbyteorder(...)", "array.dtype", TREE),
    Mutant("shape of states", "Checkpoint.apply", "_check_shape(...)", "pass", HOSTILE),
    Mutant("each object has a kind", "_parts_of", "nodes.keys() != kinds.keys()", "False", HOSTILE),
    Mutant("names of dtypes", "stored_dtype", "_NUMBERS[...]", "np.dtype(_STORED_AS.get(dtype, dtype))", HOSTILE),
    Mutant("depth of states", "read_file", "is_too_deep(...)", "False", FILE),
    Mutant("depth of nests", "checkpoint/tree:encode", "depth > MAX_DEPTH", "False", TREE),
    Mutant("unlimited memory", "CheckpointFolder._check_space", "status.f_blocks", "True", FOLDER),
]

STOPS = [
    Mutant("a signal requests a stop", "StopFlag.reason", "received is not None", "False", STOP),
    Mutant("handlers of others are called", "SignalFlag._receive", "callable(earlier)", "False", STOP),
    Mutant("forked children can be ended", "_reset", "flag.reset()", "pass", STOP),
    Mutant(
        "a failing stat is no stop file", "StopFlag._is_file_there", "os.path.exists(...)", "self._file.stat()", STOP
    ),
    Mutant(
        "the stop file is removed",
        "PreemptionCheckpointHandler._remove_stop_file",
        "self._flag.remove_file()",
        "pass",
        HANDLER,
    ),
    Mutant("slack before a deadline", "slack_s", "max(...)", "0.0", DEADLINE),
    Mutant("time for the save under way", "needed_s", "n_saves * save.p99", "save.p99", DEADLINE),
    Mutant("stop after three deaths", "at_start", "n_fruitless < MAX_FRUITLESS", "True", DECISION),
    Mutant("stop after three idle attempts", "at_stop", "n_idle >= MAX_FRUITLESS", "False", DECISION),
    Mutant("no stop inside a step", "PreemptionCheckpointHandler.poll", "self._is_busy", "False", HANDLER),
    Mutant(
        "no signal while leaving",
        "PreemptionCheckpointHandler._obey",
        "self._flag.ignore_signals()",
        "pass",
        HANDLER,
    ),
    Mutant("starts are counted", "Attempt._begin", "self._manager.note_start()", "pass", HANDLER),
    Mutant("requests ride on sums", "Agreement.poll", "self._world.step_flags.take()", "Request.NONE", AGREE),
    Mutant("requests without sums", "Agreement._ask", "Request(request)", "Request.NONE", AGREE),
    Mutant("compared before a save", "AttemptSaves._compare_before_save", "self._compare(...)", "pass", DESYNC),
    Mutant("compared again at the end", "AttemptSaves.end", "self._compared_at = None", "pass", DESYNC),
    Mutant(
        "saves by hand are recorded",
        "PreemptionCheckpointHandler._act",
        "self._saves.note_saved()",
        "pass",
        HANDLER,
    ),
    Mutant(
        "a save outlives its manager", "finish_at_exit", "weakref.finalize(owner, ...).atexit = False", "pass", RANKS
    ),
    Mutant("metrics are claimed", "CheckpointManager.__init__", "checkpoint.claim_files()", "pass", RANKS),
    Mutant("ranks that differ are detected", "require_equal", "MPI.MIN", "MPI.MAX", DESYNC),
    Mutant(
        "copies of ranks that differ are removed",
        "CheckpointManager.check_equal",
        "self.forget_copies()",
        "pass",
        DESYNC,
    ),
    Mutant(
        "requests are looked for after an evaluation",
        "PreemptionCheckpointHandler.poll",
        "self._is_long_since",
        "False",
        HANDLER,
    ),
    Mutant("a stop outweighs a save", "Request.SAVE", "1", "4", AGREE),
    Mutant(
        "only saves of this manager count",
        "AttemptSaves._is_saved",
        "self._manager.saved_step",
        "self._manager.checkpoint.step",
        TWO,
    ),
    Mutant(
        "the schedule is this manager's",
        "AttemptSaves.is_due",
        "self._manager.saved_step",
        "self._manager.checkpoint.step",
        TWO,
    ),
]

COPIES_AND_METRICS = [
    Mutant("memory that others can write to", "FastTier._require_own", "stat.S_IWGRP | stat.S_IWOTH", "0", OWN_MEMORY),
    Mutant("memory of others", "FastTier._require_own", "status.st_uid != os.getuid()", "False", OWN_MEMORY),
    Mutant("links in memory", "FastTier._require_own", "os.lstat", "os.stat", OWN_MEMORY),
    Mutant("others cannot read copies", "FastTier._begin", "0o700", "0o777", OWN_MEMORY),
    Mutant("no copies of others are read", "FastTier.find", "self._require_own()", "pass", OWN_MEMORY),
    Mutant("characters in a run's name", "FastTier.__init__", "re.sub(...)", "run_id", OWN_MEMORY),
    Mutant("nothing is removed through a link", "FastTier._remove", "self._require_own()", "pass", OWN_MEMORY),
    Mutant("suspects in memory", "NewestState.find", "found.place.step in suspects", "False", MEMORY),
    Mutant("newer on disk", "NewestState._read_disk", "on_disk[-1] > in_memory", "False", MEMORY),
    Mutant("from memory to the disk", "CheckpointManager.begin_attempt", "self._is_in_memory", "False", MEMORY),
    Mutant("memory of a later attempt", "FastTier._remove", "generation <= self._folder.generation", "True", MEMORY),
    Mutant("metrics after the checkpoint are cut", "MetricsFile._cut", "record[1] <= last_step", "True", METRICS),
    Mutant("damaged metrics are set aside", "MetricsFile._set_aside", "self._replace(...)", "pass", METRICS),
    Mutant(
        "half a record is cut off",
        "MetricsFile._add",
        "self._is_durable = self._is_cut = False",
        "self._is_durable = False",
        METRICS,
    ),
    Mutant("metrics are durable", "MetricsFile.state_dict", "self._disk.sync(...)", "pass", METRICS),
]

IN_SCRIPTS = [
    MarkedLine("only this job's decision", r"\[\[.*\]\]", "true", SCRIPTS),
    MarkedLine("codes that end a chain", WHOLE_LINE, "", SCRIPTS),
    MarkedLine("early deaths end a chain", r"\(\(.*\)\)", "true", SCRIPTS),
    MarkedLine("no code 0 without a decision", WHOLE_LINE, ":", SCRIPTS),
    MarkedLine("a cancelled job stays cancelled", r"@\(CANCELLED\|COMPLETING\)", "NEVER", SCRIPTS),
    MarkedLine("not requeued if Slurm has restarted it", r"\+ 0 > \$\{SLURM_RESTART_COUNT:-0\}", "< 0", SCRIPTS),
    MarkedLine("id of an array's task", r"job\+=_\$SLURM_ARRAY_TASK_ID", ":", SCRIPTS),
    MarkedLine(
        "id left by another array", r'\$\{SLURM_ARRAY_JOB_ID:-\} == "\$job"', "-n ${SLURM_ARRAY_JOB_ID:-}", SCRIPTS
    ),
    MarkedLine("a decision that cannot be read", r"! await_decision \|\| ", "", SCRIPTS),
    MarkedLine("requeued only if the script is lost", WHOLE_LINE, "continue", SCRIPTS),
    MarkedLine("watch on while no decision can be read", WHOLE_LINE, "", SCRIPTS),
    MarkedLine("a job that runs is watched", r"\$\(field JobState\) == RUNNING && ", "", SCRIPTS),
    MarkedLine("the run was taken over", "another", "none", SCRIPTS),
    MarkedLine("the successor is withdrawn", r'! "\$\{withdraw\[@\]\}"', "false", CHAIN),
]

MUTANTS = [*ON_DISK, *STOPS, *COPIES_AND_METRICS, *IN_SCRIPTS]

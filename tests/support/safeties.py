"""The safeties of checkpoints, stops, recipes and steps, and a change that removes each: see mutants.py.

A mutant is located by names, not by the text of a file: code may be moved and reformatted, and comments rewritten.
"""

from dataclasses import dataclass

_CHECKPOINT = "unit/checkpoint/test_{}.py".format
STORE, FILE, TREE = map(_CHECKPOINT, ("store", "checkpoint_file", "checkpoint_tree"))
CUTS, FAULTS, HOSTILE = map(_CHECKPOINT, ("power_cuts", "disk_faults", "hostile_files"))
STOP = "unit/stopping/test_stop.py"
DEADLINE = "unit/stopping/test_deadline.py"
DECISION = "unit/run/test_decision.py"
LEDGER = "unit/run/test_ledger.py"
JOB, RULES, PLACEMENT, SYSTEMS, FILES = map(
    "unit/recipes/test_{}.py".format, ("job", "restart_rule", "placement", "batch_systems", "recipe_files")
)
OLD_LISTINGS = _CHECKPOINT("old_listings")
SAVER = "unit/saving/test_saver.py"
METRICS = "unit/run/test_metrics_file.py"
OWN_MEMORY = _CHECKPOINT("memory_of_others")
RANKS = "mpi/test_checkpoint.py"
MEMORY = "mpi/test_fast_tier.py"
DESYNC = "mpi/test_desync.py"
GRADIENTS = "mpi/test_gradients.py"
CENTRAL = "mpi/test_central_storage.py"
SHARED = "mpi/test_zero_redundancy.py"
RUNS = "unit/plan/test_runs.py"
FACTS = "unit/gradients/test_facts.py"
HANDLER = "mpi/test_preemption.py"
AGREE = "mpi/test_agreement.py"
TWO = "mpi/test_two_managers.py"


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


ON_DISK = [
    Mutant("fsync of a file", "Disk.sync", "os.fsync(...)", "pass", FAULTS),
    Mutant("fsync of a folder", "Disk.sync_folder", "os.fsync(...)", "pass", FAULTS),
    Mutant("sync before rename", "_write_file", "disk.sync(...)", "pass", STORE),
    Mutant("sync of the folder after rename", "replace_file", "disk.sync_folder(...)", "pass", STORE),
    Mutant("write to a temporary name", "create_temporary", "temporary_path(...)", "path", STORE),
    Mutant("new folders are synced", "make_folders", "disk.sync_folder(...)", "pass", CUTS),
    Mutant("folders of a killed attempt are synced", "make_folders", "_sync_name_if_new(...)", "pass", CUTS),
    Mutant("errors that pass", "patiently", "error.errno not in _PASSING", "True", FAULTS),
    Mutant("a rename whose answer was lost", "replace_file", "not path.exists()", "True", FAULTS),
    Mutant("listings that are old", "Store._begin", "self.refresh_listings()", "pass", OLD_LISTINGS),
    Mutant("a commit looks anew", "Store.check_current", "durable.refresh_listing(...)", "pass", OLD_LISTINGS),
    Mutant("readers wait for a listing", "Store.use_latest", "_OLD_LISTING_S", "0", OLD_LISTINGS),
    Mutant("interrupted calls are repeated", "_repeat", "InterruptedError", "ZeroDivisionError", FAULTS),
    Mutant("EINVAL ends direct writes only", "_write_block", "error.errno == errno.EINVAL", "False", FAULTS),
    Mutant("a failed allocation is raised", "Disk.allocate", "raise", "return", FAULTS),
    Mutant("numbers beyond those of all files", "Store._take_number", "self.saved()", "()", STORE),
    Mutant("a number for each attempt", "Disk.make_new", "os.O_EXCL", "0", STORE),
    Mutant("an attempt that is overtaken", "Store._take_number", "FileExistsError", "ZeroDivisionError", STORE),
    Mutant("a superseded attempt is fenced off", "Store.check_current", "newest > self.attempt", "False", STORE),
    Mutant("fenced off before the rename", "replace_file", "before_rename()", "pass", STORE),
    Mutant("replaced during a write", "Store.commit", "FileNotFoundError", "ZeroDivisionError", STORE),
    Mutant("lines of the ledger are durable", "append_line", "disk.sync(...)", "pass", STORE),
    Mutant("torn lines of the ledger", "append_line", "is_torn", "False", STORE),
    Mutant("verify before prune", "Store.verify_and_prune", "file.verify(...)", "None", STORE),
    Mutant("a read error is not damage", "read_patiently", "number in _NO_FILE", "True", STORE),
    Mutant(
        "list again if a file is missing", "Store.use_latest", "isinstance(error, CheckpointMissing)", "False", STORE
    ),
    Mutant("list again while the listing changes", "Store.use_latest", "listed != candidates", "False", STORE),
    Mutant("a pruned file is not damaged", "Store.use_latest", "saved in listed", "True", STORE),
    Mutant("step and name agree", "Store._use", "file.index.step != saved.step", "False", STORE),
    Mutant("room before writing", "Store._write", "self._check_space(...)", "pass", STORE),
    Mutant("unlimited memory", "Store._check_space", "status.f_blocks", "True", STORE),
    Mutant(
        "newest attempt first",
        "Store.use_latest",
        "candidates = self.saved()[::-1]",
        "candidates = sorted(self.saved(), key=lambda saved: -saved.step)",
        STORE,
    ),
    Mutant("steps only increase", "Store.path_of", "step < last", "False", STORE),
    Mutant("damaged checkpoints are set aside", "Store._set_damaged_aside", "self._disk.rename(...)", "pass", STORE),
    Mutant("no silent start from scratch", "Store.use_latest", "raise self._none_sound() from None", "pass", STORE),
    Mutant("half-written files are swept", "Store.begin", "durable.sweep_temporary(...)", "pass", STORE),
    Mutant("a copy of a run is another run", "Store.run_id", "stored_id[1] == inode", "True", STORE),
    Mutant("a full disk makes no suspect", "Store.commit", "self._note_save(...)", "pass", RANKS),
    Mutant("digest of the header", "parse_header", "digest != _digest(line)", "False", FILE),
    Mutant("types in the header", "parse_header", "not _is_sound(...)", "False", HOSTILE),
    Mutant(
        "digest of the arrays",
        "CheckpointFile.blocks",
        "digest.hexdigest() != self.index.header.arrays_digest",
        "False",
        FILE,
    ),
    Mutant(
        "digest of the index",
        "CheckpointFile._read_index",
        "xxhash.xxh3_128_hexdigest(tail) != header.index_digest",
        "False",
        FILE,
    ),
    Mutant("size of the file", "CheckpointFile._read_index", "status.st_size != header.nbytes", "False", HOSTILE),
    Mutant("regular files only", "CheckpointFile._read_index", "stat.S_ISREG(...)", "True", STORE),
    Mutant("no waiting for a pipe", "_open_at_once", "os.O_NONBLOCK", "0", HOSTILE),
    Mutant("arrays within the file", "_parse_index", "end <= array.offset <= ...", "True", HOSTILE),
    Mutant("types of numbers", "_parse_index", "all(...)", "True", HOSTILE),
    Mutant("newer formats", "_check_format", "stored > FORMAT", "False", FILE),
    Mutant("suspects are skipped", "CheckpointManager._suspects", "suspects(...)", "{}", RANKS),
    Mutant("set aside on restore", "CheckpointManager._restore", "self._saver.store.resume_from(...)", "pass", RANKS),
    Mutant("one file at a time", "Saver.can_copy", "self.is_busy", "False", SAVER),
    Mutant("a stuck disk is an error", "Saver._is_any_rank_busy", "self._require_blocks()", "pass", SAVER),
    Mutant("a failed read-back is raised", "Saver._raise_failure", "done.result()", "pass", RANKS),
    Mutant("byte order", "checkpoint/tree:_Encoder._leaf", "value.dtype.newbyteorder(...)", "value.dtype", TREE),
    Mutant("shape of states", "Checkpoint._prepare", "check_shape(...)", "pass", HOSTILE),
    Mutant("each object has a kind", "saving/loaded_state:parts_of", "nodes.keys() != kinds.keys()", "False", HOSTILE),
    Mutant("names of dtypes", "stored_dtype", "_NUMBERS[...]", "np.dtype(_STORED_AS.get(dtype, dtype))", HOSTILE),
    Mutant("depth of states", "_parse_index", "is_too_deep(...)", "False", FILE),
    Mutant("depth of nests", "checkpoint/tree:_Encoder.node_of", "depth > MAX_DEPTH", "False", TREE),
]

STOPS = [
    Mutant("a signal requests a stop", "StopFlag.find_request_in_any_thread", "received is not None", "False", STOP),
    Mutant("handlers of others are called", "SignalFlag._receive", "callable(earlier)", "False", STOP),
    Mutant("forked children can be ended", "_reset", "flag.reset()", "pass", STOP),
    Mutant("a failing stat is no stop file", "StopFlag._look_for_file", "functools.partial(...)", "file.stat", STOP),
    Mutant(
        "the stop file is removed",
        "PreemptionCheckpointHandler._remove_stop_file",
        "self._flag.remove_file()",
        "pass",
        HANDLER,
    ),
    Mutant("slack before a deadline", "slack_s", "max(...)", "0.0", DEADLINE),
    Mutant("time for the save under way", "needed_s", "n_saves * save.p99", "save.p99", DEADLINE),
    Mutant("progress is beyond the highest step", "has_progress", "attempt.base_step", "-1", DECISION),
    Mutant("preempted attempts do not count", "without_progress", "not is_excused", "True", DECISION),
    Mutant(
        "a corrected program starts anew",
        "without_progress",
        "attempt.program != started_attempts[-1].program",
        "False",
        DECISION,
    ),
    Mutant("a person may try again", "without_progress", "attempt.is_new_try", "False", DECISION),
    Mutant("suspect on other nodes or in other jobs only", "suspects", "_differ(...)", "True", DECISION),
    Mutant("attempts count in batch jobs only", "decide", "is_counted", "True", DECISION),
    Mutant("the base is carried over", "Ledger.begin", "earlier[-1].reached_step if earlier else -1", "-1", LEDGER),
    Mutant("another model is refused for good", "RunAttempt.refused", "isinstance(...)", "False", HANDLER),
    Mutant("no stop inside a step", "PreemptionCheckpointHandler._can_poll", "self._is_busy", "False", HANDLER),
    Mutant(
        "no signal while leaving",
        "PreemptionCheckpointHandler._obey",
        "self._flag.ignore_signals()",
        "pass",
        HANDLER,
    ),
    Mutant("too many attempts are refused", "RunAttempt.begin", "self._require_progress()", "pass", HANDLER),
    Mutant("requests ride on sums", "Agreement.poll", "self._world.step_flags.take()", "Request.NONE", AGREE),
    Mutant("requests without sums", "Agreement._ask", "Request(request)", "Request.NONE", AGREE),
    Mutant("compared before a save", "AttemptSaves._compare_before_save", "self._compare(...)", "pass", DESYNC),
    Mutant("compared again at the end", "AttemptSaves.end", "self._compared_at = None", "pass", DESYNC),
    Mutant(
        "saves by hand are recorded",
        "PreemptionCheckpointHandler.poll_between_batches",
        "self._saves.note_saved()",
        "pass",
        HANDLER,
    ),
    Mutant("a save outlives its manager", "Saver.save", "atexit.register(...)", "pass", RANKS),
    Mutant("metrics are claimed", "CheckpointManager.begin_attempt", "self.checkpoint.claim_files()", "pass", RANKS),
    Mutant("ranks that differ are detected", "require_equal", "MPI.MIN", "MPI.MAX", DESYNC),
    Mutant(
        "copies of ranks that differ are removed",
        "CheckpointManager._forgetting_copies",
        "self.forget_copies()",
        "pass",
        DESYNC,
    ),
    Mutant(
        "requests are looked for after an evaluation",
        "PreemptionCheckpointHandler.poll_between_batches",
        "self._asks_at_once",
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
    Mutant("others cannot read copies", "FastTier._hold", "0o700", "0o777", OWN_MEMORY),
    Mutant("no copies of others are read", "FastTier.find", "self._require_own()", "pass", OWN_MEMORY),
    Mutant("characters in a run's name", "FastTier.__init__", "re.sub(...)", "name", OWN_MEMORY),
    Mutant("a folder of another user is not emptied", "FastTier.remove", "self._require_own()", "pass", OWN_MEMORY),
    Mutant("suspects in memory", "Restore.newest", "copy[0].step not in skipped", "True", MEMORY),
    Mutant("newer on disk", "Restore._search", "on_disk[-1] >= in_memory", "False", MEMORY),
    Mutant(
        "from memory to the disk", "CheckpointManager.restore_or_initialize", "restored.is_in_memory", "False", MEMORY
    ),
    Mutant("memory of a later attempt", "FastTier.remove", "self._store.check_current()", "pass", MEMORY),
    Mutant("metrics after the checkpoint are cut", "MetricsOnDisk._cut", "record[1] <= last_step", "True", METRICS),
    Mutant("damaged metrics are set aside", "MetricsOnDisk._set_aside", "self._replace(...)", "pass", METRICS),
    Mutant(
        "half a record is cut off",
        "MetricsOnDisk._append",
        "self._is_durable = self._is_cut = False",
        "self._is_durable = False",
        METRICS,
    ),
    Mutant("the end waits for metrics", "AppendLog._start", "atexit.register(...)", "pass", METRICS),
    Mutant(
        "a durable file has all metrics", "MetricsFile._append_and_sync", "self._log.append_waiting()", "pass", METRICS
    ),
    Mutant("what a failed sync may have lost", "MetricsOnDisk.sync", "self._forget_file()", "pass", METRICS),
    Mutant("metrics are durable", "MetricsOnDisk.sync", "self._disk.sync(...)", "pass", METRICS),
]

IN_RECIPES = [
    Mutant("only this job's decision", "Job._ended", "decision.job != self.id", "False", JOB),
    Mutant("codes that end a chain", "action_after", "launch.code in FINAL_CODES", "False", RULES),
    Mutant("early deaths end a chain", "RunFolder.may_repeat", "n_deaths <= MAX_EARLY_DEATHS", "True", JOB),
    Mutant("no code 0 without a decision", "restart_rule:not_begun", "code or 1", "code", RULES),
    Mutant(
        "a cancelled job stays cancelled", "facts_of_slurm", "state in ('CANCELLED', 'COMPLETING')", "False", SYSTEMS
    ),
    Mutant("a job that is ending is not requeued", "Job._requeue", "facts.is_ending", "False", JOB),
    Mutant(
        "not requeued if Slurm has restarted it", "Job._requeue", "facts.n_restarts > self.n_restarts", "False", JOB
    ),
    Mutant("id of an array's task", "Job.__init__", "f\"{self.id}_{environ['SLURM_ARRAY_TASK_ID']}\"", "self.id", JOB),
    Mutant(
        "id left by another array",
        "Job.__init__",
        "environ.get('SLURM_ARRAY_JOB_ID') == self.id",
        "environ.get('SLURM_ARRAY_JOB_ID')",
        JOB,
    ),
    Mutant(
        "a count left by another job", "Job._count_restarts", "min(earlier_count, int(variable))", "int(variable)", JOB
    ),
    Mutant("a chain ends, whatever fails", "job:main", "code != RUN_AGAIN", "code == 0", FILES),
    Mutant("requeued only if the script is lost", "watch:main", "is_script_lost(...)", "True", JOB),
    Mutant("a job that runs is watched", "is_script_lost", "facts.state == 'RUNNING'", "True", JOB),
    Mutant("watch on while no decision can be read", "act", "return", "decision = None", JOB),
    Mutant("no start anew where the run folder is not there", "job:begin", "not job.folder.has_marker()", "False", JOB),
    Mutant("a watch makes no run folder", "watch:main", "job.folder.has_marker()", "not job.folder.make_marker()", JOB),
    Mutant("what Slurm ends does not count", "job:begin", "not job.folder.was_requeued(...)", "False", JOB),
    Mutant("a cancelled job is not requeued as out of time", "Job._guard_limit", "facts.is_ending", "False", JOB),
    Mutant("a job is requeued before its limit", "Job._guard_limit", "left_s > 0", "True", JOB),
    Mutant("a node whose rank failed is left out", "restart_nodes", "node != failed_node", "True", PLACEMENT),
    Mutant("the successor is withdrawn", "job:main", "code != RUN_AGAIN", "False", FILES),
]

#: Of gradients, steps and where parameters live.
IN_STEPS = [
    Mutant(
        "steps on sums only", "StepChecks._require_summed", "self._refusal(parameter)", "GradientError('no')", GRADIENTS
    ),
    Mutant(
        "gradients of a step are looked at",
        "StepChecks._may_step",
        "self._require_summed(parameters)",
        "pass",
        GRADIENTS,
    ),
    Mutant("backwards that nobody has seen", "Backward.require_seen", "self._passes", "True", GRADIENTS),
    Mutant("a backward that failed", "Backward.begin_backward", "self._drop_failed()", "pass", GRADIENTS),
    Mutant("gradients set by hand", "Backward._sort_stashed", "slot.require_published(...)", "pass", GRADIENTS),
    Mutant("the same backward everywhere", "Facts.is_same_backward", "total * total", "n_replicas * squares", FACTS),
    Mutant("a strategy lives with its modules", "Planner._see", "owners.live_with(...)", "pass", GRADIENTS),
    Mutant("no gradient is not zero", "GradientSums._publish", "not n_replicas", "False", GRADIENTS),
    Mutant(
        "parameters stay in shared memory", "HostStorage._require_unmoved", "address", "parameter.data_ptr()", CENTRAL
    ),
    Mutant("wait before a shared step", "HostStorage.begin_change", "self._wait()", "pass", CENTRAL),
    Mutant("mixed gradients are not joined", "Shares.has_mixed_run", "return True", "return False", SHARED),
    Mutant("steps that differ are not joined", "ZeroRedundancyOptimizer._write", "shares.fits(states)", "True", SHARED),
    Mutant("odd elements are not joined", "_may_follow", "is_whole", "True", RUNS),
    Mutant("a share is one piece", "plan/runs:_joined", "stop == run.n_elements + new_start", "True", RUNS),
]

MUTANTS = [*ON_DISK, *STOPS, *COPIES_AND_METRICS, *IN_RECIPES, *IN_STEPS]

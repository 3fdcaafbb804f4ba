"""Takes one safety at a time out of a copy of the package: at least one test must notice each.

`python tests/mutants.py` runs all; with numbers, those. Prints a line for each; leaves with 1 if one is not noticed.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 400
FOLDER, FILE = "unit/test_checkpoint_folder.py", "unit/test_checkpoint_file.py"
CUTS, FAULTS, HOSTILE = "unit/test_power_cuts.py", "unit/test_disk_faults.py", "unit/test_hostile_files.py"
RANKS = "mpi/test_checkpoint.py"


@dataclass(frozen=True)
class Mutant:
    """A change that takes a safety away.

    Attributes:
        what: the safety.
        path: of the file, in the package.
        text: occurs there once.
        instead: what it is replaced by.
        tests: the file that has a test which must fail.
    """

    what: str
    path: str
    text: str
    instead: str
    tests: str


DURABLE, MANIFEST, SAFE = "checkpoint/durable.py", "checkpoint/manifest.py", "checkpoint/safe_open.py"
READER = "checkpoint/reader.py"
CHECKPOINTS, GENERATIONS, MANAGER = "checkpoint/folder.py", "checkpoint/generations.py", "resilience/manager.py"

IN_ORDER = """            durable.replace_file(self._disk, path, image.blocks(digest), image.nbytes)
            self.check_current()
            manifest = Manifest(step, path.name, image.nbytes, digest.hexdigest(), written, **more)
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
    Mutant("list again", READER, "isinstance(error, CheckpointMissing) and not is_again", "False", FOLDER),
    Mutant("verify before reading", READER, "                manifest.verify(path)\n", "", HOSTILE),
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
    Mutant("the dead are counted", CHECKPOINTS, "if has_progressed and generation <", "if generation <", FOLDER),
    Mutant("steps go up", CHECKPOINTS, "        if step < last:", "        if step < -1:", FOLDER),
    Mutant("damaged ones set aside", CHECKPOINTS, "for place in self.damaged:", "for place in ():", FOLDER),
    Mutant(
        "no silent start anew",
        READER,
        "        if found:\n            raise",
        "        if 0:\n            raise",
        FOLDER,
    ),
    Mutant("sweep of the half-written", CHECKPOINTS, "durable.sweep_temporary(self._disk, folder)", "pass", FOLDER),
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
    Mutant("suspects", MANAGER, "suspects = crashed_twice(self._disk.folder.fruitless_attempts())", "pass", RANKS),
    Mutant("set aside on restore", MANAGER, "self._disk.folder.go_on_from(place)", "pass", RANKS),
    Mutant(
        "an end of its own", MANAGER, "self._note_attempt(has_ended=True)", "self._note_attempt(has_ended=False)", RANKS
    ),
    Mutant(
        "a failed read-back is told",
        "checkpoint/tier.py",
        "            tidying.result()\n",
        "            pass\n",
        RANKS,
    ),
]


def make_copy(folder):
    """Copy what tests need into a folder."""
    for name in ("hpcdist", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)


def run_tests(folder, tests):
    """Return whether the tests of a file pass."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", f"tests/{tests}"]
    if tests.startswith("mpi"):
        command = [Path(sys.executable).parent / "mpirun", "-n", "2", *command, "--with-mpi"]
    else:
        command += ["--basetemp", folder / "temporary", "-k", "not wrong_is_noticed"]
    environ = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    try:
        return subprocess.run(command, cwd=folder, env=environ, capture_output=True, timeout=LIMIT_S).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def is_noticed(mutant, folder):
    """Return whether the tests fail without a safety."""
    path = folder / "hpcdist" / mutant.path
    whole = path.read_text()
    assert whole.count(mutant.text) == 1, f"{mutant.what}: the text is not there once"
    path.write_text(whole.replace(mutant.text, mutant.instead))
    try:
        return not run_tests(folder, mutant.tests)
    finally:
        path.write_text(whole)


def main():
    chosen = [MUTANTS[int(number)] for number in sys.argv[1:]] or MUTANTS
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="hpcdist-mutants-", dir=memory) as name:
        folder = Path(name)
        make_copy(folder)
        for tests in dict.fromkeys(mutant.tests for mutant in chosen):
            assert run_tests(folder, tests), f"{tests} fails without any change"
        missed = []
        for mutant in chosen:
            noticed = is_noticed(mutant, folder)
            missed += [] if noticed else [mutant.what]
            print(f"{'noticed' if noticed else 'MISSED '}  {mutant.what} ({mutant.tests})", flush=True)
    print(f"{len(chosen) - len(missed)} of {len(chosen)} mutants noticed")
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()

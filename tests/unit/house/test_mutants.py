"""The safeties that `make mutants` takes out are still there, each once; of three it is shown that tests notice.

How a mutant is located is tested in a small package.
"""

from pathlib import Path

import pytest
from mutants import ROOT, is_noticed, make_copy
from mutation import mutated
from safeties import FILE, MUTANTS, STORE, Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.what)
def test_it_can_be_taken_out(mutant):
    path, text = mutated(mutant, ROOT)
    assert text != path.read_text()
    compile(text, path, "exec")


def test_there_are_enough_of_them():
    names = [mutant.what for mutant in MUTANTS]
    assert len(set(names)) == len(names) >= 109


def test_the_tests_that_must_notice_are_there():
    """A file that is not there fails too: every mutant would seem to be noticed."""
    assert [mutant.what for mutant in MUTANTS if not (ROOT / "tests" / mutant.tests).is_file()] == []


@pytest.mark.timeout(300)
@pytest.mark.parametrize("what", ["a superseded attempt is fenced off", "verify before prune", "digest of the arrays"])
def test_a_sample_is_noticed(fast_folder, what):
    make_copy(fast_folder)
    mutant = next(mutant for mutant in MUTANTS if mutant.what == what)
    assert mutant.tests in (STORE, FILE)
    assert is_noticed(mutant, Path(fast_folder))


# -- how a mutant is located -------------------------------------------------------------------------------------

MODULE = """
LIMIT: int = 4

class Folder:
    def write(self, path):
        if self.is_full("disk", path): raise OSError
        sync(path, at_once=True)

        def again(): sync(path)
        return [path, LIMIT]
"""


@pytest.fixture
def package(tmp_path):
    """Return a folder with a package and a recipe's program."""
    for path, text in [("hpcdist/part/disk.py", MODULE), ("hpcdist/other.py", "LIMIT = 5"), ("slurm/job.py", "N = 4")]:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("where", "old", "new", "changed"),
    [
        ("Folder.write", "self.is_full('disk',path) # ", "False", "if False:"),
        (
            "Folder.write",
            "if self.is_full(...): ...",
            "sync(path)",
            "        sync(path)\n        sync(path, at_once=True)",
        ),
        ("Folder.write", "self.is_full(..., path, ...)", "not path", "if not path:"),
        ("Folder.write", "raise OSError", "print()\nreturn", "print()\n            return"),
        ("Folder.write", "[path, ...]", "path", "return path"),
        ("Folder.write.again", "sync(...)", "pass", "def again():\n            pass"),
        ("Folder", "return ...", "return 7", "return 7"),
        ("disk:LIMIT", "4", "9", "LIMIT: int = 9"),
        ("part/disk:LIMIT", "4", "9", "LIMIT: int = 9"),
    ],
)
def test_what_is_named_is_replaced(package, where, old, new, changed):
    path, text = mutated(Mutant("one", where, old, new, ""), package)
    assert path == package / "hpcdist/part/disk.py"
    assert changed in text


def test_a_recipe_s_program_is_changed(package):
    assert mutated(Mutant("one", "job:N", "4", "5", ""), package) == (package / "slurm/job.py", "N = 5")


@pytest.mark.parametrize(
    ("where", "old", "message"),
    [
        ("Folder.read", "path", "one definition of Folder.read, got 0"),
        ("LIMIT", "4", "one definition of LIMIT, got 2"),
        ("isk:LIMIT", "4", "one definition of isk:LIMIT, got 0"),
        ("Folder.write", "sync(...)", r"one 'sync\(...\)' in Folder.write, got 2"),
        ("Folder.write", "sync()", r"one 'sync\(\)' in Folder.write, got 0"),
        ("Folder.write", "sync(path, at_once=False)", "got 0"),
        ("Folder.write", "if self.is_full(..., path, True): ...", "got 0"),
    ],
)
def test_what_is_not_there_once_is_an_error(package, where, old, message):
    with pytest.raises(ValueError, match=f"mutant 'one': expected .*{message}"):
        mutated(Mutant("one", where, old, "pass", ""), package)

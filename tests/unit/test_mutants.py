"""The safeties that `make mutants` takes out are still there, each once; of three it is shown that tests notice."""

import subprocess
from pathlib import Path

import pytest
from mutants import ROOT, is_noticed, make_copy
from safeties import FILE, FOLDER, MUTANTS


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.what)
def test_its_text_is_in_the_package_once(mutant):
    text = (ROOT / mutant.path).read_text()
    assert text.count(mutant.text) == 1
    changed = text.replace(mutant.text, mutant.instead)
    if mutant.path.endswith(".py"):
        compile(changed, mutant.path, "exec")
    else:
        subprocess.run(["bash", "-n"], input=changed, text=True, check=True)


def test_there_are_enough():
    assert len(MUTANTS) >= 20
    assert len({mutant.what for mutant in MUTANTS}) == len(MUTANTS)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("what", ["the fence", "verify before prune", "digest of the file"])
def test_a_sample_is_noticed(fast_folder, what):
    make_copy(fast_folder)
    mutant = next(mutant for mutant in MUTANTS if mutant.what == what)
    assert mutant.tests in (FOLDER, FILE)
    assert is_noticed(mutant, Path(fast_folder))

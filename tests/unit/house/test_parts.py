"""How a run of the tests is judged: parts, unstable tests and their history, and the second chance of real jobs."""

import json
import subprocess
import sys

import parts
import pytest
from parts import Part, failures_of


def test_a_part_that_fails_fails_the_run():
    assert failures_of([Part("lint", True, 3.0), Part("unit", False, 9.0)], [[]]) == ["failed: unit"]
    assert failures_of([Part("lint", True, 3.0)], [[]]) == []


@pytest.mark.parametrize(("n_unstable", "has_failed"), [(1, False), (2, False), (3, True)])
def test_two_unstable_tests_are_let_through(n_unstable, has_failed):
    names = [f"test_{number}" for number in range(n_unstable)]
    assert bool(failures_of([Part("fault", True, 1.0, tuple(names))], [names])) == has_failed


@pytest.mark.parametrize(("n_earlier", "has_failed"), [(0, False), (1, False), (2, True)])
def test_a_test_that_is_unstable_again_and_again_fails_the_run(n_earlier, has_failed):
    history = [["test_a"]] * n_earlier + [[]] * (parts.N_RUNS - n_earlier - 1) + [["test_a"]]
    assert bool(failures_of([Part("fault", True, 1.0, ("test_a",))], history)) == has_failed


def test_a_test_that_was_unstable_earlier_only_is_forgiven():
    assert failures_of([Part("fault", True, 1.0)], [["test_a"]] * 5 + [[]]) == []


def test_the_history_is_kept_and_survives_damage(tmp_path, monkeypatch):
    path = tmp_path / "deep" / "unstable.json"
    monkeypatch.setattr(parts, "HISTORY", path)
    assert parts.read_history() == []
    parts.write_history([["test_a"], []])
    assert parts.read_history() == [["test_a"], []]
    path.write_text("{")
    assert parts.read_history() == []


def test_the_table_has_parts_and_the_slowest_tests():
    times = [(30.0 - number, f"test_{number}") for number in range(25)]
    lines = parts.table_of([Part("lint", True, 14.2), Part("fault", False, 59.9, ("test_b",))], times).splitlines()
    assert "     14  lint" in lines
    assert "     60  fault  failed" in lines
    assert "     74  together" in lines
    assert sum("  test_" in line for line in lines) == parts.N_SLOWEST
    assert "unstable: test_b" in lines


# -- the second chance -----------------------------------------------------------------------------------------------

#: Fails always, at the first call only, or never.
TESTS = """
import pathlib


def test_always():
    assert {always}


def test_once():
    mark = pathlib.Path("seen")
    was_there = mark.exists()
    mark.write_text("")
    assert was_there or {once}


def test_never():
    assert True
"""


@pytest.fixture
def second_chance(tmp_path, root):
    """Return run(always, once): the script on three tests; what they assert is text."""

    def run(always="True", once="True", selected="test_"):
        (tmp_path / "test_it.py").write_text(TESTS.format(always=always, once=once))
        script = str(root / "tests" / "support" / "second_chance.py")
        command = [sys.executable, script, "fault", "-q", "-p", "no:hpcdist", "-c", "/dev/null", "test_it.py"]
        return subprocess.run(
            [*command, "-k", selected], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
        )

    return run


def test_all_pass(second_chance, tmp_path):
    done = second_chance()
    assert done.returncode == 0, done.stdout
    assert "unstable" not in done.stdout
    assert not (tmp_path / "out" / "tests" / "fault" / "unstable.json").exists()


def test_what_fails_twice_fails(second_chance):
    done = second_chance(always="False")
    assert done.returncode == 1, done.stdout
    assert "unstable" not in done.stdout


def test_what_passes_the_second_time_is_reported(second_chance, tmp_path):
    done = second_chance(once="False")
    assert done.returncode == 0, done.stdout
    assert "unstable: test_it.py::test_once" in done.stdout
    folder = tmp_path / "out" / "tests" / "fault"
    assert json.loads((folder / "unstable.json").read_text()) == ["test_it.py::test_once"]
    assert "1 failed, 2 passed" in (folder / "first.txt").read_text()
    assert "1 passed" in (folder / "second.txt").read_text()


def test_one_that_is_unstable_does_not_save_one_that_fails(second_chance):
    done = second_chance(always="False", once="False")
    assert done.returncode == 1, done.stdout
    assert "unstable: test_it.py::test_once" in done.stdout
    assert "unstable: test_it.py::test_always" not in done.stdout


def test_a_file_that_cannot_be_read_gets_no_second_chance(second_chance):
    done = second_chance(always="(")
    assert done.returncode == 2, done.stdout
    assert "once more" not in done.stdout


def test_an_empty_selection_is_no_failure(second_chance):
    assert second_chance(selected="nothing_of_that_name").returncode == 0

"""A ratchet: the figures of how legible the code is only get better.

A limit is lowered when a folder has become better, and never raised. The aims of a finished folder: fewer than 3
roleless names, 3 tuple assignments, 20 conditional expressions and 28 comprehensions in 1,000, nothing nested, and
fewer than 5.5 syntax nodes in a line. `python tests/support/legibility.py FILE` shows the places.
"""

import math

import legibility
import pytest
from legibility import Figures

#: Folder -> limits, in the order of `Figures`. "hpcdist" is the files beside the folders.
LIMITS = {
    "hpcdist": (0, 0, 17, 23, 3, 4.7),
    "hpcdist/checkpoint": (0, 0, 18, 41, 3, 6.2),
    "hpcdist/cli": (0, 0, 73, 75, 12, 5.8),
    "hpcdist/cluster": (0, 0, 63, 74, 11, 5.9),
    "hpcdist/collectives": (2, 0, 31, 39, 6, 6.0),
    "hpcdist/data": (1, 1, 30, 33, 4, 5.7),
    "hpcdist/diagnostics": (0, 0, 30, 54, 2, 6.3),
    "hpcdist/gradients": (0, 0, 26, 45, 0, 5.9),
    "hpcdist/plan": (0, 0, 42, 71, 6, 7.2),
    "hpcdist/program": (0, 0, 23, 49, 9, 6.1),
    "hpcdist/ps": (0, 0, 38, 94, 21, 6.1),
    "hpcdist/pytest_plugin": (0, 0, 23, 46, 0, 6.0),
    "hpcdist/replicas": (0, 0, 10, 25, 0, 5.4),
    "hpcdist/run": (0, 0, 33, 28, 3, 6.0),
    "hpcdist/runtime": (0, 0, 23, 20, 2, 5.7),
    "hpcdist/saving": (0, 0, 33, 28, 3, 6.0),
    "hpcdist/stopping": (0, 0, 33, 28, 3, 6.0),
    "hpcdist/storage": (0, 0, 19, 38, 0, 6.3),
    "hpcdist/strategy": (0, 0, 33, 46, 13, 5.5),
    "hpcdist/tf_compat": (0, 0, 37, 25, 4, 6.3),
    "hpcdist/torch_backend": (0, 0, 22, 28, 0, 6.3),
    "hpcdist/training": (0, 0, 45, 37, 4, 5.9),
    "slurm": (0, 0, 31, 22, 0, 5.8),
    "jobs": (0, 0, 19, 11, 0, 6.1),
    "benchmarks": (0, 0, 16, 60, 8, 6.2),
    "tests": (39, 12, 22, 47, 141, 7.1),
}


def files_of(root, folder):
    path = root / folder
    if folder == "hpcdist":
        return sorted(path.glob("*.py"))
    return sorted(file for file in path.rglob("*.py") if "out" not in file.parts)


@pytest.mark.parametrize("folder", LIMITS)
def test_a_folder_gets_no_worse(root, folder):
    figures = legibility.figures_of(files_of(root, folder))
    limits = Figures(*LIMITS[folder])
    for name, value in figures._asdict().items():
        limit = getattr(limits, name)
        advice = f"python tests/support/legibility.py {folder} shows the figures, with a FILE the places"
        assert value <= limit, f"{name} of {folder}: expected at most {limit}, got {value:.2f}; {advice}"


@pytest.mark.parametrize("folder", LIMITS)
def test_limits_go_down_with_the_figures(root, folder):
    figures = legibility.figures_of(files_of(root, folder))
    for name, value, limit in zip(Figures._fields, figures, LIMITS[folder], strict=True):
        assert limit <= math.ceil(1.05 * value) + 1, (
            f"{name} of {folder} is {value:.2f} now: lower its limit of {limit}"
        )


def test_every_folder_has_limits(root):
    folders = {f"hpcdist/{path.name}" for path in (root / "hpcdist").iterdir() if (path / "__init__.py").is_file()}
    assert folders | {"hpcdist", "slurm", "jobs", "benchmarks", "tests"} == set(LIMITS)


SOURCE = '''
"""A docstring of
two lines."""
# a comment


class Point:
    def __eq__(self, other):
        return other is self

    def near(self, other):
        left, right = 1, 2
        return [one for row in self.rows for one in row] if left else (right if self else 3)
'''


def test_what_is_counted():
    counts, places = legibility.count(SOURCE)
    assert counts["roleless"] == 5, "`other` of a comparison does not count"
    assert (counts["tuples"], counts["conditionals"], counts["comprehensions"], counts["nested"]) == (1, 2, 1, 2)
    assert counts["lines"] == 6
    assert [line for line, _ in places] == sorted(line for line, _ in places)

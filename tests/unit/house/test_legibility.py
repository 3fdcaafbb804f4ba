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
    "hpcdist": (0, 0, 2, 15, 0, 4.7),
    "hpcdist/checkpoint": (0, 0, 3, 12, 0, 5.5),
    "hpcdist/cli": (0, 0, 12, 26, 0, 5.4),
    "hpcdist/cluster": (0, 0, 13, 23, 0, 5.5),
    "hpcdist/collectives": (1, 0, 14, 23, 0, 5.5),
    "hpcdist/data": (1, 0, 6, 21, 0, 5.5),
    "hpcdist/diagnostics": (0, 0, 0, 20, 0, 5.5),
    "hpcdist/gradients": (0, 0, 13, 27, 0, 5.4),
    "hpcdist/plan": (0, 0, 3, 21, 0, 5.5),
    "hpcdist/program": (0, 0, 8, 25, 0, 5.5),
    "hpcdist/ps": (0, 0, 3, 26, 0, 5.5),
    "hpcdist/pytest_plugin": (0, 0, 0, 7, 0, 5.4),
    "hpcdist/replicas": (0, 0, 5, 24, 0, 5.4),
    "hpcdist/run": (0, 0, 10, 19, 0, 5.5),
    "hpcdist/runtime": (0, 0, 11, 12, 0, 5.5),
    "hpcdist/saving": (0, 0, 7, 15, 0, 5.5),
    "hpcdist/stopping": (0, 0, 6, 4, 0, 5.1),
    "hpcdist/storage": (0, 0, 9, 27, 0, 5.5),
    "hpcdist/strategy": (0, 0, 18, 27, 0, 5.5),
    "hpcdist/tf_compat": (0, 0, 3, 12, 0, 5.5),
    "hpcdist/torch_backend": (0, 0, 7, 23, 0, 5.5),
    "hpcdist/training": (0, 0, 6, 24, 0, 5.5),
    "slurm": (0, 0, 3, 12, 0, 5.5),
    "jobs": (0, 0, 10, 3, 0, 5.5),
    "benchmarks": (0, 0, 5, 13, 0, 5.5),
    "tests": (2, 1, 10, 37, 8, 6.8),
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

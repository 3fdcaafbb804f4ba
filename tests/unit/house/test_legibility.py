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
    "hpcdist": (28, 0, 18, 24, 3, 5.1),
    "hpcdist/checkpoint": (28, 17, 19, 42, 3, 7.1),
    "hpcdist/cli": (73, 16, 78, 82, 12, 7.4),
    "hpcdist/cluster": (22, 8, 65, 79, 11, 7.0),
    "hpcdist/collectives": (27, 18, 33, 42, 7, 6.9),
    "hpcdist/data": (16, 10, 33, 34, 5, 6.7),
    "hpcdist/diagnostics": (33, 26, 32, 57, 2, 7.5),
    "hpcdist/gradients": (0, 0, 26, 45, 0, 6.4),
    "hpcdist/plan": (27, 30, 44, 74, 6, 8.3),
    "hpcdist/program": (27, 3, 24, 49, 9, 6.6),
    "hpcdist/ps": (66, 24, 39, 96, 21, 7.5),
    "hpcdist/pytest_plugin": (0, 0, 23, 46, 0, 6.8),
    "hpcdist/replicas": (11, 13, 11, 26, 0, 5.9),
    "hpcdist/resilience": (28, 20, 33, 29, 3, 6.5),
    "hpcdist/runtime": (12, 11, 24, 21, 2, 6.3),
    "hpcdist/storage": (0, 0, 19, 38, 0, 6.9),
    "hpcdist/strategy": (31, 14, 33, 47, 13, 6.5),
    "hpcdist/tf_compat": (32, 33, 39, 27, 4, 7.3),
    "hpcdist/torch_backend": (54, 25, 24, 31, 0, 7.5),
    "hpcdist/training": (51, 14, 49, 39, 8, 6.8),
    "slurm": (12, 7, 31, 23, 0, 6.5),
    "jobs": (5, 17, 22, 11, 0, 7.1),
    "benchmarks": (31, 16, 17, 63, 8, 7.5),
    "tests": (40, 13, 22, 49, 142, 7.3),
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

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
    "hpcdist": (28.6, 4.9, 27.4, 25.8, 3, 5.09),
    "hpcdist/checkpoint": (31.7, 20.0, 21.8, 47.0, 3, 7.02),
    "hpcdist/cli": (75.2, 17.0, 77.3, 81.4, 12, 7.32),
    "hpcdist/cluster": (21.5, 7.9, 64.4, 78.5, 11, 6.96),
    "hpcdist/collectives": (32.5, 19.4, 32.5, 42.0, 7, 6.83),
    "hpcdist/data": (27.9, 20.0, 46.8, 50.0, 5, 6.9),
    "hpcdist/diagnostics": (32.3, 25.4, 31.1, 56.5, 2, 7.42),
    "hpcdist/gradients": (54.2, 24.7, 35.7, 62.9, 38, 6.76),
    "hpcdist/plan": (28.9, 33.6, 44.7, 82.0, 6, 8.31),
    "hpcdist/ps": (69.5, 24.1, 38.8, 99.5, 25, 7.43),
    "hpcdist/pytest_plugin": (0.0, 0.0, 22.8, 45.5, 0, 6.69),
    "hpcdist/resilience": (29.6, 26.9, 34.5, 30.7, 3, 6.45),
    "hpcdist/runtime": (20.8, 19.6, 41.3, 22.9, 2, 6.21),
    "hpcdist/strategy": (42.4, 20.5, 38.0, 52.0, 13, 6.45),
    "hpcdist/tf_compat": (38.9, 37.4, 38.5, 27.8, 4, 7.24),
    "hpcdist/torch_backend": (61.0, 26.7, 23.4, 32.3, 0, 7.4),
    "hpcdist/training": (58.4, 19.1, 52.4, 40.5, 10, 6.79),
    "slurm": (11.6, 12.2, 39.9, 22.6, 0, 6.55),
    "jobs": (4.7, 19.8, 25.1, 10.6, 0, 7.03),
    "benchmarks": (31.2, 17.4, 16.1, 62.5, 8, 7.47),
    "tests": (43.0, 12.5, 21.8, 48.6, 150, 7.22),
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
        assert limit <= math.ceil(1.15 * value) + 1, (
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

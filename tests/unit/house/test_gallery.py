"""The gallery has a page for each program of jobs/, with the command that wrote it."""

from pathlib import Path

import pytest
from gallery import FOLDER, JOBS, Outcome, chart_of, index_of, picture_of, points_of

ROOT = Path(__file__).resolve().parents[3]
#: Modules of the programs, and what one of them is compared with.
NO_PROGRAMS = {"images", "own_script_plain"}


def test_each_program_has_a_page():
    programs = {path.stem for path in (ROOT / "jobs").glob("*.py")}
    assert {job.name for job in JOBS} == programs - NO_PROGRAMS


def test_the_index_is_up_to_date():
    """`make gallery` writes it."""
    assert (FOLDER / "index.md").read_text() == index_of(JOBS)


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.name)
def test_a_page_is_of_its_command(job):
    page = (FOLDER / f"{job.name}.md").read_text()
    assert page.startswith(f"# {job.title}\n\n{job.text}\n")
    for command in job.commands:
        assert f"\n$ {command}\n" in page
    assert (f"({job.name}.svg)" in page) is job.has_picture
    assert (FOLDER / f"{job.name}.svg").exists() is job.has_picture


def test_a_curve_is_of_the_numbers_in_the_lines():
    (job,) = (job for job in JOBS if job.name == "linear_regression")
    points = points_of(job, ["a line", "epoch 1  loss 4.000000", "epoch 2  loss 1.000000", "epoch 3  loss 2.500000"])
    assert points == [(1.0, 4.0), (2.0, 1.0), (3.0, 2.5)]
    chart = chart_of(job, points)
    assert 'points="46.0,46.0 320.0,194.0 594.0,120.0"' in chart
    assert "epoch 3</text>" in chart


def test_bars_are_as_long_as_the_numbers_in_the_lines():
    (job,) = (job for job in JOBS if job.name == "wide_embedding")
    lines = (["loss 0.7 to 0.5, 40.0 steps/s"], ["loss 0.7 to 0.5, 10.0 steps/s"])
    outcomes = [Outcome(command, printed, 1.0) for command, printed in zip(job.commands, lines, strict=True)]
    picture = picture_of(job, outcomes, FOLDER)
    assert [picture.count(f'width="{width}"') for width in ("358.0", "89.5")] == [1, 1]
    assert ">40</text>" in picture

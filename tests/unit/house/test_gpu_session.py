"""`make gpu`: its steps, its report, and what it does on a machine without a GPU."""

import sys
import time

import gpu_session
import pytest
from gpu_session import Outcome, Step


@pytest.mark.parametrize("folders", [[], ["wheels"]])
def test_packages_come_from_folders_alone_where_some_are_named(folders):
    commands = [step.command for step in gpu_session.steps_of_install(folders)]
    installs = [command for command in commands if "install" in command]
    assert len(installs) == 2
    for command in installs:
        assert ("--no-index" in command) == bool(folders)
        assert ("--find-links=wheels" in command) == bool(folders)
        assert "--constraint" not in command, "no pin may break on a machine with other releases"


def test_tests_run_on_one_and_two_ranks_before_the_benchmarks(tmp_path):
    titles = [step.title for step in gpu_session.steps_of_session(tmp_path)]
    assert titles[:2] == ["tests/gpu, 1 rank", "tests/gpu, 2 ranks"]
    assert {title.split(",")[0].split(" of ")[0] for title in titles[2:]} == {"step", "all-reduce"}
    assert all(step.needs_gpu for step in gpu_session.steps_of_session(tmp_path)[2:])


def test_a_step_that_takes_too_long_is_ended_with_what_it_started():
    sleeper = "[sys.executable, '-c', 'import time; time.sleep(60)']"
    script = f"import subprocess, sys; print('begun', flush=True); subprocess.run({sleeper})"
    began = time.monotonic()
    outcome = gpu_session.run_step(Step("slow", [sys.executable, "-c", script], 2), time.monotonic() + 100)
    assert time.monotonic() - began < 20
    assert outcome.verdict == "ended after 2 s"
    assert outcome.is_failure
    assert "begun" in outcome.output


def test_a_step_after_the_session_s_time_does_not_run():
    outcome = gpu_session.run_step(Step("late", [sys.executable, "-c", "print(1)"], 60), time.monotonic())
    assert outcome.is_failure
    assert outcome.output == ""


def test_the_report_has_a_verdict_and_the_output_of_each_step():
    steps = [
        Outcome(Step("one", ["a", "b"], 1), "passed", 2.0, "fine\n"),
        Outcome(Step("two", ["c"], 1), "not run: x", 0.0, ""),
    ]
    report = gpu_session.report_of(steps)
    assert "    2 s  one: passed" in report
    assert "## two: not run: x" in report
    assert "fine" in report
    assert not steps[1].is_failure, "a missing GPU is no failure"

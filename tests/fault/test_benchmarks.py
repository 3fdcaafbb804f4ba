"""The benchmark of all-reduce, in small: it times every contender, and writes a table that names all of them."""

import json

import pytest


@pytest.mark.feature("observability.benchmark-of-collectives")
@pytest.mark.slow
def test_all_reduce_by_size_and_algorithm(start, root, tmp_path):
    options = ["--quick", "--sizes", "1K,64K", "--rounds", "1", "--seconds", "1", "--algorithms", "RING,HIERARCHICAL"]
    outcome = start(2, root / "benchmarks" / "allreduce.py", *options, "--out", tmp_path / "out").wait(100)
    assert outcome.code == 0, outcome.output
    report = json.loads((tmp_path / "out" / "allreduce.json").read_text())
    assert [case["case"] for case in report["cases"]] == ["1 KiB", "64 KiB"]
    for case in report["cases"]:
        assert {"MPI_Allreduce in place", "torch gloo", "hpcdist AUTO", "hpcdist RING", "hpcdist HIERARCHICAL"} <= set(
            case["samples"]
        )
    assert "hpcdist RING" in outcome.output


@pytest.mark.slow
def test_epochs_of_loaders(start, root):
    options = ["--rows", "8", "--batch", "4", "--epochs", "1", "--workers", "0", "1"]
    outcome = start(2, root / "benchmarks" / "loader.py", *options).wait(100)
    assert outcome.code == 0, outcome.output
    assert len([line for line in outcome.output.splitlines() if line.split()[1:2] in (["False"], ["True"])]) == 3

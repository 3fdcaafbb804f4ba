import ast
import importlib
import re
from pathlib import Path

import pytest

import hpcdist
from hpcdist.errors import ExitCode, HpcdistError, error_class

ROOT = Path(__file__).resolve().parents[2]


def names_for_type_checkers():
    tree = ast.parse(Path(hpcdist.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    return {alias.asname: node.module for node in block.body for alias in node.names}


def test_what_is_resolved_at_run_time_is_what_type_checkers_see():
    resolved = {name: f"hpcdist.{module}" for name, module in hpcdist._MODULES.items()}
    whole = {name: f"hpcdist.{module}".rpartition(".")[0] for name, module in hpcdist._WHOLE_MODULES.items()}
    assert {**resolved, **whole} == names_for_type_checkers()
    assert hpcdist.__all__ == sorted([*resolved, *whole])


@pytest.mark.parametrize("name", hpcdist._WHOLE_MODULES)
def test_whole_modules_are_there(name):
    pytest.importorskip("mpi4py.MPI")
    assert getattr(hpcdist, name).__name__ == f"hpcdist.{hpcdist._WHOLE_MODULES[name]}"


@pytest.mark.parametrize("name", hpcdist._MODULES)
def test_every_public_name_is_there_and_documented(name):
    pytest.importorskip("mpi4py.MPI")
    found = getattr(hpcdist, name)
    assert found.__module__ == f"hpcdist.{hpcdist._MODULES[name]}"
    assert found.__doc__


@pytest.mark.parametrize("path", ["cluster_resolver", "experimental"])
def test_the_paths_of_tf_distribute_hold_aliases(path):
    pytest.importorskip("mpi4py.MPI")
    module = getattr(hpcdist, path)
    for name in module.__all__:
        assert getattr(module, name) is getattr(hpcdist, getattr(module, "_RENAMED", {}).get(name, name))
    tree = ast.parse(Path(module.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    assert sorted(alias.asname for node in block.body for alias in node.names) == module.__all__
    with pytest.raises(AttributeError, match=f"'hpcdist.{path}' has no attribute 'Nothing'; it has C"):
        _ = module.Nothing


def test_unknown_names_are_answered_with_the_valid_ones():
    with pytest.raises(AttributeError, match="has no attribute 'MirrorStrategy'; it has .*all_reduce"):
        _ = hpcdist.MirrorStrategy


def test_the_tree_in_errors_names_every_class():
    errors = importlib.import_module("hpcdist.errors")
    classes = {n for n, c in vars(errors).items() if isinstance(c, type) and issubclass(c, HpcdistError)}
    drawn = dict(re.findall(r"(\w+)\s+(\d+)  ", errors.__doc__))
    assert set(drawn) == classes
    assert {name: int(error_class(name).exit_code) for name in classes} == {n: int(c) for n, c in drawn.items()}
    assert error_class("os") is HpcdistError
    assert ExitCode.RUN_AGAIN == 75


def test_flags_of_the_job_are_frozen():
    """A new flag is a decision: users' scripts depend on each of them."""
    text = (ROOT / "jobs" / "train.py").read_text()
    flags = re.findall(r'add_argument\("(--[\w-]+)"', text)
    assert flags == [
        "--model",
        "--data",
        "--epochs",
        "--batch",
        "--replicas",
        "--seed",
        "--run-dir",
        "--save-every",
        "--copy-every",
    ]
    assert text.count("\n") <= 150

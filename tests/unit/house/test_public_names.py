import importlib
import re
from pathlib import Path

import pytest

import hpcdist
from hpcdist import public_names
from hpcdist.errors import ExitCode, HpcdistError, error_class

ROOT = Path(__file__).resolve().parents[3]


PACKAGE = Path(hpcdist.__file__).parent


def test_the_stubs_follow_from_the_table():
    """`make stubs` writes them anew."""
    assert {path.name: path.read_text() for path in PACKAGE.glob("*.pyi")} == public_names.stubs()


def test_no_module_is_listed_twice_and_no_name_is():
    names = [name for names in public_names._DEFINED_IN.values() for name in names]
    assert len(names) == len(set(names))
    assert hpcdist.__all__ == sorted([*names, *public_names.MODULES])


@pytest.mark.parametrize("name", public_names.MODULES)
def test_whole_modules_are_there(name):
    pytest.importorskip("mpi4py.MPI")
    assert getattr(hpcdist, name).__name__ == f"hpcdist.{public_names.MODULES[name]}"


def test_every_metric_can_be_imported_by_its_path():
    pytest.importorskip("mpi4py.MPI")
    metrics = importlib.import_module("hpcdist.metrics")
    defined = vars(importlib.import_module("hpcdist.tf_compat.metrics"))
    expected = {name for name, member in defined.items() if hasattr(member, "reset_state") and name[0] != "_"}
    assert {name for name in vars(metrics) if name[0] != "_"} == expected


@pytest.mark.parametrize("name", public_names.NAMES)
def test_every_public_name_is_there_and_documented(name):
    pytest.importorskip("mpi4py.MPI")
    exported = getattr(hpcdist, name)
    assert exported.__module__ == f"hpcdist.{public_names.NAMES[name]}"
    assert exported.__doc__


@pytest.mark.parametrize("path", public_names.ALIASES)
def test_the_paths_of_tf_distribute_hold_aliases(path):
    pytest.importorskip("mpi4py.MPI")
    module = getattr(hpcdist, path)
    assert module.__all__ == sorted(public_names.ALIASES[path])
    for name, target in public_names.ALIASES[path].items():
        assert getattr(module, name) is getattr(hpcdist, target)
    with pytest.raises(AttributeError, match=f"'hpcdist.{path}' has no attribute 'Nothing'; "):
        _ = module.Nothing


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("MirrorStrategy", "near it are MirroredStrategy, "),
        ("optimizers", r'compile\(optimizer="adam"\)'),
        ("Nothing", "all names are in docs/reference/api.md"),
    ],
)
def test_unknown_names_are_answered_with_what_is_near(name, advice):
    with pytest.raises(AttributeError, match=f"module 'hpcdist' has no attribute '{name}'; {advice}"):
        getattr(hpcdist, name)


def test_no_public_name_is_said_to_be_elsewhere():
    assert not set(public_names._ELSEWHERE) & {*public_names.NAMES, *public_names.MODULES}


def test_the_tree_in_errors_names_every_class():
    errors = importlib.import_module("hpcdist.errors")
    classes = {n for n, c in vars(errors).items() if isinstance(c, type) and issubclass(c, HpcdistError)}
    parents: dict[str, str] = {}
    codes: dict[str, int] = {}
    branch: list[str] = []  # from the root to the class of the line before
    for edge, name, code in re.findall(r"^([ │├└─]*)(\w+) +(\d+)  ?\w", errors.__doc__, re.MULTILINE):
        branch = [*branch[: len(edge) // 4], name]
        parents[name] = branch[-2] if len(branch) > 1 else ""
        codes[name] = int(code)
    assert set(codes) == classes
    assert {name: int(error_class(name).exit_code) for name in classes} == codes
    del parents["HpcdistError"]
    assert {name: error_class(name).__bases__[0].__name__ for name in parents} == parents
    assert error_class("os") is HpcdistError
    assert ExitCode.RUN_AGAIN == 75


def test_flags_of_the_job_are_frozen():
    """A new flag is a decision: users' scripts depend on each of them."""
    text = (ROOT / "jobs" / "train.py").read_text()
    flags = re.findall(r'\badd\("(--[\w-]+)"', text)
    assert flags == [
        "--model",
        "--data",
        "--epochs",
        "--batch",
        "--replicas",
        "--strategy",
        "--roles",
        "--max-staleness",
        "--device",
        "--seed",
        "--run-dir",
        "--save-every",
        "--copy-every",
    ]
    assert text.count("\n") <= 160

"""Imports go down the layers only; one door per dependency. Read from the source, and held against ARCHITECTURE.md."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import layer_picture
import pytest

PACKAGE = Path(__file__).resolve().parents[3] / "hpcdist"
TESTS = PACKAGE.parent / "tests"
LAYERS = {
    "errors": 0,
    "public_names": 0,
    "dtypes": 0,
    "retries": 0,
    "child_processes": 0,
    "forks": 0,
    "nest": 0,
    "restart_rule": 0,
    "background": 1,
    "cluster": 1,
    "plan": 1,
    "checkpoint": 1,
    "runtime": 2,
    "diagnostics": 3,
    "collectives": 4,
    "program": 4,
    "replicas": 5,
    "storage": 5,
    "data": 5,
    "ps": 5,
    "torch_backend": 5,
    "gradients": 6,
    "run": 6,
    "strategy": 7,
    "saving": 7,
    "stopping": 8,
    "tf_compat": 8,
    "training": 9,
    "callbacks": 10,
    "cluster_resolver": 10,
    "compat": 10,
    "coordinator": 10,
    "datasets": 10,
    "estimator": 10,
    "experimental": 10,
    "losses": 10,
    "metrics": 10,
    "optim": 10,
    "regularizers": 10,
    "summary": 10,
    "testing": 10,
    "cli": 11,
    "pytest_plugin": 11,
    "__main__": 12,
    "notebook": 12,
}
#: Dependency -> the only modules and folders that may import it.
DOORS = {
    "mpi4py": {"runtime.mpi"},
    "h5py": {"checkpoint.layout", "checkpoint.safe_open", "data.row_writer"},
    "torch": {
        "cli.torch_files",
        "data",
        "gradients",
        "program",
        "ps",
        "pytest_plugin",
        "replicas",
        "storage",
        "strategy",
        "tf_compat",
        "torch_backend",
        "training",
    },
    "cupy": {"collectives.gpu.cupy_door"},
    "cupyx": {"collectives.gpu.cupy_door"},
    "torch_xla": {"tf_compat.tpu"},
    "click": {"cli"},
    "matplotlib": {"cli.charts"},
    "jinja2": {"cli.report"},
    "pytest": {"pytest_plugin"},
    "safetensors": {"cli.torch_files"},
    "tensorboard": {"training.event_file"},
    "pickle": {"ps.pickles"},
    "cloudpickle": {"ps.pickles"},
}
MODULES = {".".join(path.relative_to(PACKAGE).with_suffix("").parts): path for path in PACKAGE.rglob("*.py")}


def module_imports(path):
    """Return the modules of the package that a file imports anywhere: in functions and for type checkers, too."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {name.removeprefix("hpcdist.") for name in names if name.startswith("hpcdist.")}


def circles(imports_of):
    """Return the sets of modules that import each other, directly or through others.

    Args:
        imports_of: dict of a module's name -> names of the modules that it imports.
    """
    reachable = {}
    for module in imports_of:
        reached = set()
        waiting = list(imports_of[module])
        while waiting:
            imported = waiting.pop()
            if imported not in reached:
                reached.add(imported)
                waiting.extend(imports_of[imported])
        reachable[module] = reached
    in_circles = {module for module in imports_of if module in reachable[module]}
    sets = {frozenset(other for other in reachable[module] if module in reachable[other]) for module in in_circles}
    return sorted(map(set, sets), key=min)


def imports(path):
    """Yield the full name of everything that a file imports, but for type checkers only."""
    tree = ast.parse(path.read_text())
    skipped = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{name.name}" for name in node.names)


# pytest-mpi takes a parameter called "mpi" for its own mark: hence the ids
@pytest.mark.parametrize("name", sorted(set(MODULES) - {"__init__"}), ids="{}.py".format)
def test_imports_go_down_only(name):
    folder = name.split(".")[0]
    for imported in imports(MODULES[name]):
        if imported.startswith("hpcdist."):
            imported_folder = imported.split(".")[1]
            assert imported_folder == folder or LAYERS[imported_folder] < LAYERS[folder], f"{name} imports {imported}"


def test_a_circle_is_found():
    plain = {"a": {"b"}, "b": {"c"}, "c": set(), "d": {"a"}}
    assert circles(plain) == []
    assert circles({**plain, "c": {"a"}}) == [{"a", "b", "c"}], "d leads to the circle and is not in it"
    assert circles({**plain, "a": {"b", "a"}, "c": {"b"}}) == [{"a"}, {"b", "c"}]


def test_no_imports_go_in_a_circle():
    paths = {name.removesuffix(".__init__"): path for name, path in MODULES.items()}
    imports_of = {name: module_imports(path) & set(paths) for name, path in paths.items()}
    assert imports_of["strategy.base"] >= {"strategy.context", "strategy.extended"}
    found = [sorted(circle) for circle in circles(imports_of)]
    assert found == [], "move what both sides need below them"


@pytest.mark.parametrize("dependency", sorted(DOORS))
def test_one_door_per_dependency(dependency):
    for name, path in MODULES.items():
        if any(imported.split(".")[0] == dependency for imported in imports(path)):
            assert any(name == door or name.startswith(f"{door}.") for door in DOORS[dependency]), name


def test_every_file_has_a_layer():
    assert {name.split(".")[0] for name in MODULES} - {"__init__"} == set(LAYERS)


def names_used(path):
    """Return every name and attribute that a file mentions."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    return {node.attr for node in nodes if isinstance(node, ast.Attribute)} | {
        name for node in nodes if isinstance(node, ast.ImportFrom) for name in (alias.name for alias in node.names)
    }


def test_only_one_file_reads_the_environment_and_none_writes_it():
    users = {name for name, path in MODULES.items() if names_used(path) & {"environ", "getenv", "putenv", "environb"}}
    assert users == {"cluster.environment"}


def test_only_one_file_changes_a_disk():
    """What it does can be made to fail, or be replayed. Apart is what may be lost: names in memory, tests' folders."""
    changes = r"os\.(fsync|fdatasync|unlink|remove|rename|replace|rmdir|mkdir|makedirs|pwrite)\b|rmtree|\.unlink\("
    users = {name for name, path in MODULES.items() if re.search(changes, path.read_text())}
    assert users == {"checkpoint.durable", "runtime.mpich_shm", "saving.fast_tier", "pytest_plugin.ranks"}


def test_imports_are_statements():
    """What is imported by name at run time would pass by this file; only the public names are."""
    users = {name for name, path in MODULES.items() if "import_module" in path.read_text()}
    assert users == {"public_names"}


def test_comm_world_is_named_where_a_process_starts_only():
    users = {name for name, path in MODULES.items() if re.search(r"(?<!of )(?<!OMPI_)COMM_WORLD", path.read_text())}
    assert users <= {"pytest_plugin.ranks", "runtime.process", "runtime.world", "cluster.environment"}


def test_the_table_in_architecture_names_every_folder():
    text = (PACKAGE.parent / "ARCHITECTURE.md").read_text()
    rows = {}
    for layer, names in re.findall(r"^\| (\d+) \| `([\w./`, ]+)` \|", text, re.MULTILINE):
        for name in re.findall(r"\w+(?=/|\.py)", names):
            rows[name] = int(layer)
    assert rows == LAYERS


def test_the_picture_is_that_of_the_table():
    text = (PACKAGE.parent / "ARCHITECTURE.md").read_text()
    is_drawn = layer_picture.PICTURE.read_text() == layer_picture.picture_of(text)
    assert is_drawn, "draw it again: python tests/support/layer_picture.py"


def test_files_that_architecture_names_exist():
    text = (PACKAGE.parent / "ARCHITECTURE.md").read_text()
    paths = set(re.findall(r"`((?:[a-z_]+/)+[a-z_]+\.(?:py|md|svg))`", text))
    missing = [path for path in paths if not ((PACKAGE / path).exists() or (PACKAGE.parent / path).exists())]
    assert not missing
    assert max(map(len, text.splitlines())) <= 100
    assert text.count("\n") <= 220


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)


def test_import_loads_neither_mpi_nor_torch():
    paths = "dir(hpcdist); dir(hpcdist.experimental); hpcdist.cluster_resolver.UnionResolver"
    loaded = run(f"import sys, hpcdist; {paths}; print([m for m in ('mpi4py', 'torch', 'h5py') if m in sys.modules])")
    assert loaded.stdout.strip() == "[]", loaded.stderr


def test_layers_0_and_1_load_neither_mpi_nor_torch():
    names = [name for name in MODULES if LAYERS.get(name.split(".")[0], 9) <= 1]
    code = f"import sys\nfor n in {names}: __import__('hpcdist.' + n)\n"
    loaded = run(code + "print([m for m in ('mpi4py', 'torch') if m in sys.modules])")
    assert loaded.stdout.strip() == "[]", loaded.stderr


def test_slow_and_sweep_tests_are_where_a_part_runs_them():
    """`make test-all` runs slow tests in tests/fault, tests/slurm and tests/hosts; `make ways` sweeps tests/fault."""
    marks = {"unit": "slow|sweep|quick", "mpi": "slow|sweep|quick", "gpu": "slow|sweep|quick", "hosts": "sweep"}
    for folder, unwanted in marks.items():
        for path in sorted((TESTS / folder).rglob("*.py")):
            assert not re.search(rf"mark\.({unwanted})\b", path.read_text()), path

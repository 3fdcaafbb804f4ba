"""`hpcdist new` writes one file, under a name that a script can have. `tests/fault/test_new.py` runs what it writes."""

import ast
import errno
import os
from pathlib import Path

import pytest

from hpcdist.cli import new
from hpcdist.cli.main import main


@pytest.fixture
def hpcdist(tmp_path, monkeypatch, capsys):
    """Return hpcdist(*arguments), which calls the command in an empty folder: its exit code, and what it printed."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        with pytest.raises(SystemExit) as ended:
            main(list(arguments))
        printed = capsys.readouterr()
        return int(ended.value.code), printed.out + printed.err

    return call


@pytest.mark.parametrize("kind", new.KINDS)
def test_the_script_names_itself(hpcdist, kind):
    code, text = hpcdist("new", "--kind", kind, "digits-1.py")
    assert code == 0, text
    script = Path("digits-1.py").read_text()
    assert "mpirun -n 2 python digits-1.py\n" in ast.get_docstring(ast.parse(script)) + "\n"
    assert f"{kind}.py" not in script
    assert "hpcdist run -n 2 digits-1.py\n" in text
    assert "digits-1.py --run-dir runs/digits-1\n" in text


def test_a_loop_is_the_default(hpcdist):
    hpcdist("new", "a.py")
    hpcdist("new", "b.py", "--kind", "loop")
    assert Path("a.py").read_text().replace("a.py", "b.py") == Path("b.py").read_text()


def test_an_existing_file_stays(hpcdist):
    Path("train.py").write_text("mine")
    Path("link.py").symlink_to("nowhere.py")
    for name in ("train.py", "link.py"):
        code, text = hpcdist("new", name)
        assert code == 2
        assert f"got '{name}', which exists" in text
    assert Path("train.py").read_text() == "mine"
    assert not Path("nowhere.py").exists()


@pytest.mark.parametrize(
    "name", ["train", "a b.py", 'a"""b.py', "a\\b.py", ".py", "-train.py", "a\nb.py", "$HOME.py", "a.b.py"]
)
def test_names_that_need_quotes_are_refused(hpcdist, name):
    code, text = hpcdist("new", "--", name)
    assert code == 2
    assert "expected a file name of letters" in text
    assert os.listdir() == []


@pytest.mark.parametrize("name", ["torch.py", "random.py", "sklearn.py", "hpcdist.py", "click.py", "sys.py"])
def test_names_that_hide_a_module_are_refused(hpcdist, name):
    code, text = hpcdist("new", name)
    assert code == 2
    assert "would hide the module" in text
    assert os.listdir() == []


def test_a_missing_folder_is_named(hpcdist):
    code, text = hpcdist("new", "nowhere/train.py")
    assert code == 2
    assert "expected a folder that exists, got 'nowhere'" in text
    assert os.listdir() == []


def test_a_full_disk_leaves_no_part_of_a_script(hpcdist, monkeypatch):
    def fail(descriptor, blocks, offset):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", fail)
    monkeypatch.setattr(os, "pwritev", fail)
    code, text = hpcdist("new", "train.py")
    assert code == 74
    assert "No space left on device" in text
    assert os.listdir() == []


@pytest.mark.parametrize("is_installed", [False, True])
def test_scikit_learn_is_asked_for_where_it_is_missing(hpcdist, monkeypatch, is_installed):
    spec = object() if is_installed else None
    monkeypatch.setattr(new.importlib.util, "find_spec", lambda name: spec)
    _, text = hpcdist("new", "train.py")
    assert ("pip install scikit-learn" in text) is not is_installed

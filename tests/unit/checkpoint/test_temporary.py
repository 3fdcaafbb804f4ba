"""Files while they are written: names that no other process has, and what killed writers leave."""

import ast
import errno
import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path

import h5py
import pytest

import hpcdist
from hpcdist import Dataset
from hpcdist.checkpoint import durable, temporary
from hpcdist.checkpoint.durable import Disk
from hpcdist.data.row_writer import RowFile

SOURCE = Path(hpcdist.__file__).parent
#: Begins to write a file, and waits to be killed.
WRITER = """
import sys
from pathlib import Path
from hpcdist.checkpoint import durable

def blocks():
    yield 0, memoryview(b"half")
    print("begun", flush=True)
    sys.stdin.read()

durable.replace_file(durable.Disk(), Path(sys.argv[1]), blocks())
"""


def hidden(folder):
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


@pytest.fixture
def writer(tmp_path):
    """Return a living process that has written half of a file."""
    command = [sys.executable, "-c", WRITER, tmp_path / "best.h5"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "begun\n"
    yield process
    process.kill()
    process.communicate()


def test_two_processes_of_one_number_write_their_own_files(tmp_path, monkeypatch):
    """As in containers, each of which counts its processes from 1."""
    monkeypatch.setattr(os, "getpid", lambda: 7)

    def blocks():
        yield 0, memoryview(b"mine")
        durable.replace_text(Disk(), tmp_path / "best.h5", "the other's")
        yield 4, memoryview(b" too")

    durable.replace_file(Disk(), tmp_path / "best.h5", blocks())
    assert (tmp_path / "best.h5").read_bytes() == b"mine too"
    assert hidden(tmp_path) == []


def test_what_is_written_lies_in_the_folder_of_the_file(writer, tmp_path):
    (name,) = hidden(tmp_path)
    assert temporary.file_of(name) == "best.h5"


def test_a_living_writer_keeps_its_file_and_a_killed_one_does_not(writer, tmp_path):
    durable.replace_text(Disk(), tmp_path / "best.h5", "first")
    assert len(hidden(tmp_path)) == 1
    durable.replace_text(Disk(), tmp_path / "other.h5", "another file")
    writer.kill()
    writer.wait()
    assert len(hidden(tmp_path)) == 1
    durable.replace_text(Disk(), tmp_path / "best.h5", "second")
    assert hidden(tmp_path) == []


def test_a_file_that_is_whole_and_has_no_name_yet_is_its_writers(tmp_path):
    """Another one of the same name begins between the last byte and the rename."""

    class BesideDisk(Disk):
        def rename(self, path, to):
            durable.sweep_abandoned(Disk(), to.parent, to.name)
            super().rename(path, to)

    durable.replace_text(BesideDisk(), tmp_path / "best.h5", "whole")
    assert (tmp_path / "best.h5").read_text() == "whole"


def make_old(path):
    """Let a file look as if nobody had written to it for more than an hour."""
    long_ago = time.time() - temporary.ABANDONED_AFTER_S - 60
    os.utime(path, (long_ago, long_ago))


def of_another_host(folder, file_name):
    path = folder / f".{file_name}.tmp-12345678-0123456789abcdef"
    path.write_bytes(b"half")
    return path


def test_a_writer_of_another_host_is_dead_after_an_hour_without_a_change(tmp_path):
    path = of_another_host(tmp_path, "best.h5")
    durable.replace_text(Disk(), tmp_path / "best.h5", "text")
    assert path.exists()
    make_old(path)
    durable.replace_text(Disk(), tmp_path / "best.h5", "text")
    assert not path.exists()


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP], ids=errno.errorcode.get)
def test_without_locks_the_age_decides(tmp_path, monkeypatch, code):
    control = fcntl.fcntl

    def refuse(descriptor, command, *arguments):
        if command == fcntl.F_OFD_SETLK:
            raise OSError(code, os.strerror(code))
        return control(descriptor, command, *arguments)

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    path = temporary.temporary_path(tmp_path / "best.h5")
    path.write_bytes(b"half")
    durable.replace_text(Disk(), tmp_path / "best.h5", "text")
    assert path.exists()
    make_old(path)
    durable.replace_text(Disk(), tmp_path / "best.h5", "text")
    assert not path.exists()


def test_readers_of_hdf5_are_not_kept_away(tmp_path):
    """HDF5 locks what it reads, too: a file that has just got its name is read at once."""

    class ReadingDisk(Disk):
        def rename(self, path, to):
            super().rename(path, to)
            with h5py.File(to) as file:
                assert file["x"][:].tolist() == [1.0, 2.0]

    with h5py.File(tmp_path / "source.h5", "w") as file:
        file["x"] = [1.0, 2.0]
    content = memoryview((tmp_path / "source.h5").read_bytes())
    durable.replace_file(ReadingDisk(), tmp_path / "best.h5", [(0, content)], len(content))


def test_a_link_of_such_a_name_is_left_alone(tmp_path):
    (tmp_path / "precious").write_text("mine")
    link = temporary.temporary_path(tmp_path / "best.h5")
    link.symlink_to("precious")
    durable.replace_text(Disk(), tmp_path / "best.h5", "text")
    assert (tmp_path / "precious").read_text() == "mine"
    assert link.is_symlink()


def test_rows_and_caches_remove_what_their_killed_writers_left(tmp_path):
    for file_name in ("rows.h5", "cache.0123.rows", "other.0123.rows"):
        temporary.temporary_path(tmp_path / file_name).write_bytes(b"half")
    with RowFile(tmp_path / "rows.h5") as file:
        file.append({"x": [1.0, 2.0]})
        file.publish()
    assert list(map(temporary.file_of, sorted(hidden(tmp_path)))) == ["cache.0123.rows", "other.0123.rows"]
    list(Dataset.from_tensor_slices([1.0, 2.0]).cache(str(tmp_path / "cache")))
    assert list(map(temporary.file_of, hidden(tmp_path))) == ["other.0123.rows"]


def test_a_cache_does_not_read_one_whose_name_begins_like_its_own(tmp_path):
    long_name_cache = Dataset.from_tensor_slices([1000.0, 1001.0]).cache(str(tmp_path / "train.aug"))
    assert list(map(float, long_name_cache)) == [1000.0, 1001.0]
    short_name_cache = Dataset.from_tensor_slices([0.0, 1.0]).cache(str(tmp_path / "train"))
    assert list(map(float, short_name_cache)) == [0.0, 1.0]


def test_no_name_is_made_of_a_process_id():
    """Process ids repeat in containers and on other hosts. In /proc they name what they should."""
    violations = []
    for path in [
        *SOURCE.rglob("*.py"),
        *(SOURCE.parent / "slurm").glob("*.py"),
        *(SOURCE.parent / "jobs").glob("*.py"),
    ]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr) and "pid" in ast.unparse(node) and not is_for_people_or_proc(node):
                violations.append(f"{path.relative_to(SOURCE.parent)}:{node.lineno}: {ast.unparse(node)}")
    assert violations == []


def is_for_people_or_proc(node):
    text = ast.unparse(node)
    return "/proc/" in text or "process {" in text or "--pid {" in text

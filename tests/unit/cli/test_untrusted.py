"""Files that others have made: commands print no escapes of theirs, write through no links, and run no lines."""

import ast
import json
import os
import re
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

import hpcdist as package
from hpcdist.checkpoint.store import Store
from hpcdist.cli.output import printable
from hpcdist.diagnostics.logs import open_log
from hpcdist.run.ledger import Launch, Ledger

SOURCE = Path(package.__file__).parent
#: What steers a terminal: a title, a colour, a C1 control, a delete, the direction of text, half a character.
ESCAPES = "\x1b]0;owned\x07 \x1b[31m \x9b1m \x7f \u202e \u2066 \x08 \r \udc80"
STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


@pytest.fixture
def hostile_run(tmp_path):
    """Return a run folder of which every text holds escapes."""
    run = tmp_path / "run"
    ledger = Ledger(Store(run / "checkpoints"))
    ledger.begin(Launch(f"7{ESCAPES}", (f"n1{ESCAPES}",), None, False))
    ledger.end("stopped", f"SIGTERM{ESCAPES}")
    manager = package.CheckpointManager(package.Checkpoint(values=np.arange(4.0)), run / "checkpoints")
    manager.save(3, {f"loss{ESCAPES[:-1]}": 1.0})
    manager.wait()
    decision = {"decision": f"requeue{ESCAPES}", "reason": ESCAPES, "step": 3, "attempt": 1, "job": ESCAPES}
    (run / "decision.json").write_text(json.dumps(decision))
    (run / "metrics.jsonl").write_text(json.dumps({"step": 1, f"loss{ESCAPES}": ESCAPES}) + "\n")
    (run / "logs").mkdir()
    line = f"2026-11-26T00:25:01.123 INFO [worker:0 r0/1 n1] mine: {ESCAPES}\n"
    (run / "logs" / "rank-00000.log").write_text(line, errors="surrogateescape")
    (run / "errors").mkdir()
    error = {"error": ESCAPES, "n_failures": 2, "time_s": 1.0, "is_over": False}
    (run / "errors" / "evaluator-0.json").write_text(json.dumps(error))
    (run / "errors" / "x\x1b[31m.json").write_text(json.dumps(error))
    return run


@pytest.mark.parametrize(
    "arguments",
    [
        ("status", "RUN"),
        ("status", "RUN", "--json"),
        ("logs", "RUN"),
        ("logs", "RUN", "--json"),
        ("stop", "RUN"),
        ("ckpt", "ls", "RUN"),
        ("ckpt", "show", "RUN"),
        ("ckpt", "verify", "RUN"),
        ("trace", "RUN"),
    ],
    ids=" ".join,
)
def test_nothing_that_is_printed_steers_the_terminal(hostile_run, hpcdist, arguments):
    words = []
    for argument in arguments:
        if argument == "RUN":
            words.append(hostile_run)
        else:
            words.append(argument)
    _, out, error = hpcdist(*words)
    assert out + error
    assert STEERING.findall(out + error) == []


@pytest.mark.timeout(60)
@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")], ids=["a pipe", "/dev/zero"])
@pytest.mark.parametrize("name", ["decision.json", "metrics.jsonl", "logs/rank-00000.log", "errors/evaluator-0.json"])
def test_what_is_no_file_is_not_waited_for(hostile_run, hpcdist, name, make):
    (hostile_run / name).unlink()
    make(hostile_run / name)
    for arguments in (("status", hostile_run), ("logs", hostile_run), ("report", hostile_run)):
        code, _, error = hpcdist(*arguments)
        assert code in (0, 74), error


def test_deep_lines_and_odd_jobs_are_no_traceback(hostile_run, hpcdist):
    (hostile_run / "logs" / "rank-00000.log").write_text('{"a":' * 200_000 + "\n")
    assert hpcdist("logs", hostile_run)[0] == 0
    for job in ("a\x00b", "a\ud800b"):
        ledger = Ledger(Store(hostile_run / "checkpoints"))
        ledger.begin(Launch(job, ("n1",), None, False))
        assert hpcdist("status", hostile_run)[0] == 0


def test_what_people_write_is_printed_as_it_is():
    for text in ("plain", "Grüße, 世界", "two\nlines\tand a tab", "emoji 🙂"):
        assert printable(text) == text
    assert printable("\x1b[1m") == "\\x1b[1m"


#: The door, and what prints JSON in the ranks of `hpcdist doctor`.
PRINTERS = ("output.py", "probe.py")


def test_commands_print_by_one_door():
    stray_prints = []
    for path in (SOURCE / "cli").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            prints = ("click.echo", "print", "sys.stdout.write")
            if isinstance(node, ast.Call) and ast.unparse(node.func) in prints and path.name not in PRINTERS:
                stray_prints.append(f"{path.name}:{node.lineno}")
    assert stray_prints == []


# -- links ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def precious(tmp_path):
    path = tmp_path / "precious"
    path.write_text("mine")
    return path


def test_a_log_is_not_written_through_a_link(tmp_path, precious):
    (tmp_path / "rank-00000.log").symlink_to(precious)
    with pytest.raises(OSError, match="symbolic links"):
        open_log(tmp_path / "rank-00000.log")
    assert precious.read_text() == "mine"


@pytest.mark.timeout(20)
def test_a_log_that_is_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "rank-00000.log")
    with pytest.raises(OSError, match="No such device or address|no regular file"):
        open_log(tmp_path / "rank-00000.log")


def test_an_export_replaces_a_link_or_refuses(hostile_run, hpcdist, tmp_path, precious):
    for target in (tmp_path / "out.pt", tmp_path / "out.safetensors"):
        target.symlink_to(tmp_path / "not there yet")
        code, _, error = hpcdist("ckpt", "export", hostile_run, target, "--object", "")
        assert code == 2
        assert "expected a new file" in error
        assert not (tmp_path / "not there yet").exists()


def test_pictures_replace_links(tmp_path, precious):
    from hpcdist.cli.charts import line_chart

    (tmp_path / "pace.png").symlink_to(precious)
    line_chart("pace", "title", ("step", "ms"), {"a": [(0.0, 1.0), (1.0, 2.0)]}).save(tmp_path)
    assert precious.read_text() == "mine"
    assert (tmp_path / "pace.png").read_bytes()[:4] == b"\x89PNG"


def test_a_marker_of_a_batch_job_is_not_written_through_a_link(tmp_path, precious):
    from run_folder import RunFolder

    folder = RunFolder({"RUN_DIR": str(tmp_path)}, "17")
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "17").symlink_to(precious)
    (tmp_path / "early-deaths").symlink_to(precious)
    with pytest.raises(OSError, match="symbolic links"):
        folder.make_marker()
    assert not folder.may_repeat("died")
    assert precious.read_text() == "mine"


#: FILE: calls that open a file for writing: it is new, or in a folder of the process's own.
OWN_FILES = {
    "hpcdist/training/event_file.py": "open(folder / name, 'xb')",
    "hpcdist/pytest_plugin/ranks.py": "open(os.devnull, 'w')",
    "hpcdist/notebook.py": ".write_bytes(",
    "hpcdist/public_names.py": ".write_text(",
}


def test_whatever_is_opened_for_writing_is_no_link():
    """A call that opens by name has an opener that follows none."""
    unsafe_calls = []
    for path in [*SOURCE.rglob("*.py"), *(SOURCE.parent / "slurm").glob("*.py")]:
        name = str(path.relative_to(SOURCE.parent))
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                text = ast.unparse(node)
            else:
                text = ""
            is_open = re.match(r"(io\.)?open\(.*'[wax]b?\+?'", text) and "opener=" not in text
            is_write = re.search(r"\.(write_text|write_bytes|savefig|touch)\([^()]*\)$", text)
            if (is_open or is_write) and OWN_FILES.get(name, "\0") not in text:
                unsafe_calls.append(f"{name}:{node.lineno}: {text}")
    assert [entry for entry in unsafe_calls if "savefig(target" not in entry] == []


# -- hpcdist.toml -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [0o664, 0o646, 0o666, 0o600, 0o644])
def test_defaults_that_others_can_write_are_refused(hpcdist, tmp_path, monkeypatch, mode):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    path = tmp_path / "hpcdist.toml"
    path.write_text('[submit]\nsetup = ["touch owned"]\n')
    path.chmod(mode)
    code, out, error = hpcdist("submit", "--dry-run", "--time", "1:00:00", "train.py", "--run-dir", "run")
    is_open = bool(mode & 0o022)
    assert (code == 78) == is_open, error
    assert ("touch owned" in out) != is_open
    if is_open:
        assert f"mode {mode:o}" in error


def test_defaults_of_another_user_are_refused(hpcdist, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    (tmp_path / "hpcdist.toml").write_text('[submit]\nsetup = ["touch owned"]\n')
    monkeypatch.setattr(os, "getuid", lambda: 4242)
    monkeypatch.setattr(os, "fstat", lambda descriptor, real=os.fstat: of_user_17(real(descriptor)))
    code, out, error = hpcdist("submit", "--dry-run", "--time", "1:00:00", "train.py", "--run-dir", "run")
    assert code == 78
    assert "got user 17 and mode" in error
    assert "touch owned" not in out


def of_user_17(status):
    fields = list(status)
    fields[4] = 17
    return os.stat_result(fields)


# -- tensors of others ------------------------------------------------------------------------------------------------


SHARED = torch.zeros(1000)
HOSTILE = {
    "expanded": lambda: {"a": torch.zeros(1).expand(1 << 34)},
    "overlapping": lambda: {"a": torch.zeros(1 << 10).as_strided((1 << 20, 512), (0, 1))},
    "shared": lambda: {f"a{number}": SHARED[:] for number in range(2000)},
    "fp8": lambda: {"a": torch.zeros(3, dtype=torch.float8_e4m3fn)},
    "complex32": lambda: {"a": torch.zeros(3, dtype=torch.complex32)},
    "sparse": lambda: {"a": torch.eye(3).to_sparse()},
    "meta": lambda: {"a": torch.zeros(3, device="meta")},
}


@pytest.mark.timeout(60)
@pytest.mark.filterwarnings("ignore:ComplexHalf", "ignore:Sparse")
@pytest.mark.parametrize("kind", HOSTILE)
def test_tensors_that_no_checkpoint_holds_are_refused_in_one_line(hpcdist, tmp_path, kind):
    torch.save(HOSTILE[kind](), tmp_path / "in.pt")
    code, _, error = hpcdist("ckpt", "import", tmp_path / "in.pt", tmp_path / "out.h5")
    assert code == 2, error
    assert error.startswith("hpcdist ckpt import: expected ")
    assert error.count("\n") == 1
    assert not (tmp_path / "out.h5").exists()


def test_tied_weights_are_imported(hpcdist, tmp_path):
    weight = torch.ones(100, 100)
    torch.save({"embedding": weight, "head": weight}, tmp_path / "in.pt")
    assert hpcdist("ckpt", "import", tmp_path / "in.pt", tmp_path / "out.h5")[0] == 0


@pytest.mark.timeout(60)
@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_a_pipe_is_not_waited_for(hpcdist, tmp_path, suffix):
    os.mkfifo(tmp_path / f"in{suffix}")
    code, _, error = hpcdist("ckpt", "import", tmp_path / f"in{suffix}", tmp_path / "out.h5")
    assert code == 2
    assert "a pipe, a device or a folder" in error


def test_an_archive_that_swells_is_refused(hpcdist, tmp_path):
    with zipfile.ZipFile(tmp_path / "in.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data/0", bytes(50 << 20))
    code, _, error = hpcdist("ckpt", "import", tmp_path / "in.pt", tmp_path / "out.h5")
    assert code == 2
    assert "as large as what is in it" in error


IMPORT_IN_LITTLE_MEMORY = """
import resource, sys
from hpcdist.cli import main
resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
main.main(["ckpt", "import", sys.argv[1], sys.argv[2]])
"""


def test_a_header_that_claims_much_is_refused(tmp_path):
    header = json.dumps({"a": {"dtype": "F32", "shape": [1 << 34], "data_offsets": [0, 1 << 36]}}).encode()
    (tmp_path / "in.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(64))
    command = [sys.executable, "-c", IMPORT_IN_LITTLE_MEMORY, tmp_path / "in.safetensors", tmp_path / "out.h5"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1

"""`hpcdist ckpt` on files that a manager has written."""

import functools
import json
import os
import stat
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import hpcdist


@pytest.fixture
def run_dir(tmp_path):
    """Return a run folder with checkpoints of steps 1, 2 and 3; the loss is best at step 2."""
    torch.manual_seed(1)
    model = torch.nn.Linear(3, 2)
    half = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    optimizer = torch.optim.Adam(model.parameters())
    checkpoint = hpcdist.Checkpoint(model=model, optimizer=optimizer, half=half, epoch=3)
    manager = hpcdist.CheckpointManager(checkpoint, tmp_path / "run" / "checkpoints", max_to_keep=None)
    for step, loss in ((1, 0.5), (2, 0.1), (3, 0.4)):
        optimizer.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        manager.save(step, {"loss": loss})
    manager.wait()  # until its thread has read the last one back
    return tmp_path / "run"


@pytest.fixture
def call(hpcdist):
    """Return call(*arguments): `hpcdist ckpt` with these."""
    return functools.partial(hpcdist, "ckpt")


def file_of(run_dir, step):
    return run_dir / "checkpoints" / f"step-{step:08d}-0001.h5"


def damage(path):
    content = bytearray(path.read_bytes())
    content[5000] ^= 1  # in the arrays
    path.write_bytes(content)


def test_ls(run_dir, call):
    code, out, _ = call("ls", run_dir)
    assert (code, out.count("\n")) == (0, 3)
    assert out.splitlines()[1].endswith("loss 0.1")
    rows = json.loads(call("ls", run_dir, "--json")[1])
    assert [(row["step"], row["attempt"], row["metrics"]["loss"]) for row in rows] == [
        (1, 1, 0.5),
        (2, 1, 0.1),
        (3, 1, 0.4),
    ]


def test_nothing_is_written(run_dir, call):
    def names_and_times():
        return {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")}

    before = names_and_times()
    for path in [run_dir, *run_dir.rglob("*/")]:
        path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    for arguments in (["ls"], ["show"], ["verify"], ["prune", "--keep", "1"]):
        assert call(*arguments, run_dir)[0] == 0
    assert names_and_times() == before


def test_show(run_dir, call):
    code, out, _ = call("show", run_dir)
    assert code == 0
    assert "step 3, saved" in out
    lines = [line.split() for line in out.splitlines()]
    assert ["float32", "2x3", "24", "B", "model/weight"] in lines
    assert ["bfloat16", "2", "4", "B", "half"] in lines
    description = json.loads(call("show", file_of(run_dir, 2), "--json")[1])
    assert (description["step"], description["arrays"][0]["name"]) == (2, "model/weight")


def test_verify_finds_a_bit(run_dir, call):
    assert call("verify", run_dir)[0] == 0
    damage(file_of(run_dir, 2))
    code, out, _ = call("verify", run_dir)
    assert code == 74
    assert [line.split()[0] for line in out.splitlines()] == ["sound", "damaged", "sound"]
    assert json.loads(call("verify", file_of(run_dir, 2), "--json")[1])[0]["is_sound"] is False


def test_diff(run_dir, call):
    code, out, _ = call("diff", file_of(run_dir, 3), run_dir)
    assert (code, out.split(":")[1].strip()) == (0, f"{2 + 6 + 1} arrays have the same bits, 0 differ")
    code, out, _ = call("diff", file_of(run_dir, 1), file_of(run_dir, 3))
    assert code == 1
    assert "model/weight: 6 of 6 elements, at most by 0.002" in out
    assert "half" not in out


def test_diff_counts_elements_whose_bits_differ(call, tmp_path):
    """-0.0 equals 0.0 and NaN does not equal itself, but a restart is exact by bits."""
    paths = [tmp_path / name for name in ("first.h5", "second.h5")]
    hpcdist.Checkpoint(values=np.array([0.0, 0.0, np.nan, 1.0])).write(paths[0])
    hpcdist.Checkpoint(values=np.array([-0.0, -0.0, np.nan, 1.5])).write(paths[1])
    code, out, _ = call("diff", *paths)
    assert code == 1
    assert "values: 3 of 4 elements, at most by 0.5, 1 NaN" in out


def test_diff_of_numbers_that_a_float_cannot_tell_apart(call, tmp_path):
    paths = [tmp_path / name for name in ("first.h5", "second.h5")]
    hpcdist.Checkpoint(n=np.array([2**53, 1]), x=np.array([0x7F800001], np.uint32).view(np.float32)).write(paths[0])
    hpcdist.Checkpoint(n=np.array([2**53 + 1, 1]), x=np.array([np.nan], np.float32)).write(paths[1])
    code, out, error = call("diff", *paths)
    assert (code, error) == (1, "")
    assert "n: 1 of 2 elements" in out
    assert "x: 1 of 1 elements, at most by 0, 1 NaN" in out


def test_diff_where_all_elements_became_nan(call, tmp_path):
    paths = [tmp_path / name for name in ("first.h5", "second.h5")]
    hpcdist.Checkpoint(values=np.zeros(3, np.float32)).write(paths[0])
    hpcdist.Checkpoint(values=np.full(3, np.nan, np.float32)).write(paths[1])
    code, out, error = call("diff", *paths)
    assert (code, error) == (1, "")
    assert "values: 3 of 3 elements, at most by 0, 3 NaN" in out


def test_diff_of_other_arrays(run_dir, call, tmp_path):
    other_checkpoint = hpcdist.Checkpoint(model=torch.nn.Linear(3, 4), more=np.ones(2))
    other_checkpoint.write(tmp_path / "other.h5")
    code, out, _ = call("diff", run_dir, tmp_path / "other.h5", "--json")
    differences = {row["name"]: row["difference"] for row in json.loads(out)["differences"]}
    assert code == 1
    assert differences["model/weight"] == "float32 2x3 and float32 4x3"
    assert (differences["half"], differences["more"]) == ("only in the first", "only in the second")


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_there_and_back(run_dir, call, tmp_path, suffix):
    """From a checkpoint to somebody else's file and back: the same bits, and a model that starts from them."""
    out = tmp_path / f"model{suffix}"
    imported_path = tmp_path / "again.h5"
    assert call("export", run_dir, out)[0] == 0
    if suffix == ".safetensors":
        exported_tensors = load_file(out)
    else:
        exported_tensors = torch.load(out, weights_only=True)
    assert set(exported_tensors) == {"weight", "bias"}
    assert call("import", out, imported_path)[0] == 0
    model = torch.nn.Linear(3, 2)
    assert hpcdist.load_checkpoint(imported_path, model=model) == 0
    assert all(torch.equal(value, exported_tensors[name]) for name, value in model.state_dict().items())
    assert call("verify", imported_path)[0] == 0


def test_all_objects_and_bfloat16(run_dir, call, tmp_path):
    assert call("export", run_dir, tmp_path / "all.safetensors", "--object", "")[0] == 0
    exported_tensors = load_file(tmp_path / "all.safetensors")
    assert torch.equal(exported_tensors["half"], torch.ones(2, dtype=torch.bfloat16))
    assert "optimizer/state/0/exp_avg" in exported_tensors


def test_a_state_dict_inside_a_file(call, tmp_path):
    torch.save({"epoch": 3, "state_dict": {"weight": torch.ones(1)}}, tmp_path / "theirs.pt")
    code, _, error = call("import", tmp_path / "theirs.pt", tmp_path / "x.h5")
    assert code == 2
    assert "got epoch, state_dict; name the entry that is one by --key" in error
    assert call("import", tmp_path / "theirs.pt", tmp_path / "x.h5", "--key", "state_dict")[0] == 0


def test_prune(run_dir, call):
    options = ("prune", run_dir, "--keep", "1", "--keep-best", "loss")
    assert call(*options)[1] == "would remove step-00000001-0001.h5\n"
    assert file_of(run_dir, 1).exists()
    assert call(*options, "--yes")[1] == "removed step-00000001-0001.h5\n"
    assert [file_of(run_dir, step).exists() for step in (1, 2, 3)] == [False, True, True]


def test_prune_keeps_what_the_newest_sound_one_needs(run_dir, call):
    """The newest is damaged: the one that a restart would take stays, whatever is to be kept."""
    damage(file_of(run_dir, 3))
    assert call("prune", run_dir, "--keep", "1", "--yes")[0] == 0
    assert [file_of(run_dir, step).exists() for step in (1, 2, 3)] == [False, True, True]


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["ls", "NOTHING"], 2, "expected a folder, got"),
        (["show", "NOTHING"], 74, "got No such file or directory; use another"),
        (["verify", "EMPTY"], 74, "expected checkpoints in"),
        (["diff", "RUN", "EMPTY"], 74, "expected checkpoints in"),
        (["export", "RUN", "x.bin"], 2, "expected a name that ends in .safetensors or .pt"),
        (["export", "RUN", "EMPTY/x.pt", "--object", "no"], 2, "expected an object with arrays in"),
        (["export", "RUN", "NOTHING/x.pt"], 74, "expected"),
        (["import", "RUN", "EMPTY/x.h5"], 2, "expected a regular file"),
        (["import", "/etc/passwd", "EMPTY/x.h5"], 2, "expected a file of safetensors, or of torch"),
        (["prune", "EMPTY", "--keep", "1"], 74, "expected checkpoints in"),
        (["prune", "RUN", "--keep", "0"], 2, "0 is not in the range"),
        (["ls"], 2, "Missing argument 'FOLDER'"),
    ],
)
def test_what_is_wrong_is_one_line(run_dir, call, tmp_path, arguments, code, text):
    (tmp_path / "empty").mkdir()
    places = {"NOTHING": tmp_path / "nothing", "EMPTY": tmp_path / "empty", "RUN": run_dir}
    command_line = [arguments[0]]
    for argument in arguments[1:]:
        first, _, subpath = argument.partition("/")
        command_line.append(places[first] / subpath if first in places and subpath else places.get(first, argument))
    exit_code, _, error = call(*command_line)
    assert (exit_code, error.count("\n")) == (code, 1), error
    assert text in error


def test_a_pickle_is_not_run(call, tmp_path):
    class Harmful:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "harm"),)

    torch.save({"weight": Harmful()}, tmp_path / "theirs.pt")
    assert call("import", tmp_path / "theirs.pt", tmp_path / "x.h5")[0] == 2
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["run", "--help"],
        ["status", "RUN"],
        ["report", "RUN"],
        ["ckpt", "ls", "RUN"],
        ["ckpt", "show", "RUN"],
    ],
)
def test_help_and_inspection_load_neither_mpi_nor_torch(run_dir, arguments):
    code = (
        "import sys\nfrom hpcdist.cli.main import main\ntry:\n main(sys.argv[1:])\nexcept SystemExit as end:\n"
        " assert end.code == 0, end.code\nfound = [name for name in ('mpi4py', 'torch') if name in sys.modules]\n"
        "assert not found, found\n"
    )
    command_line = []
    for argument in arguments:
        if argument == "RUN":
            command_line.append(str(run_dir))
        else:
            command_line.append(argument)
    done = subprocess.run([sys.executable, "-c", code, *command_line], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_more_of_a_name_is_not_the_object(run_dir, call, tmp_path):
    """`model` is not the prefix of `model2`."""
    save_file({"a": torch.ones(1)}, tmp_path / "a.safetensors")
    assert call("import", tmp_path / "a.safetensors", tmp_path / "a.h5", "--object", "model2")[0] == 0
    assert call("export", tmp_path / "a.h5", tmp_path / "b.safetensors")[0] == 2


def test_prune_counts_sound_ones_only(run_dir, call):
    """The damaged one is none of the two that are to stay."""
    damage(file_of(run_dir, 3))
    assert call("prune", run_dir, "--keep", "2", "--yes")[:2] == (0, "")
    assert file_of(run_dir, 1).exists()


def test_a_key_that_is_not_there(call, tmp_path):
    torch.save({"weight": torch.ones(1)}, tmp_path / "theirs.pt")
    code, _, error = call("import", tmp_path / "theirs.pt", tmp_path / "x.h5", "--key", "nope")
    assert (code, error.count("\n")) == (2, 1)


def test_without_safetensors_pt_still_works(run_dir, call, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    assert call("export", run_dir, tmp_path / "x.pt")[0] == 0
    code, _, error = call("export", run_dir, tmp_path / "x.safetensors")
    assert code == 2
    assert "pip install 'hpcdist[safetensors]', or use .pt" in error

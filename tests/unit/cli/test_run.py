"""`hpcdist run`: what it knows of the end of a launch, and wrong command lines. Real jobs: test_command.py."""

import json
import re
import shlex

import pytest

from hpcdist.cli import main
from hpcdist.cli.run import Decision, RunFolder, launch_of, read_decision
from hpcdist.restart_rule import Launch


def test_the_end_of_a_launch():
    stop = Decision("stop", "ranks differ", (2, 2))
    earlier = Decision("requeue", "SIGTERM on rank 3", (1, 1))
    assert launch_of(0, "mpirun", stop, earlier) == Launch(0, "stop", "ranks differ")
    assert launch_of(-9, "srun", None, earlier) == Launch(137, earlier="requeue", is_signalled=True)
    assert launch_of(7, "/opt/bin/mpirun", None, None) == Launch(7, is_signalled=True)
    assert launch_of(7, "/usr/bin/srun", None, None) == Launch(7)


@pytest.mark.parametrize("text", [None, "", "[]", "{", '{"decision": "finished"}', "\x00"])
def test_a_decision_that_says_nothing_is_none(tmp_path, text):
    if text is not None:
        (tmp_path / "decision.json").write_text(text)
    assert read_decision(tmp_path) is None


def test_a_decision_that_is_written_again_is_another_one(tmp_path):
    decision_text = json.dumps({"decision": "finished", "reason": "the program has finished"})
    (tmp_path / "decision.json").write_text(decision_text)
    first = read_decision(tmp_path)
    (tmp_path / "decision.json").unlink()
    (tmp_path / "other").write_text("")  # which takes the inode
    (tmp_path / "decision.json").write_text(decision_text)
    assert first.verdict == "finished"
    assert read_decision(tmp_path) != first


def test_the_run_folder_of_the_command_line_counts_where_it_has_a_decision(tmp_path):
    """An option of that name may mean another folder than the one that the program uses."""
    by_line, noted = tmp_path / "by-line", tmp_path / "noted"
    for folder, verdict in ((by_line, "stop"), (noted, "finished")):
        folder.mkdir()
        (folder / "decision.json").write_text(json.dumps({"decision": verdict, "reason": "x"}))
    note = tmp_path / "note"
    assert RunFolder(note, None).decision() is None
    note.write_text(str(noted))
    assert RunFolder(note, None).decision().verdict == "finished"
    assert RunFolder(note, by_line).decision().verdict == "stop"
    (by_line / "decision.json").unlink()
    assert RunFolder(note, by_line).decision().verdict == "finished"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["run"], "hpcdist run: Missing argument 'PROGRAM...'. See hpcdist run --help."),
        (["run", "nothing.py"], "hpcdist: expected a program, got 'nothing.py', which is not there"),
        (["run", "nothing"], "hpcdist: expected a program that ends in .py, or one that can be run, got 'nothing'"),
        (["run", "-n", "0", "true"], "0 is not in the range x>=1"),
        (["run", "--rank", "2", "true"], "No such option '--rank'"),
        (["run", "--hosts", "a:x", "true"], "expected --hosts as n1:4,n2:4, got 'a:x'"),
        (["run", "-n", "2", "--hosts", "a:x", "true"], "expected --hosts as n1:4,n2:4, got 'a:x'"),
        (["walk"], "No such command 'walk'"),
    ],
)
def test_wrong_command_lines_are_one_line_and_code_2(capfd, arguments, text):
    with pytest.raises(SystemExit) as ended:
        main.main(arguments)
    assert ended.value.code == 2
    error = capfd.readouterr().err
    assert text in error
    assert error.count("\n") == 1


def test_ranks_of_a_launcher_start_no_ranks(capfd, monkeypatch):
    monkeypatch.setenv("PMI_RANK", "1")
    monkeypatch.setenv("PMI_SIZE", "2")
    with pytest.raises(SystemExit) as ended:
        main.main(["run", "true"])
    assert ended.value.code == 2
    assert "expected to start the ranks, got rank 1 of 2 that an MPICH-like mpirun" in capfd.readouterr().err


def added(hpcdist, *options):
    """Return the variables that `hpcdist run` adds, as its dry run prints them."""
    code, out, error = hpcdist("run", "-n", "2", *options, "--dry-run", "true")
    assert code == 0, error
    return dict(word.split("=", 1) for word in shlex.split(out) if re.match(r"(HPCDIST_\w+|TF_CONFIG)=", word))


def test_settings_of_a_file_are_variables(hpcdist, tmp_path, monkeypatch):
    """The command line comes first, then variables, then the file; TF_CONFIG gives way to --roles alone."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hpcdist.toml").write_text('[run]\nroles = "ps:1,worker:*"\ntimeout_s = 90\ntrace = "all"\n')
    monkeypatch.setenv("TF_CONFIG", '{"cluster": {"worker": ["a:1", "b:1"]}}')
    monkeypatch.setenv("HPCDIST_TRACE", "off")
    of_file = {"HPCDIST_ROLES": "ps:1,worker:*", "HPCDIST_TIMEOUT_S": "90"}
    assert added(hpcdist) == {**of_file, "HPCDIST_FROM_FILE": "HPCDIST_ROLES,HPCDIST_TIMEOUT_S"}
    assert added(hpcdist, "--roles", "worker:*") == {
        **{"HPCDIST_ROLES": "worker:*", "TF_CONFIG": "", "HPCDIST_TIMEOUT_S": "90"},
        "HPCDIST_FROM_FILE": "HPCDIST_TIMEOUT_S",
    }


@pytest.mark.parametrize(
    "text",
    [
        *(
            "[run]\ntimeout_s = 'x'",
            "[run]\ntimeout_s = true",
            "[run]\ntimeout_s = nan",
            "[run]\ntimeout_s = 0",
            "[run]\nlog = 'xml'",
        ),
        *("run = 3", "[runs]"),
    ],
)
def test_files_that_are_refused(hpcdist, tmp_path, monkeypatch, text):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hpcdist.toml").write_text(text)
    code, _, error = hpcdist("run", "-n", "2", "--dry-run", "true")
    assert (code, error.count("\n")) == (78, 1)
    assert "under [run] in hpcdist.toml" in error or "expected TOML in hpcdist.toml" in error


CHECKPOINTS = ("ls", "show", "verify", "diff", "export", "import", "prune")


@pytest.mark.parametrize(
    "name",
    [*(command for command in main.COMMANDS if command != "ckpt"), *(f"ckpt {command}" for command in CHECKPOINTS)],
)
def test_each_command_has_an_example(hpcdist, name):
    code, out, _ = hpcdist(*name.split(), "--help")
    assert code == 0
    assert re.search(rf"^  hpcdist {name}\b", out, re.MULTILINE), out

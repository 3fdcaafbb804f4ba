"""README's first screen: its program as a batch job that is preempted, resumes and finishes, as the page shows it."""

import os
import re
import sys

import pytest

PAGE_LINES = re.compile(r"^```console\n\$ hpcdist submit.*?^```$", re.MULTILINE | re.DOTALL)


def program_of(page):
    """Return README's first program, with epochs enough to be preempted in."""
    program = re.search(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[1]
    assert "epochs=5" in program
    return program.replace("epochs=5", "epochs=40")


@pytest.mark.timeout(400)
def test_the_first_screen(slurm, root, tmp_path):
    page = (root / "README.md").read_text()
    shown = PAGE_LINES.search(page)[0]
    command = re.search(r"^\$ (hpcdist submit .*?[^\\])$", shown.replace("\\\n> ", " "), re.MULTILINE)[1]
    (tmp_path / "train.py").write_text(program_of(page))
    programs = os.path.dirname(sys.executable)
    environ = {"PATH": f"{programs}:{slurm.environ['PATH']}", "OMP_NUM_THREADS": "1", "PYTHON": sys.executable}
    submitted = slurm.client("bash", "-c", f"cd {tmp_path} && {command} 2>&1", environ=environ)
    job = re.search(r"submitted job (\d+)", submitted)[1]
    try:
        slurm.wait_for("its end", lambda: slurm.fact(job, "JobState") in ("COMPLETED", "FAILED"), 300)
    finally:
        slurm.client("scancel", "--name=runs-train")
    log = next(tmp_path.glob("runs-train-*.log")).read_text()
    for fact in ("runs/train/checkpoints", "to be requeued", "resuming at step", "epoch 40/40"):
        assert fact in log, log
    status = slurm.client("bash", "-c", f"cd {tmp_path} && hpcdist status runs/train", environ=environ)
    assert "finished: the program has finished" in status

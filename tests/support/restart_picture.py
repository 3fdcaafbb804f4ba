"""Draws docs/preempted.svg, the picture of README, from three real jobs of two ranks: half a minute.

    python tests/support/restart_picture.py

One job runs unbroken. Another one is preempted by SIGTERM and started again. Nothing is drawn unless the losses of its
two attempts are those of the unbroken run, bit for bit.
"""

import json
import subprocess
import sys
import tempfile
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PICTURE = ROOT / "docs" / "preempted.svg"
#: Step at which one rank gets SIGTERM; all ranks stop after a step soon after.
SIGNALLED_AT = 110
#: Exit code of a job that is to run again.
RUN_AGAIN = 75
JOB = """
import os
import signal
import sys

import torch
from torch import nn

import hpcdist

folder = sys.argv[1]
preempted_at = int(sys.argv[2])
hpcdist.set_random_seed(1)
inputs = torch.randn(2048, 64)
labels = inputs[:, :10].argmax(1)
strategy = hpcdist.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
dataset = hpcdist.Dataset.from_tensor_slices((inputs, labels)).shuffle(seed=1).batch(64)
batches = strategy.experimental_distribute_dataset(dataset)
metrics = hpcdist.MetricsFile(folder + "/metrics.jsonl")
objects = {"model": model, "optimizer": optimizer, "data": batches, "strategy": strategy, "metrics": metrics}
checkpoint = hpcdist.Checkpoint(**objects)
handler = hpcdist.PreemptionCheckpointHandler(None, checkpoint, folder + "/checkpoints")
with handler:
    for epoch in range(batches.epoch, 7):
        for x, y in batches:
            optimizer.zero_grad()
            losses = nn.functional.cross_entropy(model(x), y, reduction="none")
            hpcdist.compute_average_loss(losses, global_batch_size=64).backward()
            optimizer.step()
            total = strategy.reduce("sum", losses.detach().double().sum(), axis=None)
            metrics.write(handler.step, loss=float(total) / 64)
            if handler.step == preempted_at and not strategy.is_chief:
                os.kill(os.getpid(), signal.SIGTERM)
"""
WIDTH = 860
HEIGHT = 300
LEFT = 56
RIGHT = 20
TOP = 40
BOTTOM = 44
STYLE = """
svg { font: 13px system-ui, sans-serif; fill: #24292f; }
.axis { stroke: #8c959f; fill: none; }
.grid { stroke: #d8dee4; }
.tick { fill: #57606a; font-size: 12px; }
polyline { fill: none; stroke-linejoin: round; }
.unbroken { stroke: #afb8c1; stroke-width: 6; }
.first { stroke: #0969da; stroke-width: 1.8; }
.second { stroke: #cf5b00; stroke-width: 1.8; }
.stop { stroke: #57606a; stroke-dasharray: 4 4; }
@media (prefers-color-scheme: dark) {
svg { fill: #e6edf3; }
.axis { stroke: #7d8590; }
.grid { stroke: #30363d; }
.tick { fill: #9aa4af; }
.unbroken { stroke: #57606a; }
.first { stroke: #58a6ff; }
.second { stroke: #ff9a4d; }
.stop { stroke: #9aa4af; }
}
"""
Point = tuple[int, float]


def run(job: Path, folder: Path, preempted_at: int) -> int:
    """Run the job on two ranks; return its exit code. A stop at step 0 never comes."""
    mpirun = Path(sys.executable).with_name("mpirun")
    command = [str(mpirun), "-n", "2", sys.executable, str(job), str(folder), str(preempted_at)]
    return subprocess.run(command, cwd=ROOT, timeout=120, check=False).returncode


def losses_in(folder: Path) -> list[Point]:
    """Return the step and the loss of each record of a run."""
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [(record["step"], record["loss"]) for record in records]


def run_jobs(folder: Path) -> tuple[list[Point], list[Point], int]:
    """Run the jobs; raise SystemExit if their losses differ.

    Returns:
        The losses of the unbroken run, those of the preempted one, and the step after which it was preempted.
    """
    job = folder / "job.py"
    job.write_text(JOB)
    codes = [run(job, folder / "unbroken", 0), run(job, folder / "preempted", SIGNALLED_AT)]
    decision = json.loads((folder / "preempted" / "decision.json").read_text())
    codes.append(run(job, folder / "preempted", 0))
    if codes != [0, RUN_AGAIN, 0]:
        raise SystemExit(f"restart_picture: expected the exit codes [0, {RUN_AGAIN}, 0], got {codes}")
    unbroken = losses_in(folder / "unbroken")
    preempted = losses_in(folder / "preempted")
    if unbroken != preempted:
        raise SystemExit("restart_picture: expected equal losses, got others after the restart")
    return unbroken, preempted, decision["step"]


def picture_of(unbroken: list[Point], preempted: list[Point], stopped_at: int) -> str:
    """Return the SVG: the unbroken run as a wide line, the two attempts on top of it."""
    last_step = unbroken[-1][0]
    highest = max(loss for _, loss in unbroken)
    plot_width = WIDTH - LEFT - RIGHT
    plot_height = HEIGHT - TOP - BOTTOM

    def x_of(step: float) -> float:
        return round(LEFT + plot_width * step / last_step, 1)

    def y_of(loss: float) -> float:
        return round(TOP + plot_height * (1 - loss / highest), 1)

    def line(kind: str, points: list[Point]) -> str:
        places = " ".join(f"{x_of(step)},{y_of(loss)}" for step, loss in points)
        return f'<polyline class="{kind}" points="{places}"/>'

    elements = []
    for loss in (0, 1, 2):
        elements.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y_of(loss)}" y2="{y_of(loss)}"/>')
        elements.append(f'<text class="tick" x="{LEFT - 10}" y="{y_of(loss) + 4}" text-anchor="end">{loss}</text>')
    for step in range(0, last_step + 1, 50):
        elements.append(f'<text class="tick" x="{x_of(step)}" y="{HEIGHT - 24}" text-anchor="middle">{step}</text>')
    first_attempt = [point for point in preempted if point[0] <= stopped_at]
    second_attempt = [point for point in preempted if point[0] >= stopped_at]
    elements += [line("unbroken", unbroken), line("first", first_attempt), line("second", second_attempt)]
    stop_x = x_of(stopped_at)
    elements.append(f'<line class="stop" x1="{stop_x}" x2="{stop_x}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
    elements.append(f'<text class="tick" x="{stop_x + 6}" y="{TOP + 12}">preempted after step {stopped_at}</text>')
    elements += legend()
    elements.append(f'<text class="tick" x="{WIDTH - RIGHT}" y="{HEIGHT - 6}" text-anchor="end">step</text>')
    elements.append(f'<text class="tick" x="{LEFT - 10}" y="{TOP - 12}" text-anchor="end">loss</text>')
    title = "Loss against step: the two attempts of a preempted job lie on the line of the unbroken run"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">'
    return "\n".join([head, f"<title>{escape(title)}</title>", f"<style>{STYLE}</style>", *elements, "</svg>", ""])


def legend() -> list[str]:
    """Return the SVG elements that name the lines, from left to right."""
    elements = []
    x = LEFT + 150
    for kind, text in (("unbroken", "unbroken run"), ("first", "first attempt"), ("second", "second attempt")):
        elements.append(f'<polyline class="{kind}" points="{x},20 {x + 28},20"/>')
        elements.append(f'<text x="{x + 36}" y="24">{text}</text>')
        x += 190
    return elements


def main() -> None:
    """Run the jobs and write the picture."""
    with tempfile.TemporaryDirectory() as folder:
        unbroken, preempted, stopped_at = run_jobs(Path(folder))
    PICTURE.write_text(picture_of(unbroken, preempted, stopped_at))
    print(f"{PICTURE}: {len(unbroken)} steps, equal bit for bit")


if __name__ == "__main__":
    main()

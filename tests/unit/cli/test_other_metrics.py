"""Metrics of tables and event files in a run folder, for the report."""

import pytest

from hpcdist.cli.other_metrics import read_curves
from hpcdist.training.event_file import EventFile, Scalar


def test_tables_of_csv_logger(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "log.csv").write_text("epoch,loss,val_loss\n0,2.5,NA\n1,1.5,1.75\n2,nan,1.5\n")
    (tmp_path / "logs" / "other.csv").write_text("epoch;mae\n0;0.5\n")
    (tmp_path / "rows.csv").write_text("name,loss\na,1\n")
    (tmp_path / "empty.csv").write_text("")
    curves = {(curve.origin, curve.name): (curve.against, curve.points) for curve in read_curves(tmp_path)}
    assert curves == {
        ("log.csv", "loss"): ("epoch", [(0, 2.5), (1, 1.5)]),
        ("log.csv", "val_loss"): ("epoch", [(1, 1.75), (2, 1.5)]),
        ("logs/other.csv", "mae"): ("epoch", [(0, 0.5)]),
    }


def test_events_for_tensorboard(tmp_path):
    events = EventFile(tmp_path / "events" / "train", None)
    for step in range(3):
        events.write(Scalar("epoch_loss", 1.0 / (1 + step), step, 0.0))
    events.close()
    later = EventFile(tmp_path / "events" / "train", 2)  # a run that goes on repeats step 2
    later.write(Scalar("epoch_loss", 0.25, 2, 0.0))
    later.close()
    (curve,) = read_curves(tmp_path)
    assert (curve.name, curve.origin, curve.against) == ("epoch_loss", "events/train", "step")
    assert curve.points == [(0, 1.0), (1, 0.5), (2, 0.25)]


@pytest.mark.parametrize(
    ("content", "n_curves"), [(b"", 0), (b"\x00" * 40, 0), (b"epoch,\xff\n0,1\n", 1), (b'epoch,a\n0,"1\n', 1)]
)
def test_broken_files_are_left_out_or_read_as_far_as_they_go(tmp_path, content, n_curves):
    (tmp_path / "events.out.tfevents.1").write_bytes(content)
    (tmp_path / "log.csv").write_bytes(content)
    curves = read_curves(tmp_path)
    assert len(curves) == n_curves
    assert all(curve.points == [(0, 1.0)] for curve in curves)

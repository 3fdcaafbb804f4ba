"""Records of steps: what each window sums up, which steps are recorded by themselves, and a disk that fails."""

import errno
import json
import os
import threading

import pytest

from hpcdist.checkpoint.durable import Disk
from hpcdist.run import trace_file
from hpcdist.run.step_times import StepTimes, is_recorded, pace_of, trace_folder
from hpcdist.run.trace_file import TraceFile
from hpcdist.runtime.time_spent import TimeSpent

HEADER = {"attempt": 1, "rank": 0}


class Kept:
    """A file of records that keeps them."""

    def __init__(self):
        self.records = []
        self.n_flushed = 0

    def add(self, record):
        self.records.append(json.loads(json.dumps(record)))

    def flush(self, for_s):
        self.n_flushed += 1


class Program:
    """A program with a clock of its own, whose steps take what a test says."""

    def __init__(self, records_all=False, step=0):
        self.now = 50.0
        self.spent = TimeSpent()
        self.file = Kept()
        self.times = StepTimes(self.file, HEADER, step, records_all, self.spent, lambda: self.now)
        self.step = step

    def wait(self, kind, seconds):
        before_s = self.spent.begin()
        self.now += seconds
        self.spent.end(kind, kind, self.now - seconds, self.now, before_s)

    def make_step(self, compute_s, input_s=0.0, communication_s=0.0, save_s=0.0, rows=0):
        self.wait("input", input_s)
        self.spent.rows += rows
        self.now += compute_s
        self.wait("communication", communication_s)
        self.step += 1
        self.times.arrive(self.step)
        self.wait("save", save_s)
        return self.times.leave()

    def windows(self):
        return [record for record in self.file.records if "window" in record]


def test_a_window_sums_up_its_steps():
    program = Program()
    for number in range(8):
        program.make_step(compute_s=0.05 + 0.1 * (number == 5), input_s=0.01, communication_s=0.02, rows=64)
    program.make_step(compute_s=0.1, save_s=1.0)
    (window,) = program.windows()
    assert window["steps"] == [1, 9]
    assert window["n_steps"] == 9
    assert window["longest"] == [6, pytest.approx(0.18)]
    assert window["rows"] == 8 * 64
    expected = {"step_s": 0.84, "input_s": 0.08, "communication_s": 0.16, "save_s": 1.0, "between_s": 0.0}
    assert {key: window[key] for key in expected} == pytest.approx(expected)
    assert window["window"] == pytest.approx([50.0, 51.84])


def test_polls_without_a_step_are_time_between_steps():
    """As in an evaluation: its input and its sums are no part of a step."""
    program = Program()
    program.make_step(compute_s=0.5)
    for _ in range(3):
        program.wait("input", 0.1)
        program.wait("communication", 0.1)
        program.times.arrive(program.step)
        program.times.leave()
    program.make_step(compute_s=0.5)
    program.times.end()
    total = {}
    for key in ("n_steps", "step_s", "input_s", "between_s"):
        total[key] = sum(window[key] for window in program.windows())
    assert total == pytest.approx({"n_steps": 2, "step_s": 1.0, "input_s": 0.0, "between_s": 0.6})


def test_a_save_within_a_step_is_no_part_of_it():
    program = Program()
    program.wait("save", 2.0)  # as fit does at the end of an epoch
    program.make_step(compute_s=0.5)
    (window,) = program.windows()
    assert (window["step_s"], window["save_s"]) == pytest.approx((0.5, 2.0))


def test_a_poll_every_few_steps():
    """As in rounds of local steps, or where two optimizers step for each batch."""
    program = Program()
    for _ in range(2000):
        program.now += 0.4
        program.step += 4
        program.times.arrive(program.step)
        program.times.leave()
    program.times.end()
    windows = program.windows()
    assert sum(window["n_steps"] for window in windows) == 8000
    assert windows[0]["steps"][0] == 1
    assert windows[-1]["steps"][1] == 8000
    assert sum(window["step_s"] for window in windows) == pytest.approx(800.0)
    assert max(window["longest"][1] for window in windows) == pytest.approx(0.1)
    assert sum("spans" in record for record in program.file.records) == sum(map(is_recorded, range(2000)))


def test_all_time_is_in_some_part():
    """Agreements and copies between a step and the next, too."""
    program = Program()
    for _ in range(10):
        program.now += 0.5
        program.step += 1
        program.times.arrive(program.step)
        program.now += 0.25  # an agreement
        program.wait("save", 0.125)
        program.times.leave()
    program.times.end()
    total = {}
    for key in ("step_s", "save_s", "between_s"):
        total[key] = sum(window[key] for window in program.windows())
    assert total == pytest.approx({"step_s": 5.0, "save_s": 1.25, "between_s": 2.5})
    assert sum(total.values()) == pytest.approx(program.now - 50.0)


def test_a_stop_in_the_middle_of_a_poll():
    """The program exits between `arrive` and `leave`: the step counts once."""
    program = Program()
    program.now += 60.0
    program.step = 1
    program.times.arrive(1)
    program.wait("save", 2.0)
    program.times.end()
    (window,) = program.windows()
    assert (window["step_s"], window["save_s"], window["between_s"]) == pytest.approx((60.0, 2.0, 0.0))


def test_windows_get_longer():
    """A thousandth of the attempt: a file of two weeks has as many windows as one of some hours."""
    program = Program()
    for _ in range(20_000):
        program.make_step(compute_s=60.0)
    lengths = [window["window"][1] - window["window"][0] for window in program.windows()]
    assert lengths[0] == 60.0
    assert lengths[-1] == pytest.approx(1140.0, rel=0.1)
    assert len(lengths) < 5000


def test_which_steps_are_recorded():
    recorded = [step for step in range(1 << 14) if is_recorded(step)]
    assert recorded[:32] == list(range(32))
    assert recorded[32:40] == [32, 33, 34, 35, 36, 37, 38, 39]
    assert [step for step in recorded if 1024 <= step < 1024 + 160] == [1024, 1025, 1088, 1089, 1152, 1153]
    assert sum(map(is_recorded, range(1 << 13, 1 << 14))) == 32


@pytest.mark.feature("observability.timeline")
def test_a_recorded_step_has_what_it_waited_for():
    program = Program(step=100)
    program.make_step(compute_s=0.1, input_s=0.2, communication_s=0.3)
    _, record, *_ = program.file.records
    assert record["step"] == 101
    assert record["time"] == pytest.approx([50.0, 50.6])
    assert [span[:2] for span in record["spans"]] == [["input", "input"], ["communication", "communication"]]


def test_all_steps_are_recorded_if_asked_for():
    program = Program(records_all=True)
    for _ in range(300):
        program.make_step(compute_s=0.001)
    assert sum("spans" in record for record in program.file.records) == 300
    assert sum(map(is_recorded, range(300))) < 150


def test_the_end_is_recorded_once():
    program = Program()
    program.make_step(compute_s=0.1)
    program.times.end()
    program.times.end()
    assert len(program.windows()) == 1
    assert program.file.n_flushed == 1


@pytest.mark.feature("complaints.slowest-host-named")
def test_the_log_has_a_line_a_minute():
    program = Program()
    texts = [program.make_step(compute_s=0.5, input_s=0.5, rows=10) for _ in range(200)]
    log_lines = [text for text in texts if text]
    assert len(log_lines) == 3
    assert log_lines[0].startswith("1e+03 ms a step; of the time: input 50 %, communication 0 %, save 0 %, between 0 %")
    assert log_lines[0].endswith("; 10 rows/s")


def test_a_pace_without_steps():
    window = {"window": [0.0, 4.0], "n_steps": 0, "step_s": 0.0, "rows": 0, "input_s": 0.0, "communication_s": 0.0}
    text = pace_of([{**window, "save_s": 0.0, "between_s": 4.0}])
    assert text == "no step; of the time: input 0 %, communication 0 %, save 0 %, between 100 %"


# -- the file ----------------------------------------------------------------------------------------------------------


def path_in(tmp_path):
    return trace_folder(tmp_path, 2) / "rank-00000.jsonl"


def test_a_file_of_records(tmp_path):
    file = TraceFile(path_in(tmp_path), every_s=0.0)
    for number in range(100):
        file.add({"number": number})
    file.flush(10)
    assert [json.loads(line)["number"] for line in path_in(tmp_path).read_text().splitlines()] == list(range(100))


def test_a_second_handler_of_an_attempt_appends(tmp_path):
    for number in range(2):
        file = TraceFile(path_in(tmp_path), every_s=0.0)
        file.add({"number": number})
        file.flush(10)
    assert path_in(tmp_path).read_text() == '{"number":0}\n{"number":1}\n'


def test_writes_are_rare(tmp_path):
    """A thousand ranks share a file server."""
    now = [0.0]
    writes = []

    class Counting(Disk):
        def write(self, descriptor, data, offset):
            writes.append(len(data))
            return super().write(descriptor, data, offset)

    file = TraceFile(path_in(tmp_path), 50.0, disk=Counting(), clock=lambda: now[0])
    for _ in range(500):
        now[0] += 1.0
        file.add({"a": 1})
        file._log.wait(10)
    assert len(writes) == 10


def test_ranks_begin_to_write_one_after_the_other(tmp_path):
    now = [0.0]
    file = TraceFile(path_in(tmp_path), 50.0, 3.0, clock=lambda: now[0])
    for _ in range(3):
        file.add({"a": 1})
        now[0] += 1.0
    file._log.wait(10)
    assert not path_in(tmp_path).exists()
    file.add({"a": 1})
    file._log.wait(10)
    assert path_in(tmp_path).read_text().count("\n") == 4


def test_a_disk_that_fails_ends_the_recording_and_nothing_else(tmp_path, caplog):
    class Full(Disk):
        def write(self, descriptor, data, offset):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    file = TraceFile(path_in(tmp_path), 0.0, disk=Full())
    for _ in range(3):
        file.add({"a": 1})
        file.flush(10)
    assert caplog.messages == [
        f"trace: expected to write {path_in(tmp_path)}, got No space left on device; training continues, and no more "
        "steps are recorded in this file."
    ]


def test_a_rank_that_does_not_see_the_run_folder_makes_none(tmp_path, caplog):
    file = TraceFile(path_in(tmp_path / "elsewhere"), 0.0)
    file.add({"a": 1})
    file.flush(10)
    assert caplog.text == "", "it is no failure: only the chief needs the folder"
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fails_for_a_moment(tmp_path):
    class Failing(Disk):
        n_failures = 2

        def write(self, descriptor, data, offset):
            if self.n_failures and len(data) > 3:
                self.n_failures -= 1
                super().write(descriptor, data[:3], offset)
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return super().write(descriptor, data, offset)

    file = TraceFile(path_in(tmp_path), 0.0, disk=Failing())
    file.add({"number": 1})
    file.flush(10)
    assert path_in(tmp_path).read_text() == '{"number":1}\n'


def test_a_disk_that_hangs_is_not_waited_for(tmp_path, caplog, monkeypatch):
    is_over = threading.Event()

    class Hanging(Disk):
        def make_folder(self, path, mode=0o777):
            is_over.wait(30)
            super().make_folder(path, mode)

    monkeypatch.setattr(trace_file, "MAX_WAITING", 10)
    file = TraceFile(path_in(tmp_path), 0.0, disk=Hanging())
    for number in range(21):
        file.add({"number": number})
    file.flush(0.1)
    assert not path_in(tmp_path).exists()
    assert "did not take are lost" in caplog.text
    is_over.set()
    for number in range(21, 121):  # it writes again, without being asked to
        file._log.wait(10)
        file.add({"number": number})
    file.flush(10)
    numbers = [json.loads(line)["number"] for line in path_in(tmp_path).read_text().splitlines()]
    assert numbers[-100:] == [*range(21, 121)]
    assert len(numbers) >= 105, "half of those that waited, and the later ones"


def test_many_records_between_two_writes(tmp_path, monkeypatch, caplog):
    """Writes are rare on many ranks, and each step is recorded: it writes when there are too many to keep."""
    monkeypatch.setattr(trace_file, "MAX_WAITING", 10)
    file = TraceFile(path_in(tmp_path), 1000.0, 1000.0, clock=lambda: 0.0)
    for _ in range(100):
        file.add({"a": 1})
        file._log.wait(10)
    file.flush(10)
    assert path_in(tmp_path).read_text().count("\n") == 100
    assert caplog.text == ""

"""What follows from the records of a run: goodput, stragglers, times of steps, one clock. Made-up records."""

import json

import pytest

from hpcdist.cli.run_facts import StepClock, goodput_of, stragglers_of
from hpcdist.cli.run_records import AttemptRecords, Commit, RankRecords, Run, StepRecord, Window, read_run
from hpcdist.cli.trace import events_of, offsets_of
from hpcdist.errors import UsageError


def window(began, ended, steps, **seconds):
    """Return a window in which what is not said went into computing."""
    parts = {"compute": 0.0, "input": 0.0, "communication": 0.0, "save": 0.0, "between": 0.0, **seconds}
    n_steps = 0 if steps is None else steps[1] - steps[0] + 1
    return Window(began, ended, steps, n_steps, 0, (0, 0.0), parts)


def rank(number, windows=(), host="n1", steps=(), clock=(0.0, 0.0), process_began=0.0, role="worker", first=0):
    return RankRecords(number, f"{role}:{number}", host, process_began, clock, first, tuple(windows), tuple(steps))


def attempt(number, *ranks, **more):
    return AttemptRecords(number, ranks=ranks, **more)


def run_of(*attempts):
    return Run("run", attempts, {})


# -- goodput -----------------------------------------------------------------------------------------------------------


@pytest.mark.feature("observability.goodput")
def test_an_unbroken_run():
    windows = [window(10, 20, (1, 10), compute=8, save=1, between=1), window(20, 30, (11, 20), compute=10)]
    goodput = goodput_of(run_of(attempt(1, rank(0, windows))))
    assert goodput.elapsed_s == 30.0
    assert goodput.share == pytest.approx(18 / 30)
    assert {name: s for name, s in goodput.parts.items() if s} == {
        **{"kept steps": 18.0, "saves": 1.0, "between steps": 1.0, "start-up": 10.0}
    }


@pytest.mark.feature("observability.goodput")
def test_steps_that_were_made_again_are_lost():
    """The second attempt resumes from step 15 of 20, ten seconds after the first one's last record."""
    first = attempt(1, rank(0, [window(0, 20, (1, 20), compute=20)]))
    second_records = rank(0, [window(32, 52, (16, 35), compute=20)], process_began=30.0)
    goodput = goodput_of(run_of(first, attempt(2, second_records, resumed_step=15)))
    assert (goodput.n_lost, goodput.elapsed_s) == (5, 52.0)
    assert goodput.parts["kept steps"] == pytest.approx(35.0)
    assert goodput.parts["lost steps"] == pytest.approx(5.0)
    assert goodput.parts["waiting for the next attempt"] == pytest.approx(10.0)
    assert goodput.parts["start-up"] == pytest.approx(2.0)
    assert sum(goodput.parts.values()) == pytest.approx(goodput.elapsed_s)


def test_an_attempt_that_died_in_its_start_loses_nothing():
    """Nor does one that starts now: it has no record, and its ledger says only when it began."""
    first = attempt(1, rank(0, [window(0, 20, (1, 20), compute=20)]))
    died = attempt(2, times=(25.0,))
    third = attempt(3, rank(0, [window(40, 60, (21, 40), compute=20)], process_began=38.0), resumed_step=20)
    assert goodput_of(run_of(first, died)).n_lost == 0
    goodput = goodput_of(run_of(first, died, third))
    assert (goodput.n_lost, goodput.parts["kept steps"]) == (0, 40.0)


def test_an_earlier_checkpoint_that_a_later_attempt_went_back_to():
    first = attempt(1, rank(0, [window(0, 100, (1, 100), compute=100)]))
    second = attempt(2, rank(0, [], process_began=110.0, first=100), resumed_step=100)
    third = attempt(3, rank(0, [window(120, 130, (51, 60), compute=10)], process_began=118.0), resumed_step=50)
    goodput = goodput_of(run_of(first, second, third))
    assert (goodput.n_lost, goodput.parts["kept steps"]) == (50, 60.0)


def test_other_hosts_clocks_do_not_count():
    """They may be wrong by minutes, and the chief need not be the first rank."""
    windows = [window(10, 110, (1, 100), compute=100)]
    wrong = [window(610, 720, (1, 100), compute=50, between=60)]
    ranks = (rank(0, wrong, host="n2", process_began=600.0), rank(1, windows, role="chief"))
    goodput = goodput_of(run_of(attempt(1, *ranks)))
    assert (goodput.elapsed_s, goodput.parts["start-up"], goodput.parts["unrecorded"]) == (110.0, 10.0, 0.0)
    assert goodput.parts["kept steps"] == 100.0


def test_attempts_without_records():
    """As of a run with HPCDIST_TRACE=off: only the ledger tells when it began and ended."""
    goodput = goodput_of(run_of(attempt(1, times=(100.0, 160.0))))
    assert (goodput.elapsed_s, goodput.share) == (60.0, 0.0)
    assert goodput_of(run_of(attempt(1))).elapsed_s == 0.0


# -- stragglers --------------------------------------------------------------------------------------------------------


@pytest.mark.feature("observability.stragglers")
def test_the_rank_that_others_wait_for_is_named():
    """All take equally long, as they wait for each other: what a rank does by itself tells."""
    ranks = [rank(n, [window(0, 10, (1, 10), compute=6, communication=4)], host=f"n{n // 2}") for n in range(4)]
    assert stragglers_of(ranks) == []
    ranks[3] = rank(3, [window(0, 10, (1, 10), compute=9.5, communication=0.5)], host="n1")
    assert stragglers_of(ranks) == ["rank 3 on n1 computes 950 ms a step, the median 600 ms"]


@pytest.mark.feature("observability.stragglers", "complaints.slowest-host-named")
def test_a_slow_host_is_named_and_so_is_slow_input():
    ranks = [rank(n, [window(0, 10, (1, 10), compute=6, communication=4)], host=f"n{n // 2}") for n in range(6)]
    ranks[4:] = [rank(n, [window(0, 10, (1, 10), compute=9, communication=1)], host="n2") for n in (4, 5)]
    assert [line.partition(" computes")[0] for line in stragglers_of(ranks)] == [
        *("rank 4 on n2, as all ranks of that host,", "rank 5 on n2, as all ranks of that host,")
    ]
    ranks[0] = rank(0, [window(0, 10, (1, 10), compute=6, input=3, communication=1)], host="n0")
    assert "rank 0 on n0 waits for input 300 ms a step, the median 0 ms" in stragglers_of(ranks)


def test_one_rank_is_no_straggler():
    assert stragglers_of([rank(0, [window(0, 1, (1, 1), compute=1)])]) == []
    assert stragglers_of([]) == []


def test_of_two_ranks_none_is_a_straggler():
    """There is no usual one that the other could be compared with."""
    ranks = [rank(n, [window(0, 10, (1, 100), compute=8 + 2 * n, communication=2 - 2 * n)]) for n in range(2)]
    assert stragglers_of(ranks) == []


# -- times of steps ----------------------------------------------------------------------------------------------------


def clock_of(*windows_of_attempts, **more):
    """Return the clock of attempts with these windows, of which the first one has `more`."""
    attempts = []
    for n, windows in enumerate(windows_of_attempts, 1):
        attempts.append(attempt(n, rank(0, windows), **(more if n == 1 else {})))
    return StepClock(attempts)


def test_when_steps_were_made():
    clock = clock_of([window(100, 110, (1, 10)), window(110, 120, None), window(120, 130, (11, 15))])
    assert list(map(clock.time_of, (0, 5, 10, 15))) == [100, 105, 110, 130]
    assert clock.time_of(12) == pytest.approx(124.0)
    assert clock.time_of(16) is None


def test_steps_that_were_made_again_count_the_last_time():
    clock = clock_of([window(0, 10, (1, 10)), window(10, 20, (11, 20))], [window(50, 70, (11, 30))])
    assert list(map(clock.time_of, (5, 10, 20, 30))) == [5, 10, 60, 70]
    clock = clock_of([window(0, 20, (1, 20))], [window(50, 60, (16, 25))])
    assert list(map(clock.time_of, (10, 15, 20, 25))) == [10, 15, 55, 60]


def test_what_a_killed_attempt_did_not_record_was_made_before_its_end():
    """Its checkpoints tell when; without one its last record does, and never the wait in the queue."""
    windows = [window(0, 100, (1, 100))], [window(50_000, 50_100, (151, 250))]
    clock = clock_of(*windows, times=(130.0,))
    assert list(map(clock.time_of, (125, 150, 151))) == [115.0, 130.0, 50_001.0]
    clock = clock_of(*windows, times=(130.0,), commits=(Commit(150, 10, 1.0, 120.0),))
    assert list(map(clock.time_of, (125, 150))) == [110.0, 120.0]


# -- one clock ---------------------------------------------------------------------------------------------------------


def step_of(number, began, ended, entered, exited):
    spans = (("input", "next batch", began, began), ("communication", "gradients float32 x 8", entered, exited))
    return StepRecord(number, began, ended, spans)


@pytest.mark.feature("observability.merged-timeline")
@pytest.mark.parametrize("offset", [0.0, -123.456, 5e6])
@pytest.mark.parametrize("error", [0.0, 3.0, -0.5])
def test_clocks_of_hosts_are_set_by_their_sums(offset, error):
    """Host n2's clock began at another time, and its time since 1970 is wrong by `error` seconds."""
    sums = [(1.0, 1.010), (2.0, 2.004), (3.0, 3.002)]
    late = [0.009, 0.0, 0.001]  # n2 enters later by this, and all leave together
    first = [step_of(n, began - 0.5, ended, began, ended) for n, (began, ended) in enumerate(sums)]
    second = []
    for n, ((began, ended), delay) in enumerate(zip(sums, late, strict=True)):
        second.append(step_of(n, began - 0.5 + offset, ended + offset, began + delay + offset, ended + offset))
    ranks = [rank(0, host="n1", steps=first, clock=(0.0, 1e9)), rank(1, host="n1", steps=first, clock=(0.0, 1e9))]
    ranks += [rank(2, host="n2", steps=second, clock=(offset, 1e9 + error))]
    clock_offsets = offsets_of(ranks)
    assert clock_offsets["n1"] == 1e9
    assert clock_offsets["n2"] == pytest.approx(1e9 - offset, abs=0.0015)  # half of the shortest sum that bounds it


@pytest.mark.feature("observability.merged-timeline")
def test_all_ranks_of_a_host_bound_its_clock():
    """One enters early, and another one leaves soon after the last has entered: together they say within 2 ms."""
    early = step_of(1, 0.0, 2.0, 1.0, 1.5)
    late = step_of(1, 0.0, 2.0, 1.399, 1.4)
    first_host_ranks = [rank(0, steps=[early]), rank(1, steps=[late])]
    second_host_rank = rank(2, host="n2", steps=[step_of(1, 10.0, 12.0, 11.399, 11.4)])  # ten seconds ahead
    for ranks in ([*first_host_ranks, second_host_rank], [*first_host_ranks[::-1], second_host_rank]):
        assert offsets_of(ranks)["n2"] == pytest.approx(-10.0, abs=0.002)


def test_clocks_without_a_common_sum_are_the_hosts_own():
    ranks = [rank(0, host="n1", clock=(5.0, 105.0)), rank(1, host="n2", clock=(7.0, 110.0))]
    assert offsets_of(ranks) == {"n1": 100.0, "n2": 103.0}


def test_clocks_that_drift_apart():
    """No constant fits all: that of the middle is taken."""
    first = [step_of(n, n, n + 0.01, n, n + 0.01) for n in range(11)]
    second = [step_of(n, n + 0.1 * n, n + 0.1 * n + 0.01, n + 0.1 * n, n + 0.1 * n + 0.01) for n in range(11)]
    ranks = [rank(0, host="n1", steps=first), rank(1, host="n2", steps=second)]
    assert offsets_of(ranks)["n2"] == pytest.approx(-0.5, abs=0.02)


@pytest.mark.feature("observability.timeline")
def test_events_of_a_trace():
    """In microseconds since the first process began, with a name for each rank, and waits within their step."""
    steps = [step_of(1, 2.0, 3.0, 2.5, 2.75)]
    windows = [window(102, 104, (1, 2), compute=1.5, input=0.5)]
    ranks = [rank(n, windows, f"n{n}", steps, (0, 100), 99) for n in range(2)]
    events = events_of(attempt(1, *ranks))
    assert [event["args"]["name"] for event in events if event["name"] == "process_name"] == [
        *("rank 0 (worker:0) on n0", "rank 1 (worker:1) on n1")
    ]
    (step, wait, total, summed) = [event for event in events if event["ph"] == "X" and event["pid"] == 1]
    assert (step["name"], step["ts"], step["dur"], step["tid"]) == ("step 1", 3e6, 1e6, 0)
    assert (wait["name"], wait["ts"]) == ("next batch", 3e6)
    assert (total["cat"], total["ts"], total["dur"]) == ("communication", 3.5e6, 0.25e6)
    assert (summed["name"], summed["ts"], summed["dur"], summed["tid"]) == ("steps 1-2", 3e6, 2e6, 2)
    assert summed["args"]["compute"] == 1.5


# -- reading -----------------------------------------------------------------------------------------------------------

HEADER = {"rank": 0, "role": "worker:0", "host": "n1", "process_began": 5.0, "clock": [1.0, 11.0], "step": 0}
WINDOW = {
    **{"window": [2.0, 5.0], "steps": [1, 3], "n_steps": 3, "longest": [1, 1.5], "rows": 6, "stale": [4, 2]},
    **{"step_s": 3.0, "input_s": 1.0, "communication_s": 0.5, "save_s": 0.0, "between_s": 0.0},
}
STEP = {"step": 1, "time": [2.0, 3.0], "spans": [["input", "next batch", 2.0, 2.5]]}


def write(path, *records):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join((record if isinstance(record, str) else json.dumps(record)) + "\n" for record in records))


def test_records_that_are_torn_are_left_out(tmp_path):
    """As by a kill while they were written: of a line, and of a whole file."""
    trace = tmp_path / "trace" / "0001"
    write(trace / "rank-00000.jsonl", HEADER, WINDOW, json.dumps(WINDOW)[:40])
    write(trace / "rank-00001.jsonl", '{"rank": 1, "ro')
    write(trace / "rank-00002.jsonl")
    write(tmp_path / "config.json", "{")
    run = read_run(tmp_path)
    (rank_records,) = run.attempts[0].ranks
    assert run.config == ()
    seconds = {"compute": 1.5, "input": 1.0, "communication": 0.5, "save": 0.0, "between": 0.0}
    assert rank_records.windows == (Window(12.0, 15.0, (1, 3), 3, 6, (1, 1.5), seconds, (4, 2)),)


def test_single_steps_are_read_where_they_are_asked_for(tmp_path):
    for number in (1, 2):
        write(tmp_path / "trace" / f"000{number}" / "rank-00000.jsonl", HEADER, STEP, WINDOW)
    assert [run_attempt.ranks[0].steps for run_attempt in read_run(tmp_path).attempts] == [(), ()]
    first, second = read_run(tmp_path, steps_of=2).attempts
    assert first.ranks[0].steps == ()
    assert second.ranks[0].steps == (StepRecord(1, 2.0, 3.0, (("input", "next batch", 2.0, 2.5),)),)


def test_the_trace_is_of_the_last_attempt_with_steps(tmp_path, hpcdist):
    """The one after it died in its start, or has just begun."""
    write(tmp_path / "trace" / "0001" / "rank-00000.jsonl", HEADER, STEP, WINDOW)
    write(tmp_path / "trace" / "0002" / "rank-00000.jsonl", {**HEADER, "process_began": 9.0})
    write(tmp_path / "trace" / "0003" / "rank-00000.jsonl")
    assert ": 1 steps of 1 rank; " in hpcdist("trace", tmp_path)[1]
    assert ": 0 steps of 1 rank; " in hpcdist("trace", tmp_path, "--attempt", "2")[1]
    assert hpcdist("trace", tmp_path, "--attempt", "3")[0] == 2


def test_records_of_an_earlier_run_in_the_same_folder(tmp_path):
    """Its checkpoints were removed, and the next run's first attempt has the same number."""
    later = {**HEADER, "process_began": 500.0, "host": "n2"}
    write(tmp_path / "trace" / "0001" / "rank-00000.jsonl", HEADER, WINDOW, WINDOW, later, WINDOW)
    (rank_records,) = read_run(tmp_path).attempts[0].ranks
    assert (rank_records.host, rank_records.n_steps) == ("n2", 3)


def test_two_handlers_of_one_attempt(tmp_path):
    """They have one process, and both count."""
    write(tmp_path / "trace" / "0001" / "rank-00000.jsonl", HEADER, WINDOW, {**HEADER, "step": 3}, WINDOW)
    assert read_run(tmp_path).attempts[0].ranks[0].n_steps == 6


def test_numbers_of_metrics(tmp_path):
    write(tmp_path / "trace" / "0001" / "rank-00000.jsonl", HEADER)
    records = [{"step": 1, "epoch": 0, "loss": 2, "name": "x", "ok": True}, {"step": 3, "loss": 1.5, "big": 1e300}]
    records += [
        '{"step": 4, "loss": NaN}',
        {"loss": 3},
        {"step": "x", "loss": 3},
        "[" * 60_000,
        {"step": 10**400, "a": 1},
    ]
    write(tmp_path / "metrics.jsonl", *records)
    assert read_run(tmp_path).metrics == {"loss": [(1, 2.0), (3, 1.5)]}


@pytest.mark.parametrize("command", ["report", "trace"])
def test_a_folder_of_something_else(hpcdist, tmp_path, command):
    code, _, error = hpcdist(command, tmp_path)
    assert (code, error.count("\n")) == (2, 1)
    assert error.startswith("hpcdist: expected the folder of a run, with checkpoints/attempts or trace")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UsageError):
        read_run(tmp_path)


def test_a_trace_of_a_run_without_records(hpcdist, tmp_path):
    write(tmp_path / "checkpoints" / "attempts" / "0001.jsonl", {"event": "begin", "time_s": 1.0})
    code, _, error = hpcdist("trace", tmp_path)
    assert (code, error.count("\n")) == (2, 1)
    assert "without HPCDIST_TRACE=off" in error

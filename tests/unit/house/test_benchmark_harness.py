"""The statistics that every published figure goes through."""

import json

import numpy as np
import pytest


@pytest.fixture
def harness(root, monkeypatch):
    monkeypatch.syspath_prepend(root / "benchmarks")
    import harness

    return harness


@pytest.fixture
def report(harness):
    import report

    return report


def test_a_round_goes_there_and_back_and_starts_with_another_each_time(harness):
    assert harness.block_order(["a", "b"], 0) == ["a", "b", "b", "a"]
    assert harness.block_order(["a", "b"], 1) == ["b", "a", "a", "b"]
    assert harness.block_order(["a", "b", "c"], 4) == ["b", "c", "a", "a", "c", "b"]


def test_a_linear_drift_cancels(harness):
    clock = iter(range(1000))

    def slowing(factor):
        return lambda: (factor * (1 + 1e-3 * next(clock)), 0.0)

    wall, _ = harness.run_rounds({"a": slowing(2.0), "b": slowing(1.0), "c": slowing(1.0)}, 9)
    assert harness.paired_ratios(wall["a"], wall["b"]) == pytest.approx(2.0)
    assert harness.paired_ratios(wall["c"], wall["b"]) == pytest.approx(1.0)


@pytest.mark.feature("observability.benchmark-of-collectives")
def test_every_contender_runs_twice_a_round_and_keeps_wall_and_cpu(harness):
    calls = []

    def contender(name):
        def block():
            calls.append(name)
            return float(len(calls)), -float(len(calls))

        return block

    wall, cpu = harness.run_rounds({"a": contender("a"), "b": contender("b")}, 2)
    assert "".join(calls) == "abbabaab"
    assert wall == {"a": [(1.0, 4.0), (6.0, 7.0)], "b": [(2.0, 3.0), (5.0, 8.0)]}
    assert cpu["a"] == [(-1.0, -4.0), (-6.0, -7.0)]


def test_a_ratio_above_one_means_faster_than_the_reference(harness):
    ratios = harness.paired_ratios([(4.0, 4.0), (6.0, 2.0)], [(1.0, 3.0), (1.0, 1.0)])
    assert ratios.tolist() == [2.0, 4.0]
    with pytest.raises(ValueError, match="2.*1"):
        harness.paired_ratios([(1.0, 1.0)] * 2, [(1.0, 1.0)])


def test_the_interval_covers_the_true_median_about_as_often_as_it_says(harness):
    draws = np.random.default_rng(5)
    intervals = [harness.bootstrap_interval(draws.normal(1.0, 0.1, 25), 1000) for _ in range(200)]
    covered = sum(interval.low <= 1.0 <= interval.high for interval in intervals)
    assert 180 <= covered <= 199
    assert all(interval.low <= interval.median <= interval.high for interval in intervals)


def test_the_interval_of_equal_values_is_a_point(harness):
    assert harness.bootstrap_interval(np.full(7, 3.0)) == harness.Interval(3.0, 3.0, 3.0)


@pytest.mark.parametrize(("factor", "passes"), [(1.0, True), (1.02, True), (0.98, True), (1.04, False), (0.96, False)])
def test_the_gate_is_three_percent_to_both_sides(harness, factor, passes):
    samples = {"x": [(factor, factor)] * 5, "y": [(9.0, 9.0)] * 5, "x" + harness.AGAIN: [(1.0, 1.0)] * 5}
    assert harness.gate_ratio(samples) == pytest.approx(factor)
    assert harness.passes_gate(harness.gate_ratio(samples)) is passes


def test_without_an_a_a_pair_nothing_may_be_quoted(harness):
    assert harness.gate_ratio({"x": [(1.0, 1.0)]}) is None
    assert not harness.passes_gate(None)


def test_of_several_a_a_pairs_the_worst_counts(harness):
    repeat_suffix = harness.AGAIN
    samples = {
        "x": [(1.0, 1.0)],
        "x" + repeat_suffix: [(1.0, 1.0)],
        "y": [(1.0, 1.0)],
        "y" + repeat_suffix: [(2.0, 2.0)],
    }
    assert harness.gate_ratio(samples) == 0.5


def one_case(report, harness, again=1.0):
    samples = {"slow": [(4.0, 4.0)] * 5, "fast": [(2.0, 2.0)] * 5, "ours": [(1.0, 1.0)] * 5}
    samples["slow" + harness.AGAIN] = [(4.0 * again, 4.0 * again)] * 5
    return report.case("1 MiB", samples, samples, ["slow", "fast"], 1 << 20)


@pytest.mark.feature("observability.benchmark-of-collectives")
def test_the_strongest_baseline_leads_the_table(report, harness):
    lines = report.table(one_case(report, harness)).splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["fast", "ours", "slow"]
    assert "strongest baseline" in lines[2]
    assert "2.00 2.00 .. 2.00" in lines[3]
    assert "0.50 0.50 .. 0.50" in lines[4]


def test_a_noisy_case_has_no_factors(report, harness):
    text = report.table(one_case(report, harness, again=1.1))
    assert "DISCARDED" in text
    assert ".." not in text


def launch(report, label, time, names=("theirs", "ours")):
    samples = {name: [(time, time), (time, time)] for name in names}
    return {"label": label, "cases": [report.case("1 MiB", samples, samples, ["theirs"], 1 << 20)]}


def test_launches_merge_side_by_side_and_turns_one_after_another(report):
    launches = [("A", 1.0), ("B", 2.0), ("B", 3.0), ("A", 4.0)]
    (merged,) = report.merge([launch(report, label, time) for label, time in launches])
    assert merged["samples"]["ours [A]"] == [(1.0, 1.0)] * 2 + [(4.0, 4.0)] * 2
    assert merged["samples"]["ours [B]"] == [(2.0, 2.0)] * 2 + [(3.0, 3.0)] * 2
    assert merged["baselines"] == ["theirs [A]", "theirs [B]"]


def test_a_name_of_one_label_keeps_its_name_and_the_shortest_launch_counts(report):
    peer = launch(report, "tf", 5.0, names=["peer"])
    peer["cases"][0]["samples"]["peer"] = [(5.0, 5.0)]
    (merged,) = report.merge([launch(report, "ranks", 1.0), peer])
    assert {name: len(values) for name, values in merged["samples"].items()} == {"theirs": 1, "ours": 1, "peer": 1}


def test_an_a_a_pair_stays_one_when_labels_are_added(report, harness):
    names = ("theirs", "theirs" + harness.AGAIN)
    (merged,) = report.merge([launch(report, "A", 1.0, names), launch(report, "B", 2.0, names)])
    assert harness.gate_ratio(merged["samples"]) == 1.0
    assert "theirs [B]" + harness.AGAIN in merged["samples"]


def test_the_json_holds_every_raw_sample(report, harness, tmp_path, capsys):
    case = one_case(report, harness)
    report.publish({"label": "x", "environment": {}, "cases": [case]}, tmp_path, "allreduce")
    saved_samples = json.loads((tmp_path / "allreduce.json").read_text())["cases"][0]["samples"]
    assert saved_samples == {name: [list(pair) for pair in pairs] for name, pairs in case["samples"].items()}
    shown = capsys.readouterr().out
    assert "strongest baseline" in shown
    assert "matplotlib is not installed" in shown or (tmp_path / "allreduce.png").exists()


@pytest.mark.parametrize(
    ("seconds", "text"), [(2.5, "2.5 s"), (0.0123, "12.3 ms"), (4.56e-5, "45.6 us"), (1e-9, "0.001 us")]
)
def test_durations_carry_their_unit(report, seconds, text):
    assert report.duration(seconds) == text

"""The simulation of benchmarks/simulate.py: it follows the schedules, and finds costs that it is given."""

import importlib
import json
from dataclasses import replace

import pytest

from hpcdist.collectives.route import DIRECT_HOSTS


@pytest.fixture
def simulate(monkeypatch, root):
    monkeypatch.syspath_prepend(root / "benchmarks")
    return importlib.import_module("simulate")


@pytest.fixture
def links(simulate):
    return {name: simulate.Link(5e-4, 2e-6, 8e-9) for name in simulate.ALGORITHMS}


def test_without_latency_a_sum_takes_what_its_bytes_take(simulate, links):
    """2(m-1)/m * n bytes leave each host, and a pipeline is alone on the wire at its two ends only."""
    free = {name: replace(link, latency_s=0, message_s=0, local_byte_s=0) for name, link in links.items()}
    for n_hosts in (2, 4, 8):
        bound_s = 2 * (n_hosts - 1) / n_hosts * (64 << 20) * 8e-9
        for name, call in simulate.SIMULATED.items():
            assert bound_s * 0.999 < call(n_hosts, 1, 64 << 20, free) < bound_s * 1.05, name


def test_costs_are_found_again_in_what_they_predict(simulate):
    due = simulate.Link(4e-4, 2e-6, 9e-9)
    for name in simulate.ALGORITHMS:
        rows = [{"algorithm": name, "hosts": hosts, "nbytes": nbytes} for hosts, nbytes in simulate.FITTED]
        for row in rows:
            row["seconds"] = simulate.predict(row, due)
        fitted = simulate.fit(rows, due.message_s)
        assert fitted.byte_s == pytest.approx(due.byte_s, rel=0.03)
        assert all(simulate.predict(row, fitted) == pytest.approx(row["seconds"], rel=0.05) for row in rows)


def test_many_hosts_are_not_sent_a_message_each(simulate, links):
    """What the simulation has found, and `goes_by_halving` mends."""
    few, many = (simulate.hierarchical_s(hosts, 8, 10**8, links) for hosts in (2 * DIRECT_HOSTS, 8192))
    assert many < 1.3 * few
    assert simulate.lanes_s(8192, 8, 10**8, links["HIERARCHICAL"]) > 5 * many


def test_links_above_the_switches_are_shared(simulate, links):
    shared = {name: replace(link, pod=4, oversubscription=4.0) for name, link in links.items()}
    assert simulate.hierarchical_s(4, 8, 10**8, shared) == simulate.hierarchical_s(4, 8, 10**8, links)
    assert simulate.hierarchical_s(8, 8, 10**8, shared) > 1.5 * simulate.hierarchical_s(8, 8, 10**8, links)
    assert simulate.ring_s(8, 8, 10**8, shared) == simulate.ring_s(8, 8, 10**8, links)


def test_a_report_of_what_was_measured_is_enough_for_predictions(simulate, tmp_path, monkeypatch, capsys, links):
    rows = [
        {"algorithm": name, "hosts": hosts, "nbytes": nbytes, "seconds": 1e-3 + 1e-8 * nbytes}
        for name in simulate.ALGORITHMS
        for hosts, nbytes in simulate.FITTED + simulate.HELD_OUT
    ]
    (tmp_path / "measured.json").write_text(json.dumps({"message_s": 2e-6, "rows": rows}))
    monkeypatch.setattr(simulate, "RANK_COUNTS", [2, 64, 1024])
    monkeypatch.setattr(simulate, "draw", lambda tables, out: out.write_bytes(b""))  # matplotlib is optional
    argv = ["simulate.py", "--out", str(tmp_path), "--link", str(tmp_path / "measured.json")]
    monkeypatch.setattr("sys.argv", argv)
    simulate.main()
    assert "held out, largest error" in capsys.readouterr().out
    table = json.loads((tmp_path / "predicted.json").read_text())["full bisection"]
    assert [row["ranks"] for row in table] == [2, 64, 1024]
    assert all(0.1 < row["step, weak scaling"] < 1 for row in table)
    assert table[-1]["step, strong scaling"] < table[-1]["step, weak scaling"]

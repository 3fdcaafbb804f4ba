"""hpcdist beside TensorFlow: random programs that tests/support/oracle recorded, run by all ranks."""

import copy
import gc
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support" / "oracle"))
from program import read_sample
from replay_programs import library_of, replay

pytestmark = [pytest.mark.mpi, pytest.mark.core]


@pytest.fixture
def programs(comm):
    """Return the programs that this number of ranks can run; their strategies end with the test."""
    sample = read_sample()
    yield [
        program for program in sample if program["n_replicas"] >= comm.size and program["ranks"] in (None, [comm.size])
    ]
    library_of.cache_clear()
    gc.collect()


def differences(programs, comm, is_default=False):
    outcomes = [replay(program, comm, is_default) for program in programs]
    return {
        outcome["number"]: (outcome["step"], outcome["texts"])
        for outcome in outcomes
        if outcome["outcome"] not in ("same", "intended")
    }


def test_programs_as_tensorflow(programs, comm):
    assert len(programs) >= 60
    assert differences(programs, comm) == {}


def test_one_replica_per_rank_as_tensorflow(programs, comm):
    programs = [program for program in programs if program["n_replicas"] == comm.size]
    assert len(programs) >= 8
    assert differences(programs, comm, is_default=True) == {}


def test_a_wrong_answer_is_found(programs, comm):
    """One number of an answer is changed: that of the last replica, which the last rank has."""
    program = next(copy.deepcopy(candidate) for candidate in programs if candidate["steps"][0]["call"] == "values")
    result = program["answer"][0]["result"]
    if hasattr(result, "values"):
        array = result.values[-1]
    else:
        array = result
    if array.size == 0 or not isinstance(array, np.ndarray):
        pytest.fail("expected a program that begins with a value of some elements")
    array.reshape(-1)[-1] += 1
    assert list(differences([program], comm)) == [program["number"]]

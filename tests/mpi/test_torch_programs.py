"""Random training programs: all ranks hold the same bits, those of plain torch but for rounding, or all ranks raise.

A sample of what `make fuzz` runs.
"""

import gc
import warnings

import pytest
import torch
from fuzz_torch import FINDINGS, judge_results, run_guarded
from torch_fuzz.compare import TOLERANCES, judge
from torch_fuzz.draw import draw_program
from torch_fuzz.program import from_json

pytestmark = pytest.mark.mpi

#: Seeds of the sample, five at a time.
GROUPS = [range(start, start + 5) for start in range(0, 40, 5)]
#: Programs that are left out, and why.
LEFT_OUT: dict[int, str] = {}


@pytest.fixture(scope="module", autouse=True)
def fast_collections():
    """Keep what there is now out of sight of the collections between programs, which would take longer than these."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.parametrize("seeds", GROUPS, ids=lambda seeds: f"{seeds[0]}-{seeds[-1]}")
def test_programs_leave_what_plain_torch_leaves(comm, seeds):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's advice to the programs, such as on the order of schedulers
        for seed in [seed for seed in seeds if seed not in LEFT_OUT]:
            program = draw_program(seed)
            local_result = run_guarded(program, comm)
            results = comm.allgather(local_result)
            outcome = comm.bcast(judge_results(program, results) if comm.rank == 0 else None, 0)
            assert outcome["outcome"] not in {*FINDINGS, "one-sided"}, f"program {seed}: {outcome}"
            assert not local_result["is_alive"], f"program {seed}: its strategy is still there"


def test_a_program_is_data_and_the_same_each_time():
    program = draw_program(3)
    assert program == draw_program(3)
    assert from_json(program.to_json()) == program


@pytest.mark.parametrize(("factor", "outcome"), [(1.0, "equal"), (1.0 + 1e-7, "differs")])
def test_a_small_difference_is_noticed(factor, outcome):
    expected = {"weight": torch.linspace(-1, 1, 7, dtype=torch.float64).numpy()}
    actual = {"weight": expected["weight"] * factor}
    assert judge([actual, actual], expected, "float64", lambda: [expected])["outcome"] == outcome


def test_ranks_are_compared_bit_by_bit():
    expected = {"weight": torch.ones(3).numpy()}
    perturbed = {"weight": expected["weight"] * (1 + 2**-23)}
    assert TOLERANCES["float32"][0] > 2**-23
    assert judge([expected, perturbed], expected, "float32", lambda: [expected])["outcome"] == "ranks differ"


def test_a_gradient_is_not_the_same_as_none():
    actual = {"weight.grad": None}
    expected = {"weight.grad": torch.zeros(3).numpy()}
    assert judge([actual], expected, "float64", lambda: [expected])["outcome"] == "differs"


def test_a_program_that_depends_on_rounding_says_nothing():
    expected, perturbed = ({"weight": torch.full((2,), value).numpy()} for value in (1.0, 2.0))
    assert judge([perturbed], expected, "float32", lambda: [perturbed])["outcome"] == "unstable"

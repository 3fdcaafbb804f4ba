"""What `hpcdist doctor` concludes: a pure function of what the ranks know."""

from dataclasses import replace

import pytest

from hpcdist.cli.findings import RankFacts, findings_of

GOOD = RankFacts(0, "a", "worker 0", (0, 1), 4, 2, 0, 10e9, 1 << 30, True)


def ranks(n_hosts=1, n_local=2, **more):
    """Return ranks with two cores of their own."""
    rank_facts = []
    for rank in range(n_hosts * n_local):
        host, local = divmod(rank, n_local)
        cores = (2 * local, 2 * local + 1)
        facts = replace(GOOD, rank=rank, host="abcdef"[host], task=f"worker {rank}", cores=cores, link_bytes_s=1e9)
        rank_facts.append(replace(facts, **more))
    return rank_facts


def lines(rank_facts, folder=""):
    return list(map(str, findings_of(rank_facts, folder)))


def bad(rank_facts, folder=""):
    return [
        (finding.level, finding.topic, finding.text)
        for finding in findings_of(rank_facts, folder)
        if finding.level != "ok"
    ]


@pytest.mark.feature("launch.installation-report")
@pytest.mark.parametrize("n_hosts", [1, 3])
def test_all_is_well(n_hosts):
    assert bad(ranks(n_hosts), "runs/a") == []
    assert lines(ranks(pmi="PMIx", is_cuda_aware=False))[:4] == [
        "ok    world          2 ranks: 2 on a",
        "ok    roles          worker 2",
        "ok    launch         PMIx; the MPI library takes no GPU memory, which hpcdist does not need",
        "ok    cores          2 for each rank of a, of its own",
    ]


@pytest.mark.feature("launch.installation-report")
def test_every_finding_that_is_not_ok_has_a_cure():
    findings = [
        *findings_of(ranks(1, 2, cores=(0,), omp_threads=9, shm_bytes=0, n_gpus=1), "runs/a"),
        *findings_of(ranks(2, 1, can_share=False, skew_s=3.0, folder_error="none"), "runs/a"),
    ]
    assert {finding.topic for finding in findings if finding.level != "ok"} == {
        *("cores", "threads", "shared memory", "GPUs", "clock", "run folder")
    }
    assert all(finding.cure for finding in findings if finding.level != "ok")


def test_ranks_of_two_launchers():
    rank_facts = ranks(pmi="PMI")
    rank_facts[1] = replace(rank_facts[1], pmi="")
    assert [finding[:2] for finding in bad(rank_facts)] == [("warn", "launch")]


def test_more_ranks_than_cores():
    assert bad(ranks(1, 3, cores=(0, 1), omp_threads=1)) == [
        ("warn", "cores", "3 ranks on the 2 cores of a that they may use")
    ]


def test_ranks_that_share_cores_have_their_part():
    assert "ok    cores          2 for each rank of a, shared by all" in lines(ranks(cores=(0, 1, 2, 3)))


def test_a_binding_that_leaves_most_cores_idle():
    rank_facts = [replace(rank, cores=(rank.rank,), n_host_cores=64, omp_threads=1) for rank in ranks()]
    assert bad(rank_facts) == [("warn", "cores", "each rank is bound to 1 of the 64 cores of a")]


def test_more_threads_than_cores():
    assert bad(ranks(omp_threads=8)) == [("warn", "threads", "OMP_NUM_THREADS=8 for 2 cores per rank of a")]


def test_a_slow_host_is_named():
    rank_facts = []
    for rank in ranks(3):
        rank_facts.append(replace(rank, copy_bytes_s=2e9 if rank.host == "b" else 10e9))
    assert bad(rank_facts) == [("warn", "copies", "2.00 GB/s in memory on b, 10.00 on most")]


def test_a_slow_link_is_named():
    rank_facts = []
    for rank in ranks(4):
        rank_facts.append(replace(rank, link_bytes_s=1e8 if rank.host == "c" else 1e9))
    assert bad(rank_facts) == [("warn", "links", "0.10 GB/s from rank 0 on c, 1.00 on most")]


def test_a_clock_that_is_wrong():
    rank_facts = []
    for rank in ranks(3):
        rank_facts.append(replace(rank, skew_s=-90.0 if rank.host == "b" else 0.001))
    assert bad(rank_facts) == [("warn", "clock", "that of b differs by -90.0 s")]


def test_fewer_gpus_than_ranks():
    assert bad(ranks(n_gpus=1)) == [("warn", "GPUs", "1 for 2 ranks of a")]
    assert bad(ranks(n_gpus=2)) == []


def test_a_folder_that_one_host_does_not_see():
    rank_facts = []
    for rank in ranks(2):
        rank_facts.append(replace(rank, folder_error="shows nothing" if rank.host == "b" else ""))
    assert bad(rank_facts, "runs/a") == [("fail", "run folder", "runs/a on b shows nothing")]

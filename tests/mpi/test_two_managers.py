"""A handler's manager beside another one of the same Checkpoint, such as that of the best: each keeps its promises."""

import numpy as np
import pytest

import hpcdist

pytestmark = pytest.mark.mpi
HOUR_S = 3600.0


class Job:
    """Counts to 100 in numpy, with a handler on one manager, and another manager beside it."""

    def __init__(self, folder, **schedule):
        self.value = np.zeros(1)
        checkpoint = hpcdist.Checkpoint(value=self.value)
        self.manager = hpcdist.CheckpointManager(checkpoint, folder / "run" / "checkpoints", max_to_keep=100)
        self.other = hpcdist.CheckpointManager(checkpoint, folder / "best", max_to_keep=100)
        self.handler = hpcdist.PreemptionCheckpointHandler(
            None, self.manager, schedule=hpcdist.SaveSchedule(**schedule)
        )

    def count_to(self, last, after_step=lambda step: None):
        for _ in range(last):
            self.handler.run(self._add)
            after_step(self.handler.step)

    def _add(self):
        self.value += 1


@pytest.fixture
def make_job(shared_path):
    jobs = []

    def make(**schedule):
        jobs.append(Job(shared_path, **schedule))
        return jobs[-1]

    yield make
    for job in jobs:
        job.handler.close()


def steps_in(comm, folder):
    comm.Barrier()
    return sorted(int(path.stem[5:13]) for path in folder.rglob("step-*.h5"))


def test_periodic_saves_do_not_depend_on_the_other(comm, shared_path, make_job):
    job = make_job(every_steps=5)
    with job.handler:
        job.count_to(20, lambda step: job.other.save(step) if step % 5 == 0 else None)
    assert steps_in(comm, shared_path / "run") == steps_in(comm, shared_path / "best") == [5, 10, 15, 20]


def test_the_last_save_does_not_depend_on_the_other(comm, shared_path, make_job):
    """Each attempt is stopped right after the other manager has saved, and comes further."""
    for attempt in range(1, 5):
        job = make_job(every_steps=100)

        def save_and_stop(step, job=job, last=5 * attempt):
            if step == last:
                job.other.save(step)
                job.handler.stop()

        with pytest.raises(SystemExit) as leaving:
            job.count_to(50, save_and_stop)
        assert leaving.value.code == 75
        assert steps_in(comm, shared_path / "run")[-1] == job.value[0] >= 5 * attempt
        job.handler.close()


def test_a_save_by_hand_puts_off_the_one_by_the_clock(comm, shared_path, make_job):
    job = make_job(every_s=HOUR_S)
    job.count_to(3)
    job.manager.saved_at -= HOUR_S  # as if an hour had gone by
    job.other.save(3)
    job.manager.save(3)
    job.count_to(64)  # of which several ask for what is wanted
    assert steps_in(comm, shared_path / "run") == [3]
    job.manager.saved_at -= HOUR_S
    job.other.save(67)
    job.count_to(64)
    assert len(steps_in(comm, shared_path / "run")) == 2

"""Which points of a loop lie between two iterations, and what counts as used there: a pure function of what happens."""

import threading

import pytest

from hpcdist.runtime.loop_state import LoopState
from hpcdist.runtime.parts import Part


class Loop:
    """A program's loop over sources, with a handler attached."""

    def __init__(self, n_sources=1, optimizers=("optimizer",), is_alone=True):
        self.state = LoopState(is_alone)
        self.sources = [self.state.add_source() for _ in range(n_sources)]
        self.state.begin(optimizers)

    def draw(self, number=0, is_for_training=True):
        """Draw a part; return whether that was between two iterations."""
        source = self.sources[number]
        is_safe = self.state.is_safe_draw(source, is_for_training)
        if is_safe:
            self.state.note_safe_point()
        source.settle()
        source.begin_pass()
        n = source.n_handed_out + 1
        source.move(n)
        self.state.hand_out(Part(source, n, (2,), 4, True, n, n, is_for_training))
        return is_safe

    def forward(self, *parts):
        """Call the model with parts; return whether this call begins an iteration."""
        is_safe = self.state.is_safe_forward(parts)
        if is_safe:
            self.state.note_safe_point()
        self.state.note_forward(parts)
        return is_safe

    def backward(self, *parts, is_unknown=False):
        self.state.begin_backward()
        if parts or is_unknown:
            self.state.uses().add(parts)
        self.state.end_backward()

    def step(self, optimizer="optimizer"):
        self.state.note_step(optimizer)

    def newest(self, number=0):
        return self.sources[number].open_parts[-1]

    def position(self, number=0):
        return self.sources[number].saved_position(is_training=True)


def test_a_plain_loop_is_between_iterations_at_every_draw():
    loop = Loop()
    for n in range(5):
        assert loop.draw()
        assert loop.position() in (None, n)  # nothing was settled before the first draw
        loop.backward()
        loop.step()
        assert loop.position() == n + 1


def test_a_draw_between_forward_and_backward_is_in_the_middle():
    """As in nanoGPT: the forward of the first part precedes the draw of the second."""
    loop = Loop()
    loop.draw()
    for n in range(1, 6):
        part = loop.newest()
        begins = loop.forward(part)
        assert begins == (n > 2), "of the first two iterations nobody knows yet"
        assert not loop.draw()
        loop.backward(part)
        loop.step()
        assert loop.position() == n, "the part that was drawn ahead was not used"


@pytest.mark.parametrize("n_ahead", [1, 2, 3])
def test_a_prefetcher_draws_between_iterations(n_ahead):
    loop = Loop()
    waiting = []
    for n in range(8):
        loop.draw()
        waiting.append(loop.newest())
        if len(waiting) > n_ahead:
            part = waiting.pop(0)
            loop.forward(part)
            loop.backward(part)
            loop.step()
            assert loop.position() == n + 1 - n_ahead
    assert loop.draw()


def test_accumulated_gradients_are_waited_for():
    loop = Loop()
    assert loop.draw()
    loop.backward()
    assert not loop.draw()
    loop.backward()
    assert loop.position() in (None, 0)
    loop.step()
    assert loop.draw()
    assert loop.position() == 2


def test_copies_of_what_was_drawn_ahead_are_ambiguous_until_a_part_is_known():
    loop = Loop()
    loop.draw()
    loop.draw()
    loop.backward(is_unknown=True)
    loop.step()
    assert loop.state.is_ambiguous
    assert not loop.draw()
    loop.backward(loop.sources[0].open_parts[1])
    loop.step()
    assert not loop.state.is_ambiguous
    assert loop.position() == 2


def test_every_optimizer_must_step_between_two_draws():
    """A GAN that draws a batch for each of its optimizers: the second draw is in the middle of an iteration."""
    loop = Loop(optimizers=("first", "second"))
    assert loop.draw()
    loop.backward()
    loop.step("first")
    assert not loop.draw()
    loop.backward()
    loop.step("second")
    assert loop.draw()


def test_the_second_forward_of_a_gan_that_draws_ahead_is_no_point():
    loop = Loop(optimizers=("first", "second"))
    loop.draw()
    for _ in range(3):
        loop.draw()
        part = loop.sources[0].open_parts[0]
        loop.forward(part)
        loop.backward(part)
        loop.step("first")
        assert not loop.forward()
        loop.backward(is_unknown=True)
        loop.step("second")
        assert loop.state.is_complete, "handler.poll() may act"
        assert not loop.state.is_between_iterations, "a draw may not: the unknown forward may be of the next part"


def test_a_second_source_is_drawn_in_the_middle_until_it_is_drawn_alone():
    loop = Loop(2)
    for _ in range(2):
        assert loop.draw(0)
        loop.backward()
        loop.step()
        assert not loop.draw(1)
        loop.backward()
        loop.step()
    loop.sources[0].end_pass()
    assert not loop.draw(1)
    loop.backward()
    loop.step()
    assert loop.draw(1), "the program has gone on to the second source alone"


@pytest.mark.parametrize("is_for_training", [True, False])
def test_a_validation_is_no_point(is_for_training):
    loop = Loop(2)
    loop.draw(0)
    loop.backward()
    loop.step()
    assert not loop.draw(1, is_for_training)


def test_parts_that_were_left_out_are_no_obstacle():
    loop = Loop()
    loop.draw()
    loop.draw()
    loop.backward(loop.newest())
    loop.step()
    assert loop.draw()
    assert loop.position() == 2


def test_another_rank_tells_which_part_was_used():
    """A replica without rows may feed the model something else: the sum carries the key of the batch."""
    loop = Loop(is_alone=False)
    loop.draw()
    loop.draw()
    loop.state.begin_backward()
    loop.state.uses().add([])
    loop.state.share(is_entered=False, has_peeks=False, key=[1 % 31, 1 % 29], moduli=(31, 29))
    loop.state.note_managed()
    loop.state.end_backward()
    loop.step()
    assert not loop.state.is_ambiguous
    assert loop.position() == 1


def test_a_loader_whose_position_is_not_saved_is_noticed():
    loop = Loop()
    sampler = object()
    loop.sources.append(loop.state.add_source(keeper=id(sampler)))
    assert not loop.draw(1)
    assert loop.state.has_lost_position
    loop.state.begin(("optimizer",), [sampler])
    assert loop.draw(1)
    assert not loop.state.has_lost_position


def test_programs_that_do_not_train_use_what_they_draw():
    loop = Loop(optimizers=())
    for n in range(1, 4):
        assert loop.draw()
        assert loop.sources[0].saved_position(is_training=False) == n


def test_what_follows_a_pass_is_done_again_if_the_job_stops_in_it():
    loop = Loop(2)
    loop.draw(0)
    loop.backward()
    loop.step()
    loop.state.note_end_of_pass()
    loop.sources[0].move("the next pass")
    loop.draw(1, is_for_training=False)
    assert loop.state.is_after_pass
    loop.state.rewind_to_end_of_pass()
    assert (loop.position(0), loop.position(1)) == (1, None)
    loop.sources[0].move("further on")
    assert loop.position(0) == "further on"


def test_forwards_are_watched_only_while_parts_are_drawn_ahead():
    watched = []
    loop = Loop()
    loop.state.watch_forwards_with(watched.append)
    for _ in range(150):
        loop.draw()
        loop.backward()
        loop.step()
    assert watched == [True, False]
    loop.draw()
    loop.draw()
    assert watched == [True, False, True]


def test_sources_that_nobody_draws_from_are_forgotten():
    state = LoopState()
    for _ in range(1000):
        state.add_source().abandon()
    assert len(state._sources) <= 1


def test_a_backward_that_returns_after_the_step_of_another_replica_is_complete():
    loop = LoopState(is_alone=True)
    source = loop.add_source()
    optimizer = object()
    loop.begin([optimizer])
    source.begin_pass()

    def replica(steps_first, begins, ends):
        loop.begin_backward()
        begins.wait(10)
        if not steps_first:
            ends.wait(10)
        loop.end_backward()
        if steps_first:
            loop.note_step(optimizer)
            ends.wait(10)

    for number in range(1, 30):
        part = Part(source, number, (2, 2), 4, True, None, number, True)
        loop.hand_out(part)
        begins = threading.Barrier(2)
        ends = threading.Barrier(2)
        threads = [threading.Thread(target=replica, args=(is_first, begins, ends)) for is_first in (True, False)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert loop.is_complete
        assert source.n_complete == number
        assert loop.is_between_iterations


def test_a_thread_has_a_record_of_its_own_from_its_first_forward_on():
    loop = LoopState(is_alone=True)
    records = []

    def train():
        records.append(loop.uses_of_thread())
        loop.begin_backward()
        records.append(loop.uses())

    thread = threading.Thread(target=train)
    thread.start()
    thread.join(20)
    assert records[0] is records[1]
    assert records[0] is not loop.uses()


def test_what_an_earlier_program_has_left_is_not_compared_between_ranks():
    """Its dataset may be dropped on one rank first."""
    loop = LoopState()
    source = loop.add_source(owner=1)
    loop.expect_training(1)
    optimizer = object()

    def train(number):
        loop.hand_out(Part(source, number, (2,), 4, True, None, number, True))
        loop.note_managed()
        loop.begin_backward()
        loop.end_backward()
        loop.note_step(optimizer)

    loop.begin([optimizer])
    train(1)
    assert loop.describe_positions()
    loop.begin([optimizer])
    assert not loop.describe_positions()
    train(2)
    assert loop.describe_positions()

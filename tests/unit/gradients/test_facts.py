"""What ranks learn of each other from numbers that travel with a sum of gradients."""

import numpy as np
import pytest

from hpcdist.gradients.facts import MODULI, Contribution, Facts, encode_facts

PLAIN = Contribution(
    is_touched=(True,),
    buffers=(),
    sparse=(),
    weight=4.0,
    doubtful_rows=None,
    refusal=None,
    key=None,
    has_entry=False,
    has_peeks=False,
    has_crossed=False,
)


def sum_of(contributions, numbers, states):
    """Return the facts of replicas, added in float32 as they travel."""
    rows = []
    for contribution, number, state in zip(contributions, numbers, states, strict=True):
        rows.append(np.array(encode_facts(contribution, number, state), np.float32))
    return Facts.decode(sum(rows[1:], rows[0]).tolist())


@pytest.mark.parametrize("n_replicas", [1, 2, 3, 8, 100])
def test_replicas_that_agree(n_replicas):
    contribution = PLAIN._replace(key=987654321, has_entry=True)
    facts = sum_of([contribution] * n_replicas, [1000] * n_replicas, [123456789] * n_replicas)
    assert facts.is_same_backward(n_replicas)
    assert facts.is_same_batch
    assert facts.is_same_state(n_replicas)
    assert facts.weight == 4 * n_replicas
    assert (facts.n_entered, facts.n_keyed, facts.n_refused, facts.n_doubtful) == (n_replicas, n_replicas, 0, 0)
    assert facts.key == [987654321 % modulus for modulus in MODULI]


@pytest.mark.parametrize("odd", [0, 1, 2])
@pytest.mark.parametrize("difference", [1, 2, 17])
def test_one_replica_that_is_elsewhere(odd, difference):
    numbers = [5, 5, 5]
    states = [77, 77, 77]
    numbers[odd] += difference
    assert not sum_of([PLAIN] * 3, numbers, states).is_same_backward(3)
    states[odd] += difference
    facts = sum_of([PLAIN] * 3, [5, 5, 5], states)
    assert facts.is_same_backward(3)
    assert not facts.is_same_state(3)


def test_batches_are_compared_among_replicas_that_know_theirs():
    first = PLAIN._replace(key=11)
    different_batch = PLAIN._replace(key=12)
    assert sum_of([first, PLAIN, first], [1] * 3, [0] * 3).is_same_batch
    assert not sum_of([first, PLAIN, different_batch], [1] * 3, [0] * 3).is_same_batch
    assert sum_of([PLAIN, PLAIN], [1] * 2, [0] * 2).key is None


def test_doubts_and_refusals_are_counted():
    doubtful = PLAIN._replace(doubtful_rows=3)
    refused = PLAIN._replace(refusal="why")
    facts = sum_of([doubtful, refused, PLAIN._replace(has_peeks=True)], [1] * 3, [0] * 3)
    assert (facts.n_doubtful, facts.n_refused, facts.n_peeked) == (1, 1, 1)


def test_counts_tell_no_gradient_from_one():
    contribution = PLAIN._replace(is_touched=(True, False), buffers=(None,), sparse=(None,))
    assert contribution.counts() == [True, False, False, False]

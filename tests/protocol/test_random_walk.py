"""The real engine and log against a dictionary, at random; `scripts/campaigns/random-walk` goes further."""

from __future__ import annotations

import warnings

import pytest
from samples import sample
from walking import OFTEN, walk

STEPS = sample(1_250, 2_500)
WALKS = sample(2, 8)


@pytest.mark.parametrize("seed", range(1000, 1000 + 1000 * WALKS, 1000))
def test_log_and_dictionary_agree_all_the_way(seed, tell):
    """Saves, crashes, takeovers, damage, rewinds, marks, retention in any order: both always say the same."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of deletions that failed: what is left lying there is compared
        taken = walk(STEPS, seed)
    tell(f"random walk, seed {seed}: {taken.total():,} steps")
    assert taken.total() == STEPS
    assert taken.keys() == {*OFTEN, "start"}

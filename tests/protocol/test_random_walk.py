"""A random walk of the real engine and log against a dictionary; scripts/random-walk goes further."""

from __future__ import annotations

import warnings

from walking import walk

STEPS = 20_000


def test_the_log_and_the_dictionary_agree_all_the_way(capsys):
    """Saves, crashes, takeovers, damage, rewinds, marks and retention in any order: both always say the same."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of deletions that are told; what is left lying there is compared
        taken = walk(STEPS, seed=1)
    with capsys.disabled():
        print(
            f" [{taken.total():,} steps: {', '.join(f'{name} {count}' for name, count in taken.items())}]",
            end="",
        )
    assert taken.total() == STEPS
    assert min(taken.values()) > 20 and len(taken) == 14

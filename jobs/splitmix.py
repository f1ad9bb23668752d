"""SplitMix64, the one source of everything that must be the same for ever.

Seeds and orders of data are derived from it and not from a library's generator, because a library
may change its own between versions while a run that was begun years ago must still see its samples
in the same order. Constants: Steele, Lea and Flood, "Fast splittable pseudorandom number
generators" (2014), in the finaliser of David Stafford's variant 13.

`finalise` is a bijection on 64 bits, so different inputs never collide.
"""

from __future__ import annotations

MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15
MULTIPLY_1 = 0xBF58476D1CE4E5B9
MULTIPLY_2 = 0x94D049BB133111EB


def finalise(word: int) -> int:
    """Scramble the 64 bits of `word`."""
    word &= MASK
    word = ((word ^ (word >> 30)) * MULTIPLY_1) & MASK
    word = ((word ^ (word >> 27)) * MULTIPLY_2) & MASK
    return word ^ (word >> 31)


def mix(*words: int) -> int:
    """Fold any number of words (taken modulo 2**64) into one 64-bit word; their order matters.

    state = 0; for each word: state = finalise(state + GOLDEN + word), all modulo 2**64.
    """
    state = 0
    for word in words:
        state = finalise(state + GOLDEN + word)
    return state

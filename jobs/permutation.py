"""The order of an epoch's samples: a pure function of seed, epoch and index, the same for ever.

No state, no generator: any process on any machine computes the same order, and can start in the
middle of it. The golden values in the tests pin it; a change here would be a change of format.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrelay.jobs.splitmix import GOLDEN, MULTIPLY_1, MULTIPLY_2, mix

if TYPE_CHECKING:
    from torch import Tensor

_ORDER = 0x6F72646572  # "order": keeps the keys of the order apart from the samples' seeds
_SAMPLE = 0x73616D706C65  # "sample"
_SIGN = -(2**63)


def permutation(seed: int, epoch: int, n: int) -> Tensor:
    """Return the order of `n` samples in `epoch` as an int64 tensor of indices.

    It is the argsort of key(i) = finalise(mix(seed, epoch, "order") + (i + 1) * GOLDEN), compared as
    unsigned 64-bit numbers. Keys never tie, because `finalise` is a bijection. Ten million samples
    take seconds and 16 bytes each.
    """
    import torch

    index = torch.arange(1, n + 1, dtype=torch.int64)
    keys = _finalise_(index.mul_(_signed(GOLDEN)).add_(_signed(mix(seed, epoch, _ORDER))))
    # int64 compares signed: with the sign bit flipped that is the unsigned order
    return torch.argsort(keys.bitwise_xor_(_SIGN), stable=True)


def sample_seed(seed: int, epoch: int, index: int) -> int:
    """Return the 64-bit seed of one sample in one epoch: what its random augmentation starts from."""
    return mix(seed, epoch, _SAMPLE, index)


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


def _finalise_(words: Tensor) -> Tensor:
    """Do `splitmix.finalise` in place on int64 words, whose multiplication wraps as unsigned does."""
    words.bitwise_xor_(_shifted(words, 30)).mul_(_signed(MULTIPLY_1))
    words.bitwise_xor_(_shifted(words, 27)).mul_(_signed(MULTIPLY_2))
    return words.bitwise_xor_(_shifted(words, 31))


def _shifted(words: Tensor, bits: int) -> Tensor:
    """Shift right without copies of the sign bit, as unsigned words do."""
    return (words >> bits).bitwise_and_((1 << (64 - bits)) - 1)

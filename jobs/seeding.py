"""`seed(s)`: objects that are built from here on are alike in every process."""

from __future__ import annotations

import random

from torchrelay.errors import UsageError
from torchrelay.jobs.random_streams import numpy_module

_seed: int | None = None


def seed(s: int) -> None:
    """Set Python's, numpy's and torch's global streams (CUDA included) alike on all ranks; remember `s`.

    Each library is seeded as its own users do it (`torch.manual_seed(s)`, `random.seed(s)`,
    `numpy.random.seed(s % 2**32)`). `s` is an integer from 0 to 2**64 - 1; anything else is a UsageError.
    When a fresh run starts its first epoch task, every rank's streams are derived anew from (s, rank).
    """
    global _seed  # noqa: PLW0603 - the process has one set of global streams, and this is what they started from
    import torch

    checked = check_seed(s)
    random.seed(checked)
    torch.manual_seed(checked)
    numpy = numpy_module(load=True)
    if numpy is not None:
        numpy.random.seed(checked % 2**32)
    _seed = checked


def current_seed() -> int | None:
    """Return what `seed` was last called with in this process; None before any call."""
    return _seed


def check_seed(s: int) -> int:
    """Return `s` if it can be a seed; raises UsageError saying what can."""
    if isinstance(s, bool) or not isinstance(s, int) or not 0 <= s < 2**64:
        raise UsageError(f"a seed is an integer from 0 to 2**64 - 1, not {s!r}")
    return s

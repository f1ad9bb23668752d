"""Keep the former place of `torchrelay.models.archive.singa`, for programs that import it from here."""

from __future__ import annotations

import warnings

from torchrelay.models.archive.singa import read_singa_states

__all__ = ["read_singa_states"]

warnings.warn(
    "torchrelay.checkpoint.archive.singa is torchrelay.models.archive.singa now: import it from there ",
    DeprecationWarning,
    stacklevel=2,
)

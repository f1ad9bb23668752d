"""Which element type a tensor shall have: one for all, or one per pattern of names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from torchrelay.checkpoint.format.manifest.position import matches
from torchrelay.checkpoint.format.names import nearest
from torchrelay.errors import UsageError

Cast = torch.dtype | Mapping[str, torch.dtype] | None
"""A floating-point type, or types by pattern of which the first that fits counts; None changes nothing."""


def checked_cast(dtype: Cast) -> Cast:
    """The same; raises UsageError for anything that is no floating-point type."""
    for one in dtype.values() if isinstance(dtype, Mapping) else [] if dtype is None else [dtype]:
        if not isinstance(one, torch.dtype) or not one.is_floating_point:
            raise UsageError(f"dtype={one!r}: give a floating-point type of torch, such as torch.bfloat16")
    return dtype


def check_types_used(names: Iterable[str], dtype: Cast) -> None:
    """Raise UsageError for a pattern that means none of the names: most likely a misspelt one."""
    known = list(dict.fromkeys(names)) if isinstance(dtype, Mapping) else []
    for pattern in dtype if isinstance(dtype, Mapping) else ():
        if not any(matches(name, pattern) for name in known):
            raise UsageError(f"no leaf matches {pattern!r}, a pattern of dtype{nearest(pattern, known)}")


def cast_of(name: str, dtype: Cast) -> torch.dtype | None:
    """The type for a name; None where it stays what it is."""
    if not isinstance(dtype, Mapping):
        return dtype
    return next((one for pattern, one in dtype.items() if matches(name, pattern)), None)


def cast(tensor: torch.Tensor, name: str, dtype: Cast) -> torch.Tensor:
    """The tensor in its new type; only floating-point tensors are converted."""
    wanted = cast_of(name, dtype)
    return tensor.to(wanted) if wanted is not None and tensor.is_floating_point() else tensor

"""The device that a user names for what is loaded."""

from __future__ import annotations

import torch

from torchrelay.errors import UsageError


def checked_device(device: str | torch.device | None) -> str | torch.device | None:
    """The same; raises UsageError for one that torch does not know or this machine lacks."""
    if device is None:
        return None
    try:
        torch.empty(0, device=device)
    except Exception as error:  # AssertionError, RuntimeError, TypeError: it depends on the device
        reason = str(error).partition("\n")[0].partition(". ")[0]
        raise UsageError(
            f"device={device!r} cannot be used here ({reason}): give 'cpu', or another"
        ) from error
    return device

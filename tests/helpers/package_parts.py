"""What `package_models` imports: it comes with it into the archive."""

from __future__ import annotations

import torch


def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2

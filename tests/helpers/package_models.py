"""Models for tests of archives and packages; their source is what packages archive."""

from __future__ import annotations

import package_parts
import torch
from torch import nn


class Tied(nn.Module):
    """Batch norm, tied weights, a list of inputs, a dict of results."""

    def __init__(self, width: int = 4, *, bias: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(3, width, bias=bias)
        self.norm = nn.BatchNorm1d(width)
        self.second = nn.Linear(3, width, bias=bias)
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.full((width,), 2.0), persistent=False)
        self.shift = torch.arange(float(width))

    def forward(self, x: torch.Tensor, parts: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        with torch.no_grad():
            doubled = package_parts.doubled(x)
        hidden = self.norm(self.first(x) + self.second(doubled)) * self.scale + self.shift
        return {"hidden": hidden, "sum": hidden.sum(1) + parts[0] * parts[1]}


def inputs(batch: int, seed: int = 0) -> tuple[torch.Tensor, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    one, two, three = (torch.randn(*shape, generator=generator) for shape in ((batch, 3), (batch,), (batch,)))
    return one, [two, three]


def trained(**options: bool) -> Tied:
    """A model whose statistics are no longer those of its beginning."""
    torch.manual_seed(7)
    model = Tied(**options)
    for seed in range(3):
        model(*inputs(5, seed))
    return model

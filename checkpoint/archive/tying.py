"""Parameters that are one under several names: noted, and tied again where torch made several of them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn


def shared_parameters(model: nn.Module) -> list[list[str]]:
    """The names of each parameter that has several."""
    found: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), []).append(name)
    return [names for names in found.values() if len(names) > 1]


def tie_again(model: nn.Module, shared: Sequence[Sequence[str]]) -> None:
    """Make the parameters of these names the one of the first."""
    for names in shared:
        first = model.get_parameter(names[0])
        for name in names[1:]:
            path, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(path), leaf, first)

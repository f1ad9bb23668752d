"""Tensors that a run holds for others: it never changes them, and every checkpoint of it has them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from torchrelay.checkpoint.format.dtypes import by_name, torch_dtype
from torchrelay.checkpoint.format.manifest.schema import Manifest
from torchrelay.records import dataclass


@dataclass(frozen=True)
class Form:
    """Element type and shape of a tensor; `same_as` names another one of its blob that it is."""

    dtype: str
    shape: tuple[int, ...]
    same_as: str | None = None

    def made(self) -> torch.Tensor:
        """A new tensor of this form, its content whatever was in memory."""
        return torch.empty(self.shape, dtype=torch_dtype(by_name(self.dtype)))


class FrozenTensors(nn.Module):
    """A tree of frozen parameters with given names, `encoder.0.weight`: their content comes by a load."""

    def __init__(self, forms: Mapping[str, Form]) -> None:
        super().__init__()
        made: dict[str, nn.Parameter] = {}
        for name, form in forms.items():
            *parts, last = name.split(".")
            folder: nn.Module = self
            for part in parts:
                # The usual ways in refuse names that modules have as attributes, such as `type`.
                folder = folder._modules.setdefault(part, nn.Module()) or folder
            known = made.get(form.same_as or "")
            made[name] = nn.Parameter(form.made(), requires_grad=False) if known is None else known
            folder._parameters[last] = made[name]

    def tensors(self) -> dict[str, torch.Tensor]:
        """All of them by name, such as a module's `load_state_dict` takes."""
        return {name: one.detach() for name, one in self.named_parameters(remove_duplicate=False)}


def forms_by_blob(manifest: Manifest, names: Iterable[str]) -> dict[str, dict[str, Form]]:
    """The forms of stored tensors by blob and by the rest of their names; `""` is a blob that is a tensor."""
    found: dict[str, dict[str, Form]] = {}
    first: dict[tuple[str, str], str] = {}
    for name in names:
        leaf = manifest.leaves[manifest.rows[name][0]]
        if leaf.kind == "tensor":
            inner = name[len(leaf.blob) :].removeprefix(".")
            source = first.setdefault((leaf.blob, leaf.alias_of or name), inner)
            same_as = None if source == inner else source
            found.setdefault(leaf.blob, {})[inner] = Form(leaf.dtype or "", leaf.shape, same_as)
    return found


def made_of(forms: Mapping[str, Form]) -> torch.Tensor | FrozenTensors:
    """What holds a blob of these forms."""
    if set(forms) == {""}:
        return forms[""].made()
    return FrozenTensors(forms)

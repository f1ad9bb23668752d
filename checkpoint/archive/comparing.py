"""What fits between an archive and a model, decided before anything changes; reads no tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import nn

from torchrelay.checkpoint.archive.archive_file import MODEL, ArchiveFile
from torchrelay.checkpoint.archive.entries import Entry
from torchrelay.checkpoint.state.leaves.module import ModuleEntry
from torchrelay.errors import BlobError
from torchrelay.records import dataclass


@dataclass(frozen=True)
class StateReport:
    """What became of each state. `missing`: of the model, not in the archive. `unexpected`: the reverse.

    `unlike`: "name: the model has ..., the archive ..." of those with another shape or element type.
    `loaded`: the names that were loaded.
    """

    loaded: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    unlike: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether everything fitted."""
        return not (self.missing or self.unexpected or self.unlike)

    def __str__(self) -> str:
        parts = [f"{len(self.loaded)} states loaded"]
        for what, names in (
            ("missing from the archive", self.missing),
            ("unknown to the model", self.unexpected),
        ):
            if names:
                parts.append(f"{len(names)} {what}: {', '.join(names)}")
        return "; ".join([*parts, *self.unlike])

    def check(self, what: str) -> None:
        """Raise BlobError with all differences, if there are some."""
        if not self.complete:
            text = str(replace(self, loaded=())).removeprefix("0 states loaded; ")
            raise BlobError(
                f"{what} does not fit the model: {text}. strict=False loads what fits and reports the rest"
            )


def compared(archive: ArchiveFile, wanted: Mapping[str, ModuleEntry]) -> StateReport:
    """The report of a load that has not begun: `loaded` is what can be."""
    stored = archive.tensors(MODEL).entries
    every = {**stored, **{name: stored[first] for name, first in archive.ties.items()}}
    have = {*every, *archive.extra}
    unlike = {name: text for name, entry in wanted.items() if (text := _unlike(name, entry, every, archive))}
    unlike.update(_untied(wanted, every, archive))
    return StateReport(
        tuple(name for name in wanted if name in have and name not in unlike),
        tuple(name for name in wanted if name not in have),
        tuple(sorted(name for name in have if name not in wanted)),
        tuple(unlike.values()),
    )


def _unlike(name: str, entry: ModuleEntry, stored: Mapping[str, Entry], archive: ArchiveFile) -> str:
    """What differs in a state that both sides have, or nothing."""
    value, found = entry.value, stored.get(name)
    if found is None:
        tensor = isinstance(value, torch.Tensor) and name in archive.extra
        return f"{name}: the model has a tensor, the archive a plain value" if tensor else ""
    if not isinstance(value, torch.Tensor):
        return f"{name}: the model has a plain value, the archive a tensor"
    dtype = str(value.dtype).removeprefix("torch.")
    lazy = nn.parameter.is_lazy(value)
    if dtype == found.element.name and (lazy or tuple(value.shape) == found.shape):
        return ""
    here = dtype if lazy else f"{dtype}{list(value.shape)}"
    return f"{name}: the model has {here}, the archive {found.element.name}{list(found.shape)}"


def _untied(
    wanted: Mapping[str, ModuleEntry], stored: Mapping[str, Entry], archive: ArchiveFile
) -> dict[str, str]:
    """States that are one tensor in the model and two unlike ones in the archive."""
    first: dict[int, str] = {}
    found: dict[str, str] = {}
    for name, entry in wanted.items():
        if name in stored and isinstance(entry.value, torch.Tensor):
            known = first.setdefault(id(entry.value), name)
            if known != name and stored[known].digests != stored[name].digests:
                found[name] = f"{name} and {known} are one tensor in the model and differ in the archive"
    return found

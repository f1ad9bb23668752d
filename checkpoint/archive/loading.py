"""`load_states`: an archive into a model that was made by its own code, all or nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, overload

import torch
from torch import nn

from torchrelay.checkpoint.archive.archive_file import MODEL, ArchiveFile, open_archive_file
from torchrelay.checkpoint.archive.comparing import StateReport, compared
from torchrelay.checkpoint.archive.publishing import Where
from torchrelay.checkpoint.archive.states import checked, entries_of
from torchrelay.checkpoint.archive.tying import shared_parameters, tie_again
from torchrelay.checkpoint.disk.value_decoding import decode
from torchrelay.checkpoint.state.module_leaves import ModuleEntry
from torchrelay.errors import BlobError, PartiallyLoadedError


@overload
def load_states(path: Where, model: nn.Module, *, strict: Literal[True] = True) -> dict[str, Any]: ...
@overload
def load_states(
    path: Where, model: nn.Module, *, strict: Literal[False]
) -> tuple[dict[str, Any], StateReport]: ...


def load_states(
    path: Where, model: nn.Module, *, strict: bool = True
) -> dict[str, Any] | tuple[dict[str, Any], StateReport]:
    """Load the states of an archive or package into a model; returns the aux values, tensors on the CPU.

    Names, shapes and element types must be the model's, else nothing changes and one error lists all
    differences. With `strict=False` what fits is loaded, and a pair comes back: the aux values, and the
    report of what was missing, unexpected or unlike. Everything is read and verified before the first state
    changes. Lazy modules get the archive's shapes, modules on the meta device get memory on the CPU.
    Raises UsageError where there is no file, BlobError for differences, FormatError for a foreign file,
    DamagedError naming the member, StorageError.
    """
    checked(model)
    with open_archive_file(path) as archive:
        aux = archive.aux()
        report = fill(archive, model, strict=strict)
    return aux if strict else (aux, report)


def fill(archive: ArchiveFile, model: nn.Module, *, strict: bool) -> StateReport:
    """Load the states; see `load_states`."""
    wanted = {entry.name: entry for entry in entries_of(model)}
    report = compared(archive, wanted)
    if strict:
        report.check(archive.what)
    fresh = _read(archive, report.loaded)
    _check_all_real(wanted, report.loaded, model)
    _put(model, [(wanted[name], fresh[name]) for name in report.loaded])
    return report


def _read(archive: ArchiveFile, names: Sequence[str]) -> dict[str, Any]:
    """What is stored under these names; tied names have one tensor."""
    stored, made = archive.tensors(MODEL), dict[str, Any]()
    for name in names:
        if name in archive.extra:
            made[name] = decode(archive.extra[name])
            continue
        first = archive.ties.get(name, name)
        if first not in made:
            made[first] = stored.read(first)
        made[name] = made[first]
    return made


def _check_all_real(wanted: Mapping[str, ModuleEntry], loaded: Sequence[str], model: nn.Module) -> None:
    """A module on the meta device is filled whole, or its forward pass would fail later in odd ways."""
    known = {id(wanted[name].value) for name in loaded}
    tensors = [*model.named_parameters(), *model.named_buffers()]
    if empty := [name for name, one in tensors if one.is_meta and id(one) not in known]:
        raise BlobError(
            f"{', '.join(empty[:8])} would stay on the meta device, as the archive does not have them: "
            "make the model on a real device"
        )


def _put(model: nn.Module, found: Sequence[tuple[ModuleEntry, Any]]) -> None:
    meta = any(isinstance(entry.value, torch.Tensor) and entry.value.is_meta for entry, _ in found)
    ties = shared_parameters(model) if meta else []
    try:
        model.load_state_dict({entry.key: value for entry, value in found}, strict=False, assign=meta)
    except RuntimeError as error:
        raise PartiallyLoadedError(
            f"the model's own load_state_dict refused states after some had changed: {error}"
        ) from error
    tie_again(model, ties)

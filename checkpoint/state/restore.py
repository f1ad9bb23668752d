"""Leaves back into objects, in two phases: everything is proved before anything changes.

plan = restoration(objects, specs, values)        # compares and raises; changes nothing
for read in plan.reads: fill(read.memory())       # into live memory where that is possible
workspace.update(plan.finish())                   # the rest: copies, optimizers, load_state_dict
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from torchrelay.checkpoint.disk.canonical import Json
from torchrelay.checkpoint.state.flatten import parameter_names
from torchrelay.checkpoint.state.kinds import Kind, kind_of
from torchrelay.checkpoint.state.leaf import LeafSpec, Role
from torchrelay.checkpoint.state.module_restore import draft_module
from torchrelay.checkpoint.state.optimizer_restore import draft_optimizer
from torchrelay.checkpoint.state.restoring import Draft, Read
from torchrelay.checkpoint.state.stateful_restore import draft_new, draft_stateful, draft_tensor, draft_value
from torchrelay.errors import PartiallyLoadedError, RelayError

__all__ = ["Read", "Restoration", "restoration"]


class Restoration:
    """A load that fits: what to read, and what to do when all of it is read.

    Reads into live memory change user objects, so a failure from the first read on leaves them partly
    loaded. `created` holds, after `finish`, the values and new tensors by blob name; `missing` and
    `unexpected` are the leaves that `strict=False` has skipped.
    """

    def __init__(self, draft: Draft, builders: Mapping[str, Callable[[], Any]]) -> None:
        self.reads: tuple[Read, ...] = tuple(draft.reads)
        self.missing: tuple[str, ...] = tuple(draft.findings.missing)
        self.unexpected: tuple[str, ...] = tuple(draft.findings.unexpected)
        self.created: dict[str, object] = {}
        self._steps = draft.steps
        self._builders = builders

    def finish(self) -> dict[str, object]:
        """Install what was read, and give back what belongs into the workspace.

        These are all JSON values, and tensors for which no object was given. Raises
        PartiallyLoadedError when a `load_state_dict` of the user's refuses its state.
        """
        with torch.no_grad():
            for blob, step in self._steps:
                _run(blob, step)
            self.created = {blob: build() for blob, build in self._builders.items()}
        return self.created


def restoration(
    objects: Mapping[str, Any],
    specs: Mapping[str, LeafSpec],
    values: Mapping[str, Json],
    *,
    strict: bool = True,
    kept: Collection[str] = (),
    why_absent: Callable[[str], str] = lambda name: "",
    in_place: Mapping[str, torch.Tensor] | None = None,
) -> Restoration:
    """Plan to load the stored leaves `specs`, with the content `values` of values, into `objects`.

    Modules, optimizers and tensors are loaded in place. Stored blobs without an object are created, if
    they are tensors or values; so leave out of `specs` what is not wanted, and out of `objects` tensors
    that may be replaced. Leaves named in `kept` stay as the program made them; `why_absent` says why the
    checkpoint lacks a leaf, where that is known. Objects in `in_place` are taken care of (see there).
    Raises BlobError with a list of all leaves that are missing, unexpected (neither with
    `strict=False`) or of another form, and DamagedError for malformed values. No object has changed
    then, nor after success: that begins with the reads.
    """
    stored = {name: spec for name, spec in specs.items() if spec.role is not Role.RNG}
    settled = in_place or {}
    alone = bool(stored) or len(settled) < len(objects)
    names = parameter_names(objects) if alone else {}
    draft = Draft(stored, values, names, kept, settled if alone else {})
    builders = {}
    for blob, value in objects.items() if alone else ():
        if blob not in settled and (builder := _draft_blob(draft, blob, value)) is not None:
            builders[blob] = builder
    for blob in draft.blobs:
        if blob not in objects and (builder := draft_new(draft, blob)) is not None:
            builders[blob] = builder
    draft.findings.check(stored, strict=strict, kept=kept, why_absent=why_absent)
    return Restoration(draft, builders)


def _draft_blob(draft: Draft, blob: str, value: Any) -> Callable[[], Any] | None:
    kind = kind_of(value)
    if kind is Kind.VALUE:
        return draft_value(draft, blob, value)
    _DRAFTERS[kind](draft, blob, value)
    return None


_DRAFTERS: dict[Kind, Callable[[Draft, str, Any], None]] = {
    Kind.MODULE: draft_module,
    Kind.OPTIMIZER: draft_optimizer,
    Kind.STATEFUL: draft_stateful,
    Kind.TENSOR: draft_tensor,
}


def _run(blob: str, step: Callable[[], None]) -> None:
    try:
        step()
    except RelayError:
        raise
    except Exception as error:
        raise PartiallyLoadedError(
            f"blob {blob!r} refused its stored state ({type(error).__name__}: {error}); other objects may"
            " have changed already: load all of them again, or build the object as it was when it was saved"
        ) from error

"""Leaves back into objects, in two phases: everything is proved before anything changes.

plan = restoration(objects, specs, values)        # compares and raises; changes nothing
for read in plan.reads: fill(read.memory())       # into live memory where that is possible
workspace.update(plan.finish())                   # the rest: copies, optimizers, load_state_dict
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from torchrelay.checkpoint.format.canonical_json import Json
from torchrelay.checkpoint.format.manifest.schema import OF_POSITION
from torchrelay.checkpoint.state.kinds import Kind, kind_of
from torchrelay.checkpoint.state.leaf import LeafSpec
from torchrelay.checkpoint.state.leaves.optimizer import parameters
from torchrelay.checkpoint.state.reads import Read, outside_inference_mode
from torchrelay.checkpoint.state.restore.container import ContainerLoad, draft_container, regrouped
from torchrelay.checkpoint.state.restore.module import draft_module
from torchrelay.checkpoint.state.restore.optimizer import draft_optimizer, draft_shared_parameters
from torchrelay.checkpoint.state.restore.plan import Draft, shared_across_files
from torchrelay.checkpoint.state.restore.stateful import draft_new, draft_stateful, draft_tensor, draft_value
from torchrelay.checkpoint.state.tensor_checks import not_initialised
from torchrelay.errors import PartiallyLoadedError, RelayError

__all__ = ["Read", "Restoration", "drafted", "restoration"]


class Restoration:
    """A load that fits: what to read, and what to do when all of it is read.

    Reads into live memory change user objects, so a failure from the first read on leaves them partly
    loaded. `created` holds, after `finish`, the values, containers and new tensors by blob name; `missing`
    and `unexpected` are the leaves that `strict=False` has skipped, `replaced` the given values, and the
    containers of another type, in whose place something else is created. `left_out` are stored leaves that
    cannot be loaded without those that are excluded.
    """

    def __init__(
        self, draft: Draft, builders: Mapping[str, Callable[[], Any]], replaced: Collection[str] = ()
    ) -> None:
        self.reads: tuple[Read, ...] = tuple(draft.reads)
        self.missing: tuple[str, ...] = tuple(draft.findings.missing)
        self.unexpected: tuple[str, ...] = tuple(draft.findings.unexpected)
        self.created: dict[str, object] = {}
        self.replaced: tuple[str, ...] = tuple(replaced)
        self.left_out: tuple[str, ...] = tuple(draft.left_out)
        self._steps = [*draft.fills, *draft.steps]
        draft.steps.clear()  # they refer to the draft
        self._builders = builders

    def finish(self) -> dict[str, object]:
        """Install what was read, and give back what belongs into the workspace.

        These are all values, containers among them, and tensors for which no object was given. Raises
        PartiallyLoadedError when a `load_state_dict` of the user's refuses its state.
        """
        with outside_inference_mode(), torch.no_grad():
            for blob, step in self._steps:
                _run(blob, step)
            self._steps.clear()  # they refer to what made them
            self.created = {blob: build() for blob, build in self._builders.items()}
        return self.created


def restoration(
    objects: Mapping[str, Any],
    specs: Mapping[str, LeafSpec],
    values: Mapping[str, Json],
    *,
    strict: bool = True,
    kept: Collection[str] = (),
    offered: Collection[str] = (),
    untouched: Collection[str] = (),
    may_lack: Collection[str] = (),
    why_absent: Callable[[str], str] = lambda name: "",
    in_place: Mapping[str, torch.Tensor] | None = None,
    late_buffers: bool = False,
    same_content: Callable[[str, str], bool] | None = None,
    exclude: str | None = "exclude",
    excluded: Sequence[str] = (),
    within: str = "",
    cast: Callable[[str], torch.dtype | None] | None = None,
) -> Restoration:
    """Plan to load the stored leaves `specs`, with the content `values` of values, into `objects`.

    Modules, optimizers, tensors and containers are loaded in place. Stored blobs without an object are
    created, if they are tensors or values; so leave out of `specs` what is not wanted, and out of `objects`
    tensors that may be replaced. Leaves named in `kept` stay as the program made them, and so do the objects
    in `untouched`, which only name parameters; leaves in `offered` may have no object, and of the blobs
    `may_lack` the checkpoint may lack leaves, which stay too. `why_absent` says why the checkpoint lacks a
    leaf, where that is known. Objects in `in_place` are taken care of (see there). Buffers that a module has
    not made yet are made where everything else fits; without `strict` only if `late_buffers` says so.
    `same_content`: see `Draft`. `exclude` is the caller's argument that leaves out leaves, `excluded` what
    it was given, and `within` what the names of its `rename` are relative to, for messages. `cast` says to
    which floating-point type a leaf may be converted.
    Raises BlobError with a list of all leaves that are missing, unexpected (neither with
    `strict=False`) or of another form, and DamagedError for malformed values. No object has changed
    then, nor after success: that begins with the reads.
    """
    stored = {name: spec for name, spec in specs.items() if spec.role not in OF_POSITION}
    stored, values, partial = regrouped(objects, stored, values)
    settled = in_place or {}
    stored = shared_across_files(stored, settled)
    alone = bool(stored) or len(settled) < len(objects)
    known, placed = (objects, settled) if alone else ({}, {})
    draft = Draft(stored, values, known, kept, placed, offered, may_lack, same_content=same_content)
    draft.excluded, draft.cast = excluded, cast
    load = ContainerLoad(objects)
    given = [blob for blob in objects if not (blob in settled or blob in untouched)] if alone else []
    builders = drafted(draft, {blob: objects[blob] for blob in given}, objects, load, partial)
    draft.conclude(strict=strict, late_buffers=strict or late_buffers)
    draft.findings.check(
        stored,
        strict=strict,
        kept=kept,
        why_absent=why_absent,
        exclude=exclude,
        excluded=excluded,
        within=within,
        converts=cast is not None,
    )
    fixed = [blob for blob in given if blob in builders and kind_of(objects[blob]) is Kind.VALUE]
    return Restoration(draft, builders, [*load.replaced, *fixed])


def drafted(
    draft: Draft,
    given: Mapping[str, Any],
    objects: Mapping[str, Any],
    load: ContainerLoad,
    partial: Collection[str],
) -> dict[str, Callable[[], Any]]:
    """Draft the loads into `given`, which are among `objects`, and of stored blobs without an object."""
    builders: dict[str, Callable[[], Any]] = {}
    containers = {blob for blob, value in given.items() if kind_of(value) is Kind.CONTAINER}
    # Modules first, as their load hooks may tell optimizers what parameters were called; and tensors, as what
    # an optimizer shared with one may have become two, of which only the optimizer can get a new one.
    fixed_first = sorted(given, key=lambda blob: not isinstance(given[blob], nn.Module | torch.Tensor))
    for blob, value in given.items():
        if isinstance(value, torch.optim.Optimizer):
            draft_shared_parameters(draft, blob, value)
    for blob in fixed_first:
        if blob in containers:
            continue
        if (builder := _draft_blob(draft, blob, given[blob])) is not None:
            builders[blob] = builder
    for blob in [blob for blob in given if blob in containers]:  # they may hold tensors of the others
        made = draft_container(draft, blob, given[blob], load, partial=blob in partial)
        if made is not None:
            builders[blob] = made
    for blob in draft.blobs:
        if blob not in objects and (builder := draft_new(draft, blob)) is not None:
            builders[blob] = builder
    return builders


def _draft_blob(draft: Draft, blob: str, value: Any) -> Callable[[], Any] | None:
    kind = kind_of(value)
    if kind is Kind.MODULE:
        lazy = [name for name, one in draft.states.of(value).items() if is_lazy(one)]
        if lazy:
            draft.refuse(blob, not_initialised(f"{blob}.{lazy[0]}"))
            return None
    if isinstance(value, torch.optim.Optimizer):
        empty = [one for one in parameters(value) if is_lazy(one) or one.is_meta]
        if empty:
            where = "not initialised yet" if is_lazy(empty[0]) else "on the meta device"
            draft.refuse(
                blob,
                f"{blob} is an optimizer of parameters {where}: give the model its memory first (load it, "
                "model.to_empty(device=...), or a forward pass), and build the optimizer after that",
            )
            return None
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

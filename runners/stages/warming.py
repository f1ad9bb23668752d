"""Weights of upstream runs into the objects of a run that begins: after `init`, before epoch 0 is saved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from torchrelay.checkpoint.format.names import nearest
from torchrelay.checkpoint.load.checkpoint import Checkpoint
from torchrelay.checkpoint.load.info import UPSTREAM
from torchrelay.checkpoint.load.lookup import Below, pattern_list
from torchrelay.checkpoint.load.renaming import LoadResult
from torchrelay.checkpoint.state.flatten import leaves_of
from torchrelay.checkpoint.state.kinds import Kind, kind_of
from torchrelay.checkpoint.state.leaf import spec_of
from torchrelay.checkpoint.state.leaves.tree import container_tensors
from torchrelay.checkpoint.state.names import submodule
from torchrelay.errors import BlobError, UsageError
from torchrelay.jobs.cluster import dotted_prefixes
from torchrelay.jobs.workspace import Workspace
from torchrelay.records import dataclass
from torchrelay.runners.stages.given import InitFrom
from torchrelay.runners.stages.sources import Source


@dataclass(frozen=True)
class WarmStart:
    """What one `init_from` did; leaves have the names that the job calls them by."""

    upstream: str
    loaded: tuple[str, ...]
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    misshapen: tuple[str, ...] = ()

    def __str__(self) -> str:
        skipped = {"missing": self.missing, "unexpected": self.unexpected, "of another form": self.misshapen}
        told = [f"; {what}: {', '.join(names)}" for what, names in skipped.items() if names]
        return f"{len(self.loaded)} leaves of {self.upstream}{''.join(told)}"


def warm(start: InitFrom, source: Source, workspace: Workspace) -> WarmStart:
    """Load what one `init_from` says into a node's objects; all or nothing of it.

    Raises BlobError with everything that does not fit, UsageError for names that are none.
    """
    objects = _objects(start, source, workspace)
    below = Below(start.prefix or start.into or "", start.into or "", start.rename or None)
    _check_prefix(start, source, below)
    exclude = pattern_list(start.exclude)
    misshapen = () if start.strict else _misshapen(source.checkpoint, objects, below)
    try:
        result = source.checkpoint.load(
            objects, strict=start.strict, rename=below, exclude=[*exclude, *misshapen]
        )
    except BlobError as error:
        raise BlobError(
            f"init_from {source.name}: {error}; strict=False skips all that does not fit"
        ) from None
    except UsageError as error:
        raise type(error)(f"init_from {source.name}: {error}") from None
    if not result.loaded:
        known = ", ".join([*result.missing, *misshapen][:3])
        raise UsageError(
            f"init_from {source.name}: no leaf of it goes with {known}, so nothing would be taken: say which "
            f"names go together by rename= (there is {', '.join(result.unexpected[:3]) or 'nothing else'})"
        )
    return _told(source, result, misshapen)


def fill_kept(source: Source, workspace: Workspace) -> None:
    """Load what is kept of an upstream into what holds it."""
    for blob in source.stage.record.kept:
        name = f"{UPSTREAM}{source.stage.alias}.{blob}"
        result = source.checkpoint.load({name: workspace[name]}, strict=False, rename=Below(blob, name))
        if result.missing:
            raise BlobError(f"{source.name} lacks {', '.join(result.missing)}, which was there a moment ago")


def _told(source: Source, result: LoadResult, misshapen: tuple[str, ...]) -> WarmStart:
    return WarmStart(source.name, result.loaded, result.missing, result.unexpected, misshapen)


def _objects(start: InitFrom, source: Source, workspace: Workspace) -> dict[str, Any]:
    registered = {
        name: entry.target
        for name, entry in workspace.entries().items()
        if entry.blob is not None and not name.startswith(UPSTREAM)
    }
    if start.into is not None:
        return {start.into: _target(start.into, registered)}
    wanted = {
        name: value
        for name, value in registered.items()
        if name in source.checkpoint.blobs and _is_wanted(start, value)
    }
    if not wanted:
        raise UsageError(
            f"init_from {source.name}: no registered module or tensor has a name that the upstream has; it "
            f"has {', '.join(source.checkpoint.blobs)}: say which go together by into= and prefix="
        )
    return wanted


def _is_wanted(start: InitFrom, value: Any) -> bool:
    kind = kind_of(value)
    if kind in (Kind.MODULE, Kind.TENSOR):
        return True
    if kind is Kind.CONTAINER:
        return start.include_others or next(container_tensors("", value), None) is not None
    if kind is Kind.OPTIMIZER:
        return start.include_optimizer
    return start.include_others and kind is Kind.STATEFUL


def _target(into: str, registered: Mapping[str, Any]) -> Any:
    """The registered object of this name, or the part of a registered module."""
    found = registered.get(into)
    if found is None:
        blob = next((name for name in registered if into.startswith(f"{name}.")), None)
        module = registered.get(blob or "")
        if isinstance(module, nn.Module) and blob is not None:
            found = submodule(module, into[len(blob) + 1 :])
            if found is None:
                parts = [f"{blob}.{name}" for name, _ in module.named_modules() if name]
                raise UsageError(f"init_from: blob {blob!r} has no part {into!r}{nearest(into, parts)}")
    if found is None or kind_of(found) not in (Kind.MODULE, Kind.TENSOR, Kind.CONTAINER):
        raise UsageError(
            f"init_from: into={into!r} is no registered module or tensor, and no part of one"
            f"{nearest(into, registered)}"
        )
    return found


def _check_prefix(start: InitFrom, source: Source, below: Below) -> None:
    """Refuse a prefix that means nothing: without `strict` it would be a warm start that takes nothing."""
    names = list(source.checkpoint.manifest.rows)
    if start.into is not None and not any(below.of(name) for name in names):
        known = dict.fromkeys(prefix for name in names for prefix in [*dotted_prefixes(name), name])
        near = nearest(below.prefix, known)
        raise UsageError(f"init_from {source.name}: nothing there lies below {below.prefix!r}{near}")


def _misshapen(checkpoint: Checkpoint, objects: Mapping[str, Any], below: Below) -> tuple[str, ...]:
    """Leaves that both sides have in different forms."""
    live = {leaf.name: spec_of(leaf) for leaf in leaves_of(objects)}
    found: list[str] = []
    for leaf in checkpoint.leaves:
        here = live.get(below.of(leaf.name))
        if here is not None and (here.kind, here.dtype, here.shape) != (leaf.kind, leaf.dtype, leaf.shape):
            found.append(here.name)
    return tuple(dict.fromkeys(found))

"""Load from upstream runs: configuration and source (`load_upstream`), and initial weights."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn

from torchrelay.checkpoint.format.manifest.schema import OF_POSITION
from torchrelay.checkpoint.format.names import UPSTREAM, nearest
from torchrelay.checkpoint.load.checkpoint import Checkpoint, open_checkpoint
from torchrelay.checkpoint.load.info import records_in
from torchrelay.checkpoint.load.lookup import Below, choose, pattern_list
from torchrelay.checkpoint.state.flatten import leaves_of
from torchrelay.checkpoint.state.leaf import spec_of
from torchrelay.checkpoint.state.names import Kind, kind_of, submodule
from torchrelay.checkpoint.state.tree_leaves import container_tensors
from torchrelay.checkpoint.storage.open import is_url
from torchrelay.errors import BlobError, UsageError
from torchrelay.jobs.cluster import dotted_prefixes
from torchrelay.jobs.runtime import local_directory, split_run
from torchrelay.jobs.session import Peers, together
from torchrelay.jobs.workspace import Workspace
from torchrelay.metadata.code.imports import LoadedCode, load_code
from torchrelay.metadata.lineage import LineageStage, StageRecord, check_alias
from torchrelay.metadata.run_directory import RunDirectory
from torchrelay.records import dataclass
from torchrelay.runners.remote_runs.resolve import parse_selector
from torchrelay.runners.training.extras.upstream import InitFrom, Upstream, UpstreamRuns
from torchrelay.runners.training.plan import WarmStart


class LoadedUpstream:
    """A run that another one is built on; see `load_upstream`. `path` is its directory or copy."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def config(self) -> dict[str, Any]:
        """Its resolved configuration, with overrides and defaults, as a new dict.

        Raises UsageError for a run without a configuration: a plain program has it in its `code`.
        """
        from torchrelay.jobs.config.interpolation import configuration

        return copy.deepcopy(configuration(self.path))

    @cached_property
    def code(self) -> LoadedCode:
        """Its source, as `load_code` returns it; raises UsageError if it was not archived."""
        return load_code(self.path)

    def __repr__(self) -> str:
        return f"<upstream in {self.path}>"


def load_upstream(
    alias: str, run: str | os.PathLike[str], upstream: Mapping[str, Any] | None = None
) -> LoadedUpstream:
    """Return configuration and source of an upstream run, in training, resume and deployment alike.

    Nothing is executed until a module is imported from `code`; that runs the archived code with the rights of
    this process.

    Args:
        alias: The alias; `"expert/low"` is the upstream `low` of `expert`.
        run: The run that is built on it, already started or not. Its copy in `lineage/` is used if there is
            one and `upstream` does not name another run. A directory of several runs works too: their newest
            copy is used if the upstream is gone. Also the `path` of a loaded upstream.
        upstream: The argument of JobRunner; not needed in deployments.

    Returns:
        The upstream; a copy in `lineage/` has only what was copied.

    Raises:
        UsageError: The upstream is neither there nor copied.

    Example:
        upstream = {"low": "runs/low@best"}
        low = torchrelay.load_upstream("low", "runs/expert", upstream)
        model = low.code.import_module("net").Net(low.config["hyper_parameters"]["width"])
        JobRunner(job, "runs/expert", upstream=upstream)
    """
    from torchrelay.jobs.config.interpolation import LINEAGE, STAGE, stage_folder

    first, *inner = [check_alias(one) for one in str(alias).split("/")]
    if upstream is not None and (not isinstance(upstream, Mapping) or first not in upstream):
        raise UsageError(
            f"load_upstream({alias!r:.80}): invalid upstream={upstream!r:.80}: expected JobRunner's mapping "
            f"with {first!r}"
        )
    given = None if upstream is None else _absolute(upstream[first])
    own = [] if "://" in os.fspath(run) else [local_directory(run, "run")]
    if own and (own[0] / STAGE).is_file():
        given = None
    folder = stage_folder(first, given, own)
    for one in inner:
        folder = folder / LINEAGE / one
        if not (folder / STAGE).is_file():
            raise UsageError(f"load_upstream({alias!r:.80}): stage {folder} does not exist")
    return LoadedUpstream(folder)


def _absolute(one: Any) -> str:
    """Return the absolute location of a run."""
    text = one.run if isinstance(one, Upstream) else one
    if not isinstance(text, str | os.PathLike):
        raise UsageError(f"invalid upstream {text!r:.80}: expected a run such as 'runs/expert@best'")
    path = split_run(os.fspath(text))[0]
    return path if "://" in path else str(Path(path).absolute())


@dataclass(frozen=True)
class WarmStartSource:
    """One opened upstream run: its record, and the names of tensors to keep."""

    checkpoint: Checkpoint
    stage: LineageStage
    kept: tuple[str, ...]

    @property
    def name(self) -> str:
        """Name for messages."""
        return f"{self.stage.alias} ({self.stage.record.path}, epoch {self.stage.record.epoch})"

    def index(self) -> dict[str, Any]:
        """Return the records of this stage and of its own upstream runs, by path of aliases."""
        alias = self.stage.alias
        above = records_in(self.checkpoint)
        return {alias: self.stage.record.json(), **{f"{alias}/{path}": one for path, one in above.items()}}


def open_sources(given: UpstreamRuns, peers: Peers) -> dict[str, WarmStartSource]:
    """Open the upstream runs by alias, identically on every process; changes nothing.

    Raises the errors of `open_checkpoint`, and UsageError for unknown names to keep, on all ranks.
    """
    _check_alike(given, peers)
    if not given:
        return {}
    found: dict[str, WarmStartSource] = {}

    def choose_all() -> dict[str, list[str]] | None:
        if peers.rank != 0:
            return None
        return {alias: _choice(alias, one) for alias, one in given.upstream.items()}

    chosen = together(peers, "choose upstream epochs", choose_all)[0]

    def open_all() -> None:
        for alias, (path, epoch) in chosen.items():
            found[alias] = _opened(given, alias, path, epoch)

    together(peers, "open upstream runs", open_all)
    return found


def _choice(alias: str, one: Upstream) -> list[str]:
    """Return the location and the exact epoch that is selected now."""
    try:
        selector = parse_selector(os.fspath(one.run))
        path = selector.path if is_url(selector.path) else str(Path(selector.path).absolute())
        found = open_checkpoint(path, epoch=selector.epoch)
    except UsageError as error:
        raise type(error)(f"upstream {alias!r}: {error}") from None
    return [path, f"{found.epoch},branch={found.branch}"]


def _opened(given: UpstreamRuns, alias: str, path: str, epoch: str) -> WarmStartSource:
    """Open one upstream run."""
    checkpoint = open_checkpoint(path, epoch=epoch)
    one = given.upstream[alias]
    kept = _kept(checkpoint, alias, one)
    run = None if is_url(path) else RunDirectory(path)
    identity = run.known_identity() if run is not None else {}
    facts, manifest = checkpoint.facts, checkpoint.manifest
    record = StageRecord(
        asked=os.fspath(one.run),
        path=path,
        job=identity.get("job"),
        run_id=identity.get("uuid") or facts.run_id,
        epoch=checkpoint.epoch,
        branch=checkpoint.branch,
        created=identity.get("created"),
        metrics=dict(facts.metrics),
        total_steps=facts.total_steps,
        seed=facts.seed,
        applied=tuple(start.json() for start in given.init_from if start.upstream == alias),
        kept=tuple(dict.fromkeys(manifest.leaves[manifest.rows[name][0]].blob for name in kept)),
    )
    blobs = [
        {"name": one.name, "kind": one.kind, "bytes": one.bytes, "leaves": len(one.leaves)}
        for one in checkpoint.blobs.values()
    ]
    stage = LineageStage(alias, record, blobs, run.path if identity and run else None)
    return WarmStartSource(checkpoint, stage, kept)


def _check_alike(given: UpstreamRuns, peers: Peers) -> None:
    """Raise UsageError on all ranks if their upstream runs differ."""
    upstreams = peers.exchange("start: upstream", given.json())
    strange = [rank for rank, one in enumerate(upstreams) if one != upstreams[0]]
    if strange:
        raise UsageError(
            f"rank {strange[0]} has other upstream= or init_from= than rank 0: use the same on all ranks"
        )


def _kept(checkpoint: Checkpoint, alias: str, one: Upstream) -> tuple[str, ...]:
    """Return the tensors to keep, never random states and gradients."""
    manifest = checkpoint.manifest
    try:
        chosen = choose(manifest, one.keep, "tensor", strict=True)
    except UsageError as error:
        raise UsageError(f"upstream {alias!r}, keep: {error}") from None
    if own := next((f"{node}:{name}" for name, node in chosen if node is not None), None):
        raise UsageError(
            f"upstream {alias!r}, keep: {own} belongs to one node; only shared tensors can be kept"
        )
    return tuple(
        name for name, _ in chosen if manifest.leaves[manifest.rows[name][0]].role not in OF_POSITION
    )


def warm(start: InitFrom, source: WarmStartSource, workspace: Workspace) -> WarmStart:
    """Load one `init_from` into a node's objects, all or nothing.

    Raises BlobError listing everything that does not fit, UsageError for unknown names.
    """
    objects = _objects(start, source, workspace)
    below = Below(start.prefix or start.into or "", start.into or "", start.rename or None)
    names = list(source.checkpoint.manifest.rows)
    if start.into is not None and not any(below.of(name) for name in names):
        # Without `strict` this would be a warm start that loads nothing.
        known = dict.fromkeys(prefix for name in names for prefix in [*dotted_prefixes(name), name])
        near = nearest(below.prefix, known)
        raise UsageError(f"init_from {source.name}: it has nothing below {below.prefix!r}{near}")
    exclude = pattern_list(start.exclude)
    misshapen = () if start.strict else _misshapen(source.checkpoint, objects, below)
    try:
        result = source.checkpoint.load(
            objects, strict=start.strict, rename=below, exclude=[*exclude, *misshapen]
        )
    except BlobError as error:
        raise BlobError(
            f"init_from {source.name}: {error}; strict=False skips everything that does not fit"
        ) from None
    except UsageError as error:
        raise type(error)(f"init_from {source.name}: {error}") from None
    if not result.loaded:
        there = ", ".join(result.unexpected[:3]) or "nothing else"
        lacking = ", ".join([*result.missing, *misshapen][:3])
        raise UsageError(
            f"init_from {source.name}: no leaf of it matches {lacking}, so nothing would be loaded: map the "
            f"names with rename= (it has {there})"
        )
    return WarmStart(source.name, result.loaded, result.missing, result.unexpected, misshapen)


def fill_kept(source: WarmStartSource, workspace: Workspace) -> None:
    """Load the kept tensors of an upstream into their blobs."""
    for blob in source.stage.record.kept:
        name = f"{UPSTREAM}{source.stage.alias}.{blob}"
        result = source.checkpoint.load({name: workspace[name]}, strict=False, rename=Below(blob, name))
        if result.missing:
            raise BlobError(f"{source.name} lacks {', '.join(result.missing)}, which disappeared meanwhile")


def _objects(start: InitFrom, source: WarmStartSource, workspace: Workspace) -> dict[str, Any]:
    """Return the objects to load."""
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
            f"init_from {source.name}: no registered module or tensor has a name of the upstream, which has "
            f"{', '.join(source.checkpoint.blobs)}: map names with into= and prefix="
        )
    return wanted


def _is_wanted(start: InitFrom, value: Any) -> bool:
    """Return True if objects of this kind are loaded."""
    kind = kind_of(value)
    if kind in (Kind.MODULE, Kind.TENSOR):
        return True
    if kind is Kind.CONTAINER:
        return start.include_others or next(container_tensors("", value), None) is not None
    if kind is Kind.OPTIMIZER:
        return start.include_optimizer
    return start.include_others and kind is Kind.STATEFUL


def _target(into: str, registered: Mapping[str, Any]) -> Any:
    """Return the registered object of this name, or the part of a registered module."""
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
            f"init_from: into={into!r} is not a registered module or tensor, nor a part of one"
            f"{nearest(into, registered)}"
        )
    return found


def _misshapen(checkpoint: Checkpoint, objects: Mapping[str, Any], below: Below) -> tuple[str, ...]:
    """Return leaves whose form differs between both sides."""
    live = {leaf.name: spec_of(leaf) for leaf in leaves_of(objects)}
    found: list[str] = []
    for leaf in checkpoint.leaves:
        here = live.get(below.of(leaf.name))
        if here is not None and (here.kind, here.dtype, here.shape) != (leaf.kind, leaf.dtype, leaf.shape):
            found.append(here.name)
    return tuple(dict.fromkeys(found))

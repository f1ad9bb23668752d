"""Upstream runs: the runs that a run is built on, their configuration and source, and initial weights.

A new run chooses the upstream epochs, records them in `lineage/`, and loads weights from them; then all of it
is in its own checkpoints. A resumed run opens no upstream: its data come from the epoch that it loads.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from torchrelay.checkpoint.format.manifest.schema import OF_POSITION, Manifest
from torchrelay.checkpoint.format.names import LINEAGE, UPSTREAM, nearest
from torchrelay.checkpoint.load.checkpoint import Checkpoint, open_checkpoint
from torchrelay.checkpoint.load.info import records_in
from torchrelay.checkpoint.load.lookup import Below, choose, pattern_list
from torchrelay.checkpoint.load.renaming import misshapen_leaves
from torchrelay.checkpoint.state.checkpoint_set import forms_by_blob, made_of
from torchrelay.checkpoint.state.names import Kind, kind_of, submodule
from torchrelay.checkpoint.state.tree_leaves import container_tensors
from torchrelay.checkpoint.storage.open import is_url
from torchrelay.errors import BlobError, UsageError
from torchrelay.jobs.cluster import dotted_prefixes
from torchrelay.jobs.runtime import local_directory, split_run
from torchrelay.jobs.session import Peers, decide, together
from torchrelay.jobs.stop import free_name
from torchrelay.jobs.workspace import Workspace
from torchrelay.metadata.code.imports import LoadedCode, load_code
from torchrelay.metadata.lineage import LineageStage, StageRecord, capture, check_alias
from torchrelay.metadata.run_directory import RunDirectory
from torchrelay.runners.remote_runs.resolve import parse_selector
from torchrelay.runners.training.plan import WarmStart

if TYPE_CHECKING:
    from torchrelay.jobs.job import Job
    from torchrelay.runners.session.base import SessionBase
    from torchrelay.runners.training.journal import Journal


@dataclass(frozen=True)
class Upstream:
    """A run to build on.

    Args:
        run: `RUN`, `RUN@7`, `RUN@best`, a directory of checkpoints, or the URL of one.
        keep: Tensors of it (a name with everything below, or a pattern) to store in every checkpoint of this
            run although no object of the job holds them, for example frozen parts for deployment.

    Example:
        JobRunner(job, "runs/b", upstream={"base": Upstream("runs/a@best", keep="encoder")})
    """

    run: str | os.PathLike[str]
    keep: str | Sequence[str] = ()


@dataclass(frozen=True)
class InitFrom:
    """One warm start: load leaves of an upstream into registered objects, once, when the run begins.

    Names end at dots: `net_1` does not match `net_10`. Missing, unexpected or misshapen leaves are errors
    that name them; with `strict=False` they are skipped and reported.

    Args:
        upstream: An alias of the runner's `upstream`, or a run such as `runs/expert@best`.
        into: A registered object or a part of a module (`policy.encoder`); None: all registered modules and
            tensors with a name that the upstream has.
        prefix: Name in the upstream whose content is loaded into `into`; default: the same name.
        rename: New names by old ones, both below the prefix.
        exclude: Leaves of the job to leave unchanged.
        strict: Raise an error for leaves that do not fit.
        include_optimizer: Without `into`: load optimizers, too.
        include_others: Without `into`: load all other objects with state (schedulers, loaders).

    Raises:
        UsageError: The arguments contradict each other.

    Example:
        InitFrom("runs/expert@best", into="policy.encoder", prefix="encoder")
    """

    upstream: str
    into: str | None = None
    prefix: str | None = None
    rename: Mapping[str, str] = field(default_factory=dict)
    exclude: Sequence[str] | str = ()
    strict: bool = True
    include_optimizer: bool = False
    include_others: bool = False

    def __post_init__(self) -> None:
        what = f"init_from {self.upstream!r:.80}"
        pattern_list(self.exclude)
        if not isinstance(self.rename, Mapping):
            raise UsageError(f"{what}: invalid rename={self.rename!r:.60}: expected new names by old ones")
        if self.prefix is not None and self.into is None:
            raise UsageError(f"{what} has a prefix but no target: pass into= as well")
        if self.into is not None and (self.include_optimizer or self.include_others):
            raise UsageError(
                f"{what}: include_optimizer and include_others apply to all objects: remove into=, "
                "and use exclude= for what must not change"
            )

    def json(self) -> dict[str, Any]:
        """Return the record for the lineage of a run."""
        found = asdict(self)
        return {**found, "rename": dict(self.rename), "exclude": pattern_list(self.exclude)}


UpstreamRuns = tuple[Mapping[str, Upstream], tuple[InitFrom, ...]]
"""The upstream runs by alias, and the warm starts in order."""


def given_of(upstream: Any, init_from: Any) -> UpstreamRuns:
    """Parse the arguments of the user; raises UsageError."""
    if not isinstance(upstream, Mapping | None):
        raise UsageError(f'invalid upstream={upstream!r:.80}: expected {{"expert": "runs/a@best"}}')
    known: dict[str, Upstream] = {}
    for alias, one in (upstream or {}).items():
        known[check_alias(alias)] = found = one if isinstance(one, Upstream) else Upstream(one)
        pattern_list(found.keep)
        if not isinstance(found.run, str | os.PathLike) or not os.fspath(found.run):
            raise UsageError(f"invalid upstream {alias!r}={found.run!r:.80}: expected 'runs/expert@best'")
    wishes = [init_from] if isinstance(init_from, str | InitFrom) else init_from
    if not isinstance(wishes, Sequence | None):
        raise UsageError(f"invalid init_from={init_from!r:.80}: expected aliases of upstream=, or InitFrom")
    for one in wishes or ():
        if not isinstance(one, str | InitFrom):
            raise UsageError(f"invalid init_from entry {one!r:.80}: expected an alias, or an InitFrom")
    starts = [InitFrom(one) if isinstance(one, str) else one for one in wishes or ()]
    return known, tuple([_of_known(one, known) for one in starts])


def _of_known(start: InitFrom, known: dict[str, Upstream]) -> InitFrom:
    """Resolve the alias of a warm start; a run given by path becomes an upstream itself."""
    text = start.upstream
    if text in known:
        return start
    path = text.rpartition("@")[0] or text
    if "/" not in path and not Path(path).is_dir():
        raise UsageError(
            f"unknown upstream {text!r:.80} in init_from{nearest(text, known)}: expected an alias, "
            "or the path of a run"
        )
    name = re.sub(r"[^A-Za-z0-9_-]", "_", Path(path).name).lstrip("_-")
    same = (alias for alias, one in known.items() if os.fspath(one.run) == text)
    alias = next(same, None) or free_name(check_alias(name), set(known))
    known.setdefault(alias, Upstream(text))
    return replace(start, upstream=alias)


class Stages:
    """The upstream runs in one train call. Mutable."""

    def __init__(self, given: UpstreamRuns | None, run: RunDirectory | None, peers: Peers) -> None:
        self.upstream, self.init_from = given or ({}, ())
        self._run, self._peers = run, peers
        self._sources: dict[str, WarmStartSource] = {}

    def look(self) -> None:
        """Choose and open the upstream epochs of a new run; changes nothing."""
        self._sources = open_sources((self.upstream, self.init_from), self._peers)

    def capture(self) -> None:
        """Write `lineage/`, on the process that holds the log."""
        run = self._run
        if run is not None and self._sources:
            stages = [source.stage for source in self._sources.values()]
            decide(self._peers, "lineage", lambda: capture(run.path, stages))

    def declare(self, job: Job, resumed: Manifest | None) -> None:
        """Declare the blobs that hold records and kept tensors of the upstream runs."""
        if resumed is None and not self._sources:
            return
        if resumed is not None:
            if LINEAGE not in {blob.name for blob in resumed.blobs}:
                return  # its run has no upstream
            kept = forms_by_blob(resumed, [name for name in resumed.rows if name.startswith(UPSTREAM)])
        else:
            kept = {
                f"{UPSTREAM}{alias}.{blob}": forms
                for alias, source in self._sources.items()
                for blob, forms in forms_by_blob(source.checkpoint.manifest, source.kept).items()
            }
        index: dict[str, Any] = {}  # records of these runs and of their own upstream runs, by path of aliases
        for alias, source in self._sources.items():
            above = records_in(source.checkpoint)
            index |= {alias: source.stage.record.json(), **{f"{alias}/{path}": above[path] for path in above}}
        job.blobs.add({LINEAGE: index})
        job.blobs.add({name: partial(made_of, forms) for name, forms in kept.items()})

    def warm(self, session: SessionBase, journal: Journal) -> tuple[WarmStart, ...]:
        """Load the weights on every node in the order of `init_from`; then release the upstream runs."""
        found: list[WarmStart] = []
        if not self._sources:
            return ()

        def take() -> None:
            for place in session.local_nodes:
                workspace = session.workspace(place.name)
                for source in self._sources.values():
                    for blob in source.stage.record.kept:
                        name = f"{UPSTREAM}{source.stage.alias}.{blob}"
                        kept, below = {name: workspace[name]}, Below(blob, name)
                        if missing := source.checkpoint.load(kept, strict=False, rename=below).missing:
                            raise BlobError(
                                f"{source.name} lacks {', '.join(missing)}, which disappeared meanwhile"
                            )
                found[:] = [warm(one, self._sources[one.upstream], workspace) for one in self.init_from]

        together(self._peers, "warm start", take)
        self._sources = {}
        for one in found:
            journal.tell("warm start", f"warm start: {one}")
        return tuple(found)

    def resumed(self, session: SessionBase, journal: Journal, position: object) -> None:
        """Log that nothing is loaded again, and which arguments therefore have no effect."""
        if not self.upstream:
            return
        journal.tell(
            "upstream not read",
            f"upstream runs are not read again and init_from is not applied: all comes from epoch {position}",
        )
        known = session.workspace(session.local_nodes[0].name).get(LINEAGE, {})
        before = {path: one.get("asked") for path, one in known.items() if "/" not in path}
        now = {alias: os.fspath(one.run) for alias, one in self.upstream.items()}
        if before != now:
            both = [", ".join(f"{alias}={one[alias]}" for alias in one) or "nothing" for one in (before, now)]
            journal.warn(
                f"this run was built on {both[0]}; upstream={both[1]} has no effect: it needs a new run, in "
                "another run directory or with resume='never'"
            )


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
    given = None
    if upstream is not None:
        run_given = upstream[first].run if isinstance(upstream[first], Upstream) else upstream[first]
        if not isinstance(run_given, str | os.PathLike):
            raise UsageError(f"invalid upstream {run_given!r:.80}: expected a run such as 'runs/expert@best'")
        path = split_run(os.fspath(run_given))[0]
        given = path if "://" in path else str(Path(path).absolute())
    own = [] if "://" in os.fspath(run) else [local_directory(run, "run")]
    if own and (own[0] / STAGE).is_file():
        given = None
    folder = stage_folder(first, given, own)
    for one in inner:
        folder = folder / LINEAGE / one
        if not (folder / STAGE).is_file():
            raise UsageError(f"load_upstream({alias!r:.80}): stage {folder} does not exist")
    return LoadedUpstream(folder)


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


def open_sources(given: UpstreamRuns, peers: Peers) -> dict[str, WarmStartSource]:
    """Open the upstream runs by alias, identically on every process; changes nothing."""
    upstream, starts = given
    runs = [[alias, os.fspath(one.run), pattern_list(one.keep)] for alias, one in upstream.items()]
    upstreams = peers.exchange("start: upstream", [runs, [start.json() for start in starts]])
    strange = [rank for rank, one in enumerate(upstreams) if one != upstreams[0]]
    if strange:
        raise UsageError(
            f"rank {strange[0]} has other upstream= or init_from= than rank 0: use the same on all ranks"
        )
    found: dict[str, WarmStartSource] = {}
    if not upstream:
        return found

    def choices() -> dict[str, list[str]]:  # locations, and the exact epochs that are selected now
        exact = {}
        for alias, one in upstream.items():
            try:
                selector = parse_selector(os.fspath(one.run))
                path = selector.path if is_url(selector.path) else str(Path(selector.path).absolute())
                opened = open_checkpoint(path, epoch=selector.epoch)
            except UsageError as error:
                raise type(error)(f"upstream {alias!r}: {error}") from None
            exact[alias] = [path, f"{opened.epoch},branch={opened.branch}"]
        return exact

    def open_all() -> None:
        for alias, (path, epoch) in chosen.items():
            applied = tuple(start.json() for start in starts if start.upstream == alias)
            found[alias] = _opened(upstream[alias], applied, alias, path, epoch)

    chosen = decide(peers, "choose upstream epochs", choices)
    together(peers, "open upstream runs", open_all)
    return found


def _opened(
    one: Upstream, applied: tuple[dict[str, Any], ...], alias: str, path: str, epoch: str
) -> WarmStartSource:
    checkpoint = open_checkpoint(path, epoch=epoch)
    facts, manifest = checkpoint.facts, checkpoint.manifest
    try:
        chosen = choose(manifest, one.keep, "tensor", strict=True)
    except UsageError as error:
        raise UsageError(f"upstream {alias!r}, keep: {error}") from None
    if own := next((f"{node}:{name}" for name, node in chosen if node is not None), None):
        raise UsageError(
            f"upstream {alias!r}, keep: {own} belongs to one node; only shared tensors can be kept"
        )
    roles = {name: manifest.leaves[manifest.rows[name][0]].role for name, _ in chosen}
    kept = tuple(name for name, role in roles.items() if role not in OF_POSITION)
    run = None if is_url(path) else RunDirectory(path)
    identity = run.known_identity() if run is not None else {}
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
        applied=applied,
        kept=tuple(dict.fromkeys(manifest.leaves[manifest.rows[name][0]].blob for name in kept)),
    )
    blobs = [
        {"name": one.name, "kind": one.kind, "bytes": one.bytes, "leaves": len(one.leaves)}
        for one in checkpoint.blobs.values()
    ]
    stage = LineageStage(alias, record, blobs, run.path if identity and run else None)
    return WarmStartSource(checkpoint, stage, kept)


def warm(start: InitFrom, source: WarmStartSource, workspace: Workspace) -> WarmStart:
    """Load one `init_from` into a node's objects, all or nothing."""
    objects = _objects(start, source, workspace)
    below = Below(start.prefix or start.into or "", start.into or "", start.rename or None)
    names = list(source.checkpoint.manifest.rows)
    if start.into is not None and not any(below.of(name) for name in names):
        # Without `strict` this would be a warm start that loads nothing.
        known = dict.fromkeys(prefix for name in names for prefix in [*dotted_prefixes(name), name])
        near = nearest(below.prefix, known)
        raise UsageError(f"init_from {source.name}: it has nothing below {below.prefix!r}{near}")
    exclude = pattern_list(start.exclude)
    misshapen = () if start.strict else misshapen_leaves(objects, source.checkpoint.leaves, below)
    options: dict[str, Any] = {"strict": start.strict, "rename": below, "exclude": [*exclude, *misshapen]}
    try:
        result = source.checkpoint.load(objects, **options)
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


def _objects(start: InitFrom, source: WarmStartSource, workspace: Workspace) -> dict[str, Any]:
    registered = {
        name: entry.target
        for name, entry in workspace.entries().items()
        if entry.blob is not None and not name.startswith(UPSTREAM)
    }
    if start.into is not None:
        return {start.into: _target(start.into, registered)}
    kinds = [Kind.MODULE, Kind.TENSOR, *([Kind.OPTIMIZER] if start.include_optimizer else [])]
    kinds += [Kind.CONTAINER, Kind.STATEFUL] if start.include_others else []

    def is_wanted(value: Any) -> bool:
        kind = kind_of(value)
        return kind in kinds or (kind is Kind.CONTAINER and any(container_tensors("", value)))

    there = source.checkpoint.blobs
    wanted = {name: one for name, one in registered.items() if name in there and is_wanted(one)}
    if not wanted:
        raise UsageError(
            f"init_from {source.name}: no registered module or tensor has a name of the upstream, which has "
            f"{', '.join(there)}: map names with into= and prefix="
        )
    return wanted


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

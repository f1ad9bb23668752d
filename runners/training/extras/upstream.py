"""Upstream runs: the runs that a run is built on.

A new run chooses the upstream epochs, records them in `lineage/`, and loads weights from them; then all of it
is in its own checkpoints. A resumed run opens no upstream: its data come from the epoch that it loads.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrelay.checkpoint.format.manifest.schema import Manifest
from torchrelay.checkpoint.format.names import LINEAGE, UPSTREAM, nearest
from torchrelay.checkpoint.load.lookup import pattern_list
from torchrelay.errors import UsageError
from torchrelay.jobs.session import Peers, decide, together
from torchrelay.jobs.stop import free_name
from torchrelay.metadata.lineage import check_alias
from torchrelay.metadata.run_directory import RunDirectory

if TYPE_CHECKING:
    from torchrelay.jobs.job import Job
    from torchrelay.runners.session.base import SessionBase
    from torchrelay.runners.training.extras.upstream import WarmStartSource
    from torchrelay.runners.training.journal import Journal
    from torchrelay.runners.training.plan import WarmStart


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


@dataclass(frozen=True)
class UpstreamRuns:
    """The upstream runs by alias, and the warm starts in order."""

    upstream: Mapping[str, Upstream] = field(default_factory=dict)
    init_from: tuple[InitFrom, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.upstream)

    def json(self) -> list[Any]:
        """Return all arguments, to compare ranks."""
        runs = [[alias, os.fspath(one.run), pattern_list(one.keep)] for alias, one in self.upstream.items()]
        return [runs, [start.json() for start in self.init_from]]

    def asked(self) -> dict[str, str]:
        """Return the text of each run by alias."""
        return {alias: os.fspath(one.run) for alias, one in self.upstream.items()}


def given_of(upstream: Any, init_from: Any) -> UpstreamRuns:
    """Parse the arguments of the user; raises UsageError."""
    if not isinstance(upstream, Mapping | None):
        raise UsageError(f'invalid upstream={upstream!r:.80}: expected {{"expert": "runs/a@best"}}')
    known = {check_alias(alias): _upstream(alias, one) for alias, one in (upstream or {}).items()}
    wishes = [init_from] if isinstance(init_from, str | InitFrom) else init_from
    if not isinstance(wishes, Sequence | None):
        raise UsageError(f"invalid init_from={init_from!r:.80}: expected aliases of upstream=, or InitFrom")
    for one in wishes or ():
        if not isinstance(one, str | InitFrom):
            raise UsageError(f"invalid init_from entry {one!r:.80}: expected an alias, or an InitFrom")
    starts = [InitFrom(one) if isinstance(one, str) else one for one in wishes or ()]
    return UpstreamRuns(known, tuple(_of_known(one, known) for one in starts))


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


def _upstream(alias: str, one: Any) -> Upstream:
    """Check one upstream run."""
    found = one if isinstance(one, Upstream) else Upstream(one)
    pattern_list(found.keep)
    if not isinstance(found.run, str | os.PathLike) or not os.fspath(found.run):
        raise UsageError(f"invalid upstream {alias!r}={found.run!r:.80}: expected 'runs/expert@best'")
    return found


class Stages:
    """The upstream runs in one train call. Mutable."""

    def __init__(self, given: UpstreamRuns, run: RunDirectory | None, peers: Peers) -> None:
        self.given = given
        self.warmed: tuple[WarmStart, ...] = ()
        """The warm starts at the beginning of the run, in the order of `init_from`; empty after a resume."""
        self._run = run
        self._peers = peers
        self._sources: dict[str, WarmStartSource] = {}

    def look(self) -> None:
        """Choose and open the upstream epochs of a new run; changes nothing."""
        if self.given or self._peers.size > 1:  # to check that all ranks have the same arguments
            from torchrelay.runners.training.extras.upstream import open_sources

            self._sources = open_sources(self.given, self._peers)

    def capture(self) -> None:
        """Write `lineage/`, on the process that holds the log."""
        run = self._run
        if run is not None and self._sources:
            from torchrelay.metadata.lineage import capture

            stages = [source.stage for source in self._sources.values()]
            decide(self._peers, "lineage", lambda: capture(run.path, stages))

    def declare(self, job: Job, resumed: Manifest | None) -> None:
        """Declare the blobs that hold records and kept tensors of the upstream runs."""
        if resumed is None and not self._sources:
            return
        if resumed is not None and LINEAGE not in {blob.name for blob in resumed.blobs}:
            return  # its run has no upstream
        from torchrelay.checkpoint.state.checkpoint_set import forms_by_blob, made_of

        if resumed is not None:
            kept = forms_by_blob(resumed, [name for name in resumed.rows if name.startswith(UPSTREAM)])
        else:
            kept = {
                f"{UPSTREAM}{alias}.{blob}": forms
                for alias, source in self._sources.items()
                for blob, forms in forms_by_blob(source.checkpoint.manifest, source.kept).items()
            }

        index: dict[str, Any] = {}
        for source in self._sources.values():
            index.update(source.index())
        job.blobs.add({LINEAGE: index})
        job.blobs.add({name: partial(made_of, forms) for name, forms in kept.items()})

    def warm(self, session: SessionBase, journal: Journal) -> None:
        """Load the weights on every node; then release the upstream runs."""
        if not self._sources:
            return
        from torchrelay.runners.training.extras.upstream import fill_kept, warm

        found: list[WarmStart] = []

        def take() -> None:
            for place in session.local_nodes:
                workspace = session.workspace(place.name)
                for source in self._sources.values():
                    fill_kept(source, workspace)
                found[:] = [warm(one, self._sources[one.upstream], workspace) for one in self.given.init_from]

        together(self._peers, "warm start", take)
        self.warmed, self._sources = tuple(found), {}
        for one in found:
            journal.tell("warm start", f"warm start: {one}")

    def resumed(self, session: SessionBase, journal: Journal, position: object) -> None:
        """Log that nothing is loaded again, and which arguments therefore have no effect."""
        if not self.given:
            return
        journal.tell(
            "upstream not read",
            f"upstream runs are not read again and init_from is not applied: all comes from epoch {position}",
        )
        known = session.workspace(session.local_nodes[0].name).get(LINEAGE, {})
        before = {path: one.get("asked") for path, one in known.items() if "/" not in path}
        if before != self.given.asked():
            journal.warn(
                f"this run was built on {_listed(before)}; upstream={_listed(self.given.asked())} has no "
                "effect: it needs a new run, in another run directory or with resume='never'"
            )


def _listed(asked: Mapping[str, Any]) -> str:
    """List aliases with their runs."""
    return ", ".join(f"{alias}={one}" for alias, one in asked.items()) or "nothing"

"""What a run is built on: the runs that a user names, and what becomes of them through its life.

A run that begins chooses the upstream epochs, keeps what is known of them in `lineage/`, and takes weights
from them; then all of it is in its own checkpoints. A run that resumes opens no upstream: what it holds of
them follows from the epoch that it loads.
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
    from torchrelay.runners.training.extras.warm_start import WarmStartSource
    from torchrelay.runners.training.journal import Journal
    from torchrelay.runners.training.plan import WarmStart


@dataclass(frozen=True)
class Upstream:
    """A run to build on: `RUN`, `RUN@7`, `RUN@best`, a directory of checkpoints, or the URL of one.

    `keep` names tensors of it (a name with all below it, or a pattern) that every checkpoint of this run is
    to hold though no object of the job does, such as frozen parts that only deployment needs.
    """

    run: str | os.PathLike[str]
    keep: str | Sequence[str] = ()


@dataclass(frozen=True)
class InitFrom:
    """One warm start: leaves of an upstream into registered objects, once, when the run begins.

    `upstream` is an alias of the runner's `upstream`, or itself a run, such as `runs/expert@best`.

    Without `into` all registered modules and tensors take what the upstream has under their names, with
    `include_optimizer` optimizers too, with `include_others` every other object with state (schedulers,
    loaders). `into` is one of them, or a part of a module (`policy.encoder`): it takes what lies below
    `prefix` there (the same name, if that is left out), renamed by `rename`, whose names begin below the
    prefix. Names end at dots: `net_1` never takes `net_10`.
    Leaves that `exclude` names, as the job calls them, stay as they are. Whatever else is missing,
    unexpected or of another form is refused, by name; with `strict=False` it is skipped and reported.
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
            raise UsageError(f"{what}: rename is {self.rename!r:.60}; give new names by old ones")
        if self.prefix is not None and self.into is None:
            raise UsageError(f"{what} has a prefix and does not say into what: give into= as well")
        if self.into is not None and (self.include_optimizer or self.include_others):
            raise UsageError(
                f"{what}: states of optimizers and other objects are taken with all of the job's objects: "
                "leave into= out, and name what is to stay as it is by exclude="
            )

    def json(self) -> dict[str, Any]:
        """How the record of a stage tells it."""
        found = asdict(self)
        return {**found, "rename": dict(self.rename), "exclude": pattern_list(self.exclude)}


@dataclass(frozen=True)
class UpstreamRuns:
    """The upstream runs by alias, and the warm starts in their order."""

    upstream: Mapping[str, Upstream] = field(default_factory=dict)
    init_from: tuple[InitFrom, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.upstream)

    def json(self) -> list[Any]:
        """All of it, for processes to compare."""
        runs = [[alias, os.fspath(one.run), pattern_list(one.keep)] for alias, one in self.upstream.items()]
        return [runs, [start.json() for start in self.init_from]]

    def asked(self) -> dict[str, str]:
        """What was written of each, by alias."""
        return {alias: os.fspath(one.run) for alias, one in self.upstream.items()}


def given_of(upstream: Any, init_from: Any) -> UpstreamRuns:
    """Understand what a user wrote; raises UsageError."""
    if not isinstance(upstream, Mapping | None):
        raise UsageError(f'upstream is {upstream!r:.80}; give runs by alias: {{"expert": "runs/a@best"}}')
    known = {check_alias(alias): _upstream(alias, one) for alias, one in (upstream or {}).items()}
    wishes = [init_from] if isinstance(init_from, str | InitFrom) else init_from
    if not isinstance(wishes, Sequence | None):
        raise UsageError(f"init_from is {init_from!r:.80}; give aliases of upstream=, or InitFrom objects")
    for one in wishes or ():
        if not isinstance(one, str | InitFrom):
            raise UsageError(f"init_from has {one!r:.80}; give an alias of upstream=, or an InitFrom")
    starts = [InitFrom(one) if isinstance(one, str) else one for one in wishes or ()]
    return UpstreamRuns(known, tuple(_of_known(one, known) for one in starts))


def _of_known(start: InitFrom, known: dict[str, Upstream]) -> InitFrom:
    """The warm start by its alias; a run that is named by its path becomes an upstream under its own name."""
    text = start.upstream
    if text in known:
        return start
    path = text.rpartition("@")[0] or text
    if "/" not in path and not Path(path).is_dir():
        raise UsageError(
            f"init_from names no upstream: {text!r:.80}{nearest(text, known)}; give an alias of upstream=, "
            "or the path of a run"
        )
    name = re.sub(r"[^A-Za-z0-9_-]", "_", Path(path).name).lstrip("_-")
    same = (alias for alias, one in known.items() if os.fspath(one.run) == text)
    alias = next(same, None) or free_name(check_alias(name), set(known))
    known.setdefault(alias, Upstream(text))
    return replace(start, upstream=alias)


def _upstream(alias: str, one: Any) -> Upstream:
    found = one if isinstance(one, Upstream) else Upstream(one)
    pattern_list(found.keep)
    if not isinstance(found.run, str | os.PathLike) or not os.fspath(found.run):
        raise UsageError(f"upstream {alias!r} is {found.run!r:.80}; give a run: 'runs/expert@best'")
    return found


class Stages:
    """Mutable; one per train call."""

    def __init__(self, given: UpstreamRuns, run: RunDirectory | None, peers: Peers) -> None:
        self.given = given
        self.warmed: tuple[WarmStart, ...] = ()
        """What was taken when the run began, in the order of `init_from`; empty after a resume."""
        self._run = run
        self._peers = peers
        self._sources: dict[str, WarmStartSource] = {}

    def look(self) -> None:
        """Choose and open the upstream epochs of a run that begins; nothing is changed, here or there."""
        if self.given or self._peers.size > 1:  # whether all were given the same
            from torchrelay.runners.training.extras.warm_start import open_sources

            self._sources = open_sources(self.given, self._peers)

    def capture(self) -> None:
        """Write `lineage/`, by the process that holds the log."""
        run = self._run
        if run is not None and self._sources:
            from torchrelay.metadata.lineage import capture

            stages = [source.stage for source in self._sources.values()]
            decide(self._peers, "lineage", lambda: capture(run.path, stages))

    def declare(self, job: Job, resumed: Manifest | None) -> None:
        """Declare the blobs that hold what is known and kept of the stages, as a start declares them anew."""
        if resumed is None and not self._sources:
            return
        if resumed is not None and LINEAGE not in {blob.name for blob in resumed.blobs}:
            return  # its run was built on none
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
        """Take the weights, on every node; the upstream runs are let go of then."""
        if not self._sources:
            return
        from torchrelay.runners.training.extras.warm_start import fill_kept, warm

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
        """Say that nothing is taken again, and what of today's wishes is therefore not met."""
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
                f"this run was built on {_told(before)}, not on {_told(self.given.asked())}, as is asked for "
                "now: that counts for a run that begins, in another run directory or with resume='never'"
            )


def _told(asked: Mapping[str, Any]) -> str:
    return ", ".join(f"{alias}={one}" for alias, one in asked.items()) or "nothing"

"""What a run is built on, through its life.

A run that begins chooses the upstream epochs, keeps what is known of them in `lineage/`, and takes weights
from them; then all of it is in its own checkpoints. A run that resumes opens no upstream: what it holds of
them follows from the epoch that it loads.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from torchrelay.checkpoint.format.manifest.schema import Manifest
from torchrelay.checkpoint.load.info import LINEAGE, UPSTREAM
from torchrelay.jobs.session import Peers, decide, together
from torchrelay.metadata.run_directory import RunDirectory
from torchrelay.runners.stages.given import Given

if TYPE_CHECKING:
    from torchrelay.checkpoint.state.checkpoint_set import Form
    from torchrelay.jobs.job import Job
    from torchrelay.runners.journal import Journal
    from torchrelay.runners.session.base import SessionBase
    from torchrelay.runners.stages.sources import Source
    from torchrelay.runners.stages.warming import WarmStart

_Kept: TypeAlias = "Mapping[str, Mapping[str, Form]]"


class Stages:
    """Mutable; one per train call."""

    def __init__(self, given: Given, run: RunDirectory | None, peers: Peers) -> None:
        self.given = given
        self.warmed: tuple[WarmStart, ...] = ()
        """What was taken when the run began, in the order of `init_from`; empty after a resume."""
        self._run = run
        self._peers = peers
        self._sources: dict[str, Source] = {}

    def look(self) -> None:
        """Choose and open the upstream epochs of a run that begins; nothing is changed, here or there."""
        if self.given or self._peers.size > 1:  # whether all were given the same
            from torchrelay.runners.stages.sources import open_sources

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
        kept = self._kept() if resumed is None else _kept_in(resumed)
        if kept is None or (resumed is None and not self._sources):
            return
        from torchrelay.checkpoint.state.checkpoint_set import made_of

        index: dict[str, Any] = {}
        for source in self._sources.values():
            index.update(source.index())
        job.blobs.add({LINEAGE: index})
        job.blobs.add({name: partial(made_of, forms) for name, forms in kept.items()})

    def warm(self, session: SessionBase, journal: Journal) -> None:
        """Take the weights, on every node; the upstream runs are let go of then."""
        if not self._sources:
            return
        from torchrelay.runners.stages.warming import fill_kept, warm

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

    def _kept(self) -> _Kept:
        from torchrelay.checkpoint.state.checkpoint_set import forms_by_blob

        return {
            f"{UPSTREAM}{alias}.{blob}": forms
            for alias, source in self._sources.items()
            for blob, forms in forms_by_blob(source.checkpoint.manifest, source.kept).items()
        }


def _kept_in(manifest: Manifest) -> _Kept | None:
    """What an epoch keeps of stages; None where its run was built on none."""
    if LINEAGE not in {blob.name for blob in manifest.blobs}:
        return None
    from torchrelay.checkpoint.state.checkpoint_set import forms_by_blob

    return forms_by_blob(manifest, [name for name in manifest.rows if name.startswith(UPSTREAM)])


def _told(asked: Mapping[str, Any]) -> str:
    return ", ".join(f"{alias}={one}" for alias, one in asked.items()) or "nothing"

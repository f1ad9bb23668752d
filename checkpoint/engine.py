"""The engine under the managers: one directory, one log, all nodes of a job.

Every verb is called by all processes of the session in the same order. Rank 0 reads and writes the
log; what it finds or decides is told to all. Reading needs no right to write.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torchrelay.checkpoint import manifest_disk
from torchrelay.checkpoint.boundary import NodeState, capture
from torchrelay.checkpoint.branches import LogView
from torchrelay.checkpoint.facts import Facts
from torchrelay.checkpoint.live import Entry
from torchrelay.checkpoint.load import LoadJob, load_all
from torchrelay.checkpoint.load_blobs import load_some
from torchrelay.checkpoint.local_storage import LocalStorage
from torchrelay.checkpoint.log_reader import open_log
from torchrelay.checkpoint.log_writer import LogWriter
from torchrelay.checkpoint.manifest import Manifest
from torchrelay.checkpoint.members import Member, members_of, newcomers
from torchrelay.checkpoint.paths import shard_path
from torchrelay.checkpoint.position import Position
from torchrelay.checkpoint.proof import Outcome
from torchrelay.checkpoint.prove_together import prove_together
from torchrelay.checkpoint.record import entry_json, entry_of
from torchrelay.checkpoint.replicas import ReplicaCheck
from torchrelay.checkpoint.retention import keep_last as keep_last_policy
from torchrelay.checkpoint.save import Clock, SaveJob, carry_out, make_plan
from torchrelay.checkpoint.spec_exchange import SpecExchange
from torchrelay.checkpoint.sweep import sweep
from torchrelay.errors import (
    DamagedError,
    NoProvableEpochError,
    RelayError,
    StorageError,
    UnknownEpochError,
    UsageError,
)
from torchrelay.jobs.blobs import Scope
from torchrelay.jobs.peers import decide
from torchrelay.jobs.places import NodePlace
from torchrelay.jobs.random_streams import RandomStreams
from torchrelay.jobs.session import Session
from torchrelay.metadata.stats import NodeStats


@dataclass(frozen=True)
class Look:
    """What a log says before a run starts: told to all processes by rank 0.

    `epoch` and `facts` are of the newest entry of the current branch (not proved yet).
    """

    commits: bool = False
    branch: int = 0
    request: Mapping[str, Any] | None = None
    epoch: int | None = None
    facts: Facts | None = None
    notices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Target:
    """A proved position, ready to be loaded."""

    entry: Entry
    manifest: Manifest

    @property
    def position(self) -> Position:
        """Where in the run it was taken."""
        return self.entry.position

    @property
    def facts(self) -> Facts:
        """What the manifest remembers of the run."""
        return self.manifest.facts


class Engine:
    """Saves and loads; see the module. `keep_last` epochs are kept, None keeps all."""

    def __init__(
        self, prefix: str | Path, *, keep_last: int | None = None, takeover_secs: float = 15.0
    ) -> None:
        if "://" in str(prefix):
            raise UsageError(
                f"{prefix} is a URL; checkpoints go to local or mounted directories so far: give a path"
            )
        if keep_last is not None and (isinstance(keep_last, bool) or keep_last < 1):
            raise UsageError(f"keep_last is {keep_last!r}; at least 1 epoch is kept, None keeps all")
        self.storage = LocalStorage(prefix)
        self.keep_last = keep_last
        self.takeover_secs = takeover_secs
        self.stored_names: dict[str, str] = {}
        self._job_name: str | None = None
        self._best: tuple[str, str] | None = None
        self._writer: LogWriter | None = None
        self._pending_rewind: tuple[Position | None, dict[str, Any]] | None = None
        self._open = False
        self._identity: dict[str, Any] = {}
        self._members: dict[str, dict[str, Member]] | None = None
        self._demoted: set[str] = set()
        self._exchange = SpecExchange()
        self._replicas = ReplicaCheck()
        self._target: Target | None = None
        self._streams: dict[str, RandomStreams] = {}
        self._stats: dict[str, NodeStats] = {}
        self._told_late: set[str] = set()

    # Whom it serves

    def bind(self, job_name: str | None, best: tuple[str, str] | None = None) -> None:
        """Serve the job of this name; None stands for the name of the directory."""
        self._job_name = job_name
        self._best = best
        self._replicas = ReplicaCheck()

    def reading_from(self, prefix: str) -> Engine:
        """A copy that reads another directory."""
        other = Engine(prefix)
        other.stored_names, other._members, other._demoted = self.stored_names, self._members, self._demoted
        return other

    def _places(self, session: Session) -> tuple[NodePlace, ...]:
        return tuple(replace(place, name=self._stored(place.name)) for place in session.nodes)

    def _stored(self, node: str) -> str:
        return self.stored_names.get(node, node)

    # Looking

    def look(self, session: Session, *, tolerant: bool = False) -> Look:
        """Read the log on rank 0. `tolerant`: a directory that cannot be read looks empty, with a notice."""
        found = decide(session.peers, "look at the log", lambda: self._look(tolerant=tolerant))
        facts = None if found["facts"] is None else Facts(**found["facts"])
        return Look(**{**found, "facts": facts, "notices": tuple(found["notices"])})

    def _look(self, *, tolerant: bool) -> dict[str, Any]:
        try:
            view = open_log(self.storage, self._job_name)
        except StorageError as error:
            if not tolerant:
                raise
            return {**_empty_look(), "notices": [str(error)]}
        newest = view.newest()
        request = view.current.request
        facts = None
        if newest is not None:
            try:
                facts = _facts_json(self._read_manifest(newest).facts)
            except StorageError as error:
                view = replace(view, notices=(*view.notices, str(error)))
        return {
            "commits": bool(view.entries),
            "branch": view.state.current,
            "request": dict(request) if request else None,
            "epoch": newest.position.epoch if newest else None,
            "facts": facts,
            "notices": list(view.notices),
        }

    def check_known(self, session: Session, epoch: int) -> None:
        """Raise UnknownEpochError, listing what there is, unless the epoch is committed on the current branch."""

        def check() -> None:
            self._find(open_log(self.storage, self._job_name), epoch)

        decide(session.peers, "find the epoch", check)

    def _find(self, view: LogView, epoch: int) -> Entry:
        entry = view.find(epoch)
        if entry is None:
            known = ", ".join(map(str, view.epochs())) or "none"
            raise UnknownEpochError(
                f"epoch {epoch} is not committed in {self.storage.url}; there are: {known}"
            )
        return entry

    # Becoming the writer

    @property
    def generation(self) -> int | None:
        """The slot of our takeover; None on other ranks and before `open`."""
        return self._identity.get("generation")

    @property
    def branch(self) -> int:
        """The current branch, as rank 0 told."""
        return int(self._identity.get("branch", 0))

    def open(self, session: Session, *, tolerant: bool = False) -> None:
        """Take the log over on rank 0.

        Raises DirectoryInUseError for a living holder. `tolerant`: a directory that cannot be used is
        tried again at every save, each of which then fails.
        """

        def take() -> dict[str, Any] | None:
            try:
                return self._take()
            except StorageError:
                if not tolerant:
                    raise
                return None

        told = decide(session.peers, "take the log over", take, deadline_secs=self.takeover_secs + 60)
        self._opened(told)

    def _opened(self, told: dict[str, Any] | None) -> None:
        self._open = told is not None
        if told is not None:
            self._identity = told
            self._pending_rewind = None

    def _take(self) -> dict[str, Any]:
        if self._writer is None:
            self._writer = LogWriter.take(self.storage, self._job_name, patience_secs=self.takeover_secs)
        if self._pending_rewind is not None:
            self._writer.rewind(*self._pending_rewind)
        return self._identity_now(self._writer)

    def _identity_now(self, writer: LogWriter) -> dict[str, Any]:
        view = writer.view
        return {
            "job": view.job_name,
            "uuid": view.job_uuid,
            "branch": view.state.current,
            "generation": writer.generation,
        }

    def rewind(self, session: Session, base: Position | None, request: dict[str, Any]) -> None:
        """Begin a new branch at `base` (None: before everything); later epochs are abandoned, not deleted."""
        if not self._open:
            self._pending_rewind = (base, request)
            return

        def append() -> dict[str, Any]:
            writer = self._required_writer()
            writer.rewind(base, request)
            return self._identity_now(writer)

        self._identity = decide(session.peers, "rewind", append)

    def close(self, session: Session) -> None:
        """Release the log, so that the next writer need not wait. Never raises StorageError."""
        writer, self._writer = self._writer, None
        self._open = False
        self._pending_rewind = None
        if writer is not None:
            try:
                writer.release()
            except RelayError as error:
                warnings.warn(f"the checkpoint log was not released: {error}", stacklevel=2)

    def _required_writer(self) -> LogWriter:
        if self._writer is None:
            raise UsageError("this engine is not open: save within a train call, or call open first")
        return self._writer

    # Proving

    def prove(self, session: Session, epoch: int) -> Target:
        """Prove exactly this epoch of the current branch; raises DamagedError, never falls back."""
        found = decide(session.peers, "find the epoch", lambda: self._told_entry(epoch))
        entry = entry_of(found, "the log")
        if self._target is not None and self._target.entry == entry:
            return self._target
        outcome, reason = prove_together(session.peers, self.storage, entry)
        if outcome is Outcome.DAMAGED:
            raise DamagedError(
                f"epoch {epoch} in {self.storage.url} is damaged: {reason}; an epoch that was asked for "
                "is never replaced by another: choose another one, or restore the files from a copy"
            )
        if outcome is Outcome.UNKNOWN:
            raise StorageError(f"epoch {epoch} in {self.storage.url} cannot be read now: {reason}")
        self._target = Target(entry, self._read_manifest(entry))
        return self._target

    def _told_entry(self, epoch: int) -> dict[str, Any]:
        view = self._writer.view if self._writer is not None else open_log(self.storage, self._job_name)
        return entry_json(self._find(view, epoch))

    def newest(self, session: Session, *, say: Callable[[str], None]) -> Target:
        """The newest position of the current branch that all processes can prove.

        A damaged one is quarantined, the reason said, and the next older one tried. Raises
        NoProvableEpochError when none is left, StorageError when one cannot be read now.
        """
        tried: list[str] = []
        while True:
            told = decide(session.peers, "newest epoch", self._newest_entry)
            if told is None:
                raise NoProvableEpochError(
                    f"no epoch in {self.storage.url} can be proved ({'; '.join(tried) or 'none is left'}). "
                    "Restore the files from a copy, choose an epoch of another branch, or begin anew with "
                    "resume='never'"
                )
            entry = entry_of(told, "the log")
            outcome, reason = prove_together(session.peers, self.storage, entry)
            if outcome is Outcome.PROVED:
                self._target = Target(entry, self._read_manifest(entry))
                return self._target
            if outcome is Outcome.UNKNOWN:
                raise StorageError(
                    f"epoch {entry.position} in {self.storage.url} cannot be read now: {reason}; "
                    "nothing was changed: try again when the storage answers"
                )
            tried.append(f"epoch {entry.position}: {reason}")
            say(f"epoch {entry.position} is damaged ({reason}); an older one is used instead")
            decide(
                session.peers,
                "quarantine",
                partial(self._quarantine, entry, reason),
            )

    def _newest_entry(self) -> dict[str, Any] | None:
        newest = self._required_writer().view.newest()
        return None if newest is None else entry_json(newest)

    def _quarantine(self, entry: Entry, reason: str) -> None:
        self._required_writer().quarantine(entry.key, reason)

    def _read_manifest(self, entry: Entry) -> Manifest:
        return manifest_disk.read(self.storage, entry)

    # The checkpoint set

    @property
    def has_set(self) -> bool:
        """Whether the names to save are fixed."""
        return self._members is not None

    def seal(self, session: Session) -> None:
        """Fix the set: the names that the hosted nodes hold now."""
        self._members = {
            place.name: members_of(session.workspace(place.name)) for place in session.local_nodes
        }

    def seal_like(self, session: Session, epoch: int) -> None:
        """Fix the set to what an epoch holds, and what is registered now."""
        manifest = self.prove(session, epoch).manifest
        self._demoted = {leaf.name for leaf in manifest.leaves if leaf.scope == "rank" and leaf.role != "rng"}
        self._members = {}
        for place in session.local_nodes:
            registered = members_of(session.workspace(place.name))
            stored = _stored_blobs(manifest, self._stored(place.name))
            self._members[place.name] = {**{name: Member(name) for name in stored}, **registered}

    # Saving

    def save(self, session: Session, position: Position, facts: Facts) -> None:
        """Save all nodes at a position; returns once it is committed and acknowledged.

        Raises SaveFailedError, StorageError or BlobError on all processes alike; nothing is committed
        then. FencedError when another job has taken the directory over.
        """
        if not self._open:
            self._opened(decide(session.peers, "take the log over", self._take))
        if self._members is None:
            self.seal(session)
        clock = Clock()
        with clock.spent("stage"):
            states = self._capture(session)
        job = SaveJob(
            self.storage,
            session.peers,
            self._places(session),
            states,
            position,
            facts,
            self._identity,
            lambda entry: self._commit(entry),
        )
        with clock.spent("plan"):
            demoted = self._replicas.run(job, self._forced())
            self._say_demoted(demoted)
            plan = make_plan(job.with_rank_scope(self._demoted), self._exchange)
        self._stats["checkpoint_save"] = carry_out(job, plan, clock)
        self._retain(session)

    def _capture(self, session: Session) -> tuple[NodeState, ...]:
        members = self._members or {}
        states = []
        for place in session.local_nodes:
            self._tell_late(session, place)
            states.append(
                capture(session, place, self._stored(place.name), members.get(place.name, {}), self._demoted)
            )
        return tuple(states)

    def _forced(self) -> frozenset[str]:
        return frozenset(
            name
            for members in (self._members or {}).values()
            for name, member in members.items()
            if member.scope is Scope.REPLICATED
        )

    def _say_demoted(self, names: frozenset[str]) -> None:
        """Leaves that differ are kept per node from now on; said once."""
        if names:
            self._demoted |= names
            warnings.warn(
                f"{', '.join(sorted(names))} differs between nodes and is saved once per node from now on "
                "(scope rank); register it with scope='rank' to say so yourself",
                stacklevel=2,
            )

    def _tell_late(self, session: Session, place: NodePlace) -> None:
        members = (self._members or {}).get(place.name, {})
        late = [
            name for name in newcomers(session.workspace(place.name), members) if name not in self._told_late
        ]
        if late:
            self._told_late.update(late)
            warnings.warn(
                f"{', '.join(map(repr, late))} appeared on {place} after init and will not be saved: create it "
                "in the init group, or register it as a blob",
                stacklevel=2,
            )

    def _commit(self, entry: Entry) -> None:
        self._required_writer().commit(entry)

    def _retain(self, session: Session) -> None:
        """Retire what the policy gives up; a failure to delete warns and is tried again."""
        if self.keep_last is None or self._writer is None:
            return
        try:
            sweep(self._writer, keep_last_policy(self.keep_last))
        except StorageError as error:
            warnings.warn(f"old epochs could not be deleted: {error}", stacklevel=2)

    # Loading

    def load_epoch(self, session: Session, epoch: int) -> None:
        """Load an epoch of the current branch into the workspaces of the hosted nodes."""
        self.load(session, self.prove(session, epoch))

    def load(self, session: Session, target: Target) -> None:
        """Load a proved position; random states wait in `take_streams` for the runner to restore them."""
        job = LoadJob(self.storage, session, target.manifest, self._stored, self._members or {})
        self._streams, self._stats["checkpoint_load"] = load_all(job)

    def take_streams(self) -> dict[str, RandomStreams]:
        """The random states that the last load found, by hosted node."""
        streams, self._streams = self._streams, {}
        return streams

    def load_blobs(self, session: Session, names: Sequence[str], epoch: int, *, strict: bool) -> bool:
        """Load some blobs into the workspaces; False, changing nothing, when they are not all there.

        With `strict=False` names that the epoch lacks are ignored.
        """
        told = decide(session.peers, "find the epoch", lambda: self._entry_or_none(epoch))
        if told is None:
            return False
        entry = entry_of(told, "the log")
        loaded, self._stats["checkpoint_partial_load"] = load_some(
            self.storage, session, self._read_manifest(entry), names, self._stored, strict=strict
        )
        return loaded

    def _entry_or_none(self, epoch: int) -> dict[str, Any] | None:
        view = self._writer.view if self._writer is not None else open_log(self.storage, self._job_name)
        entry = view.find(epoch)
        return None if entry is None else entry_json(entry)

    # Telling

    def last_stats(self, action: str) -> NodeStats:
        """The times of the last save or load; empty when there was none."""
        return self._stats.get(action, NodeStats([]))

    def files(self, stored_name: str, epoch: int) -> list[str]:
        """The files of a node in a committed epoch of the current branch."""
        entry = open_log(self.storage, self._job_name).find(epoch)
        if entry is None:
            return []
        manifest = self._read_manifest(entry)
        return [
            f"{self.storage.url}/{shard_path(manifest, shard)}"
            for shard in manifest.shards
            if manifest.world.names[shard.node] == stored_name
        ]


def _empty_look() -> dict[str, Any]:
    return {"commits": False, "branch": 0, "request": None, "epoch": None, "facts": None}


def _facts_json(facts: Facts) -> dict[str, Any]:
    return {name: getattr(facts, name) for name in Facts.__dataclass_fields__}


def _stored_blobs(manifest: Manifest, node: str) -> list[str]:
    """The blobs that a node of this name had, or, for a node that is new, those that all nodes share."""
    number = manifest.world.number.get(node)
    found = {}
    for leaf in manifest.leaves:
        mine = number in manifest.nodes_of(leaf) if number is not None else leaf.scope == "replicated"
        if mine and leaf.role != "rng":
            found[leaf.blob] = None
    return list(found)

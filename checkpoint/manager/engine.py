"""Save and load the state of all nodes of a job in one directory: the engine of the managers.

Every method is called by all processes of the session in the same order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from torchrelay.checkpoint.coordinator.retention import Retaining
from torchrelay.checkpoint.coordinator.session_log import Ledger
from torchrelay.checkpoint.format.manifest import codec
from torchrelay.checkpoint.format.manifest.schema import OF_POSITION, Manifest
from torchrelay.checkpoint.format.position import Facts, Position, Selection
from torchrelay.checkpoint.load.renaming import ResumeOptions, gone_blobs, renamed_manifest
from torchrelay.checkpoint.load.verify import Target
from torchrelay.checkpoint.log.retention import KEEP_ALL, Keeping
from torchrelay.checkpoint.save.agreement import ReplicaCheck, SpecExchange
from torchrelay.checkpoint.save.capture import (
    NodeHistory,
    NodeState,
    Unsaved,
    built_by_program,
    capture,
    check_whole,
)
from torchrelay.checkpoint.save.dedup import Reuse
from torchrelay.checkpoint.save.pipeline import SaveJob, make_plan, save_epoch, touch_buffers
from torchrelay.checkpoint.save.replicas import checked_every
from torchrelay.checkpoint.state.checkpoint_set import SetMember, check_remade, members_of, stored_blobs
from torchrelay.checkpoint.state.module_leaves import PARAMS
from torchrelay.checkpoint.state.names import check_recreatable
from torchrelay.checkpoint.state.restore.gradients import Gradients
from torchrelay.checkpoint.state.restore.rehearsal import NodeStructure, orders_of
from torchrelay.checkpoint.state.steps import watch_steps
from torchrelay.checkpoint.storage.base import Placed, SingleWriter, Storage, check_single_writer
from torchrelay.checkpoint.storage.open import Tier, check_tier, storage_of
from torchrelay.checkpoint.storage.work import Clock
from torchrelay.errors import BlobError, NotAllowedNowError, UsageError
from torchrelay.jobs.blobs import Scope
from torchrelay.jobs.cluster import GRADIENTS, NodePlace
from torchrelay.jobs.random import RandomStreams
from torchrelay.jobs.runtime import undisturbed
from torchrelay.jobs.session import Session, together, warn
from torchrelay.jobs.workspace import Workspace
from torchrelay.metadata.handlers import NodeStats

if TYPE_CHECKING:
    from torchrelay.checkpoint.save.background import Background, Outcome

States = tuple[NodeState, ...]
Members = dict[str, dict[str, SetMember]]
"""What each hosted node saves, by name."""


class Engine:
    """Saves and loads the nodes of a session; its options are those of `MultiNodeCheckpointManager`.

    `ledger` is the session's log, `retaining` applies `keeping`. `say` gets a line per change; None: rank 0
    warns.
    """

    def __init__(
        self,
        prefix: str | Path,
        *,
        keeping: Keeping = KEEP_ALL,
        takeover_secs: float = 15.0,
        background: Background | None = None,
        reuse: bool | None = None,
        selection: Selection,
        share_reads: bool | None,
        compare_every: int | None = None,
        single_writer: SingleWriter = None,
        tier: Tier | None = None,
        resume: ResumeOptions,
    ) -> None:
        self.selection, self.resume = selection, resume
        self.say: Callable[[str], None] | None = None
        for name, value in (("reuse", reuse), ("share_reads", share_reads)):
            if value is not None and type(value) is not bool:
                raise UsageError(f"invalid {name}={value!r:.80}: expected True, False or None")
        self.share_reads = bool(share_reads)
        looking = background is None if reuse is None else reuse
        self.single_writer = check_single_writer(single_writer)
        place = storage_of(prefix, "the checkpoint prefix", self.single_writer)
        self.storage: Storage = place
        if check_tier(tier) is None or tier is None:
            self.ledger = Ledger(place, takeover_secs)
        else:  # both are local ones, followed by the remote ones
            from torchrelay.checkpoint.log.tiered_storage import TierStorage
            from torchrelay.checkpoint.tiering.multi_host import HostsLedger

            self.storage = storage = TierStorage(tier.directory, place)
            self.ledger = HostsLedger(storage, tier, keeping, takeover_secs)
        self.retaining = Retaining(self.ledger, keeping)
        self.background = background
        self.stored_names: dict[str, str] = {}
        self.members: Members | None = None
        """The names to save, once they are fixed."""
        self._registered: frozenset[str] = frozenset()
        """Names of blobs registered by any node of the job."""
        self._made_by_init: tuple[str, ...] = ()
        self._demoted: set[str] = set()
        self._histories: defaultdict[str, NodeHistory] = defaultdict(NodeHistory)
        self._exchange = SpecExchange()
        self._compare_every = checked_every(compare_every)
        self._replicas = ReplicaCheck(self._compare_every)
        self._reuse = Reuse(self.storage, self.ledger.view) if looking else None
        self._streams: dict[str, RandomStreams] = {}
        self._gradients: dict[str, Gradients] = {}
        self._stats: dict[str, NodeStats] = {}
        self._unsaved = Unsaved(selection)
        self._reported_changes: set[str] = set()

    # Job and nodes

    def bind(self, job_name: str | None) -> None:
        """Serve the job of this name; None stands for the name of the directory."""
        self.ledger.job_name = job_name
        self._replicas = ReplicaCheck(self._compare_every)
        self._histories.clear()  # other objects follow
        if self._reuse is not None:
            self._reuse.forget()

    def reading_from(self, prefix: str) -> Engine:
        """A copy that reads another directory."""
        other = Engine(prefix, selection=self.selection, share_reads=self.share_reads, resume=self.resume)
        other.say, other._made_by_init = self.say, self._made_by_init
        other.stored_names, other._demoted = self.stored_names, self._demoted
        other.members, other._registered = self.members, self._registered
        return other

    def _saved(self, session: Session) -> dict[str, NodePlace]:
        """The saved nodes: their places under stored names, numbered among themselves."""
        named = [place for place in session.nodes if place.name in self.stored_names] or session.nodes
        return {
            place.name: replace(place, name=self._stored(place.name), rank=number, world_size=len(named))
            for number, place in enumerate(named)
        }

    def _stored(self, node: str) -> str:
        return self.stored_names.get(node, node)

    # The checkpoint set

    def seal(self, session: Session) -> None:
        """Fix the set: the names that the hosted nodes hold now.

        Raises BlobError on all processes for an object that a later launch could not recreate.
        """

        def look(place: NodePlace, workspace: Workspace, members: dict[str, SetMember]) -> set[str]:
            held = workspace.entries()  # a copy of all
            entries = {name: held[name] for name in members}
            registered = {name for name, entry in entries.items() if entry.blob is not None}
            check_recreatable({name: entry.value for name, entry in entries.items()}, registered)
            check_remade(entries, registered, self.selection)
            # Raise for tensors that `init` sharded: a resume skips `init` and would use unsharded ones.
            start = self._histories[place.name].start
            placed = start.placed(NodeStructure(built_by_program(workspace))) if start else []
            if names := [name for name in placed if self.selection.saves(name)]:
                more = f" and {len(names) - 3} more" if len(names) > 3 else ""
                raise BlobError(
                    f"{', '.join(names[:3])}{more} of {place} was sharded, or gathered, in init, which a "
                    "resume skips: call fully_shard, parallelize_module and the like where the job is built "
                    "or in @job.setup"
                )
            return entries.keys() - registered

        self._fix(session, look)

    def _fix(
        self, session: Session, look: Callable[[NodePlace, Workspace, dict[str, SetMember]], set[str]]
    ) -> None:
        """Fix what hosted nodes hold now, and send it to all processes.

        For a saved node `look` adds what else it saves, and returns the names that `init` made.
        """
        watch_steps()
        found: Members = {}

        def names() -> list[list[str]]:
            made, saved = set[str](), self._saved(session)
            for place in session.local_nodes:
                workspace = session.workspace(place.name)
                found[place.name] = members_of(workspace)
                if place.name in saved:
                    made |= look(place, workspace, found[place.name])
            here = {name for members in found.values() for name, one in members.items() if one.registered}
            return [sorted(made), sorted(here)]

        answers = together(session.peers, "checkpoint set", names)
        self._made_by_init = tuple(sorted({name for made, _ in answers for name in made}))
        self._registered = frozenset(name for _, here in answers for name in here)
        self.members = found

    def seal_like(self, session: Session, manifest: Manifest) -> None:
        """Fix the set to the blobs of a manifest and those registered now."""

        def look(place: NodePlace, workspace: Workspace, members: dict[str, SetMember]) -> set[str]:
            registered = dict(members)
            today = renamed_manifest(manifest, self.resume.rename, registered)
            gone = frozenset() if self.resume.strict else gone_blobs(today, registered)
            # Entries of dicts were blobs of their own once.
            stored = [
                name
                for name in stored_blobs(today, self._stored(place.name))
                if name in registered or not (name in gone or workspace.lies_inside(name))
            ]
            check_remade(stored, registered, self.selection)
            members.clear()
            members.update({**{name: SetMember(name) for name in stored}, **registered})
            own = (one for one in today.leaves if one.scope == "rank" and one.role not in OF_POSITION)
            self._demoted.update(leaf.name for leaf in own)
            return set(stored).difference(registered)

        self._demoted = set()
        self._fix(session, look)

    # Saving

    @undisturbed()
    def save(self, session: Session, position: Position, facts: Facts) -> None:
        """Save all nodes at a position; returns once it is committed and acknowledged.

        With a background, within a run, it returns once training can no longer change the saved bytes. It
        waits for an earlier save first; `settle` returns the outcome of both.

        Raises SaveFailedError, StorageError or BlobError on all processes; nothing is committed then. Raises
        FencedError when another job has taken the directory over.
        """
        self.wait()
        if self.ledger.holding is None:
            self.ledger.open(session.peers)
        if self.members is None:
            self.seal(session)
        if not (self._registered or self._made_by_init or self.ledger.in_run):
            raise UsageError(
                "nothing is registered in the session's workspaces, so only random states would be "
                "saved: pass the blobs to torchrelay.Checkpointer or JobRunner, or make them by "
                "session.workspace()"
            )
        self.ledger.wait_for_room(session.peers)
        self.retaining.delete_left()
        clock = Clock()
        with clock.spent("stage"):
            states, failed = self._capture(session)
        everybody = self._job(session, states, position, facts)
        with clock.spent("plan"):
            members = [one for known in (self.members or {}).values() for one in known.values()]
            forced = frozenset(one.name for one in members if one.scope is Scope.REPLICATED)
            demoted, whole = self._replicas.run(everybody, forced, failed=failed)
            self._unsaved.patterns(session, states, position)
            # Save leaves that differ per node from now on, except gradients, which each save checks.
            names = frozenset(name for name in demoted if not name.startswith(GRADIENTS))
            self._demoted |= names
            kept = (self.members or {}).values()
            names -= {name for members in kept for name, member in members.items() if member.generator}
            names = frozenset(name for name in names if not name.endswith(f".{PARAMS}"))
            if names and session.peers.rank == 0:
                warn(
                    f"{', '.join(sorted(names))} {'differs' if len(names) == 1 else 'differ'} between nodes: "
                    "saved per node from now on; register with scope='rank' to avoid this warning"
                )
            saved = self._saved(session)
            job = everybody.of_nodes({one.rank: saved.get(one.name) for one in session.nodes})
            plan = make_plan(job := job.with_rank_scope(self._demoted | demoted), self._exchange)
        if self.background is not None and self.ledger.in_run:
            self.background.begin(session, job, plan, clock, whole, self.retaining.in_background)
            return
        self._took("checkpoint_save", save_epoch(job, plan, clock, whole, self._exchange))
        self.retaining.now(session.peers)

    def _job(self, session: Session, states: States, position: Position, facts: Facts) -> SaveJob:
        holding = self.ledger.holding
        if holding is None:
            raise NotAllowedNowError("the checkpoint log is not open: save within a train call")
        return SaveJob(
            self.storage,
            session.peers,
            tuple(replace(one, name=self._stored(one.name)) for one in session.nodes),
            states,
            position,
            replace(facts, selection=self.selection, made_by_init=self._made_by_init),
            holding,
            self.ledger.commit,
            known=self.ledger.may_name,
            make_room=self.ledger.deletions.wait,
            reuse=self._reuse,
            assume_unchanged=self.background is None,
            apart=self.ledger.apart(),
        )

    def check_place(self) -> None:
        """Raise LostDirectoryError if the directory of the checkpoints has disappeared."""
        if isinstance(self.storage, Placed):
            self.storage.check_place()

    def prepare(self, session: Session) -> None:
        """Record the program's state before a load, and allocate memory for saves."""
        for place in session.local_nodes:
            built = built_by_program(session.workspace(place.name))
            self._histories[place.name].began(built, orders_of(built))
        if self.background is not None:
            self.background.prepare(session)
        else:
            touch_buffers(self.storage, session)

    def wait(self, *, unguarded: bool = False) -> None:
        """Return when no save is in flight; `unguarded`: also when no registered object waits for one."""
        if self.background is not None:
            self.background.wait(unguarded=unguarded)

    def settle(self) -> Iterator[Outcome]:
        """Wait for the save in flight; return its outcome and earlier outcomes not returned yet.

        Retention follows in the background, at the next save or at the end. Sends no messages.
        """
        self.wait()
        for outcome in self.background.take_outcomes() if self.background is not None else []:
            if outcome.stats is not None:
                self._took("checkpoint_save", outcome.stats)
            yield outcome

    def finish(self, session: Session) -> None:
        """Return when no save and no deletion is pending; FencedError if another job took over."""
        self.wait(unguarded=True)
        if self.background is not None:
            self.retaining.in_background()
            self.ledger.finish_deletions()  # with per-host directories, hosts are notified of deleted files
        if self.ledger.drain(session.peers):
            self.retaining.now(session.peers)
        self.retaining.end(session.peers)

    def _capture(self, session: Session) -> tuple[States, Exception | None]:
        """The state of the hosted nodes, or the error of listing them, which is reported to all later."""
        members = self.members or {}
        states: list[NodeState] = []
        saved = self._saved(session)
        try:
            for place in session.local_nodes:
                stored, names = self._stored(place.name), members.get(place.name, {})
                known = (
                    names,
                    self._demoted,
                    self._histories[place.name],
                    self.selection,
                    self.resume.exclude,
                )
                if place.name not in saved:  # compared only, so it need not be fit to be saved
                    with suppress(Exception):
                        states.append(capture(session, place, stored, *known))
                    continue
                self._unsaved.late_names(session, place, names)
                states.append(capture(session, place, stored, *known))
                self._unsaved.training(session, place, states[-1])
                if len(saved) < len(session.nodes):
                    check_whole(states[-1])
        except BlobError as error:
            return (), type(error)(f"{error} (on {place})")
        except Exception as error:
            return (), error
        return tuple(states), None

    # Loading

    @undisturbed()
    def load_epoch(self, session: Session, epoch: int) -> None:
        """Load an epoch of the current branch into the workspaces of the hosted nodes."""
        self.load(session, self.ledger.verify_epoch(session.peers, epoch))

    @undisturbed()
    def load(self, session: Session, target: Target) -> None:
        """Load a verified position; `take_streams` and `take_gradients` have the rest."""
        from torchrelay.checkpoint.load.resume import LoadJob, load_all

        self.wait(unguarded=True)
        members, selection = self.members or {}, self.selection
        job = LoadJob(
            self.storage, session, target, self._stored, members, self._registered,
            frozenset(self._saved(session)), selection, self.share_reads, self.resume,
        )  # fmt: skip
        self._streams, self._gradients, stats, changes = load_all(job)
        self._took("checkpoint_load", stats)
        # Report once what a load changed because the program differs; all processes have the same lines.
        lines = [one for one in changes.lines(target.position) if one not in self._reported_changes]
        self._reported_changes.update(lines)
        if self.say is not None:
            for line in lines:
                self.say(line)
        elif session.peers.rank == 0:
            for line in lines:
                warn(line)
        registered = frozenset(name for known in members.values() for name in known)
        today = renamed_manifest(target.manifest, self.resume.rename, registered)
        wrappers = frozenset(leaf.name for leaf in today.leaves if leaf.role == "subclass")
        for place in session.local_nodes:
            self._histories[place.name].shown = wrappers
        if self._reuse is not None:
            self._reuse.loaded(target.manifest)

    def go_on_at(self, session: Session, target: Target) -> None:
        """Fix the set to that of a verified position, if not yet fixed, and load that position."""
        if self.members is None:
            self.seal_like(session, target.manifest)
        self.load(session, target)

    def take_streams(self) -> dict[str, RandomStreams]:
        """The random states that the last load found, by hosted node."""
        streams, self._streams = self._streams, {}
        return streams

    def take_gradients(self) -> dict[str, Gradients]:
        """The gradients that the last load found, by hosted node, ready to be installed."""
        gradients, self._gradients = self._gradients, {}
        return gradients

    def load_blobs(self, session: Session, names: Sequence[str], epoch: int, *, strict: bool) -> bool:
        """Load some blobs into the workspaces; False, changing nothing, if any is missing.

        Warns with the reason. With `strict=False` names that the epoch lacks are ignored.
        """
        self.wait()
        entry = self.ledger.find_or_none(session.peers, epoch)
        if entry is None:
            return self._nothing_loaded(session, f"epoch {epoch} is not committed in {self.storage.url}")
        read: list[Manifest] = []
        together(
            session.peers, "partial load: manifest", lambda: read.append(codec.read(self.storage, entry))
        )
        from torchrelay.checkpoint.load.partial import load_some

        why, stats = load_some(self.storage, session, read[0], names, self._stored, strict=strict)
        self._took("checkpoint_partial_load", stats)
        return why is None or self._nothing_loaded(session, f"epoch {epoch}: {why}")

    @staticmethod
    def _nothing_loaded(session: Session, why: str) -> bool:
        if session.peers.rank == 0:
            warn(f"nothing was loaded: {why}", stacklevel=3)
        return False

    # Statistics

    def _took(self, action: str, stats: NodeStats) -> None:
        self._stats.pop(action, None)  # the newest is last
        self._stats[action] = stats

    def last_stats(self, action: str | None = None) -> NodeStats:
        """The times of the last save or load, or of the last action of either kind; empty without one."""
        last = next(reversed(self._stats), "") if action is None else action
        return self._stats.get(last, NodeStats([]))

    def names(self) -> list[str]:
        """The names that the hosted nodes save, sorted; raises UsageError before they are fixed."""
        if self.members is None:
            raise UsageError("the names are not fixed yet: run manager.init(nodes) first")
        saved = self.stored_names or self.members
        return sorted({name for node in self.members if node in saved for name in self.members[node]})

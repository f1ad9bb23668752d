"""Provide the base class of both checkpoint managers, with the method names of Caffe2's managers.

Methods that do work return a group for `session.run`; the others return their result directly.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrelay.checkpoint.format.manifest import codec
from torchrelay.checkpoint.format.manifest.schema import shard_path
from torchrelay.checkpoint.format.position import Facts, Patterns, Position, selection_of
from torchrelay.checkpoint.load.renaming import resume_options_of
from torchrelay.checkpoint.load.verify import Target
from torchrelay.checkpoint.log.retention import Best, BestEpochs, Keeping
from torchrelay.checkpoint.manager.engine import Engine
from torchrelay.checkpoint.storage.base import SingleWriter
from torchrelay.checkpoint.storage.open import Tier, joined
from torchrelay.errors import UsageError
from torchrelay.jobs.cluster import check_node_name
from torchrelay.jobs.job import Job, SessionGroup, TaskGroup
from torchrelay.jobs.session import Session
from torchrelay.metadata.handlers import Holder, MetadataHandler

if TYPE_CHECKING:
    from torchrelay.checkpoint.save.background import Background, Outcome
    from torchrelay.checkpoint.save.change_detection import Verify

DB_TYPE = "torchrelay"
Work = TaskGroup | SessionGroup
"""A group that `session.run` accepts."""


class Manager:
    """Base of the managers, whose options `MultiNodeCheckpointManager` describes.

    A manager may serve several runs, one after another. The nodes of the first `init` stay fixed.
    """

    def __init__(
        self,
        db_prefix: str | Path,
        metadata_handler: MetadataHandler | None = None,
        *of_caffe2: Any,
        keep_last: int | None = None,
        keep_every: int | None = None,
        keep_best: BestEpochs = None,
        keep_optimizer_last: int | None = None,
        takeover_secs: float = 15.0,
        asynchronous: bool = False,
        staging_limit: int | None = None,
        verify_staging: Verify = "samples",
        reuse: bool | None = None,
        include: Patterns = None,
        exclude: Patterns = None,
        share_reads: bool | None = None,
        compare_every: int | None = None,
        single_writer: SingleWriter = None,
        tier: Tier | None = None,
        rename: Mapping[str, str] | None = None,
        resume_exclude: Patterns = None,
        resume_strict: bool = False,
    ) -> None:
        self.db_prefix = str(db_prefix)
        self.metadata_handler = check_handler(metadata_handler, *of_caffe2)
        self.engine = Engine(
            db_prefix,
            keeping=Keeping(keep_last, keep_every, keep_optimizer_last, Best.of(keep_best)),
            takeover_secs=takeover_secs,
            background=_background_of(asynchronous, staging_limit, verify_staging),
            reuse=reuse,
            selection=selection_of(include, exclude),
            share_reads=share_reads,
            compare_every=compare_every,
            single_writer=single_writer,
            tier=tier,
            resume=resume_options_of(rename, resume_exclude, resume_strict),
        )
        self._nodes: tuple[str, ...] | None = None
        self._path_prefix: str | None = None
        self._path_type: str | None = None
        self._holder: Holder | None = None
        """The last holder of the log; on rank 0 only."""
        self._facts = Facts()

    @property
    def asynchronous(self) -> bool:
        """Whether saves of a run are written in the background."""
        return self.engine.background is not None

    # Job and nodes

    def bind(self, job: Job, *, default_name: str | None = None) -> None:
        """Serve this job (`default_name` if it has no name); raise UsageError for another job's directory."""
        self.engine.bind(job.name or default_name)

    def stored_name(self, node: str) -> str:
        """The name under which a node of the job is stored."""
        return node

    def _check_nodes(self, nodes: Sequence[str] | None) -> tuple[str, ...]:
        names = tuple(check_node_name(name) for name in nodes or ())
        if not names:
            raise UsageError(
                "the node list of a checkpoint manager is empty: give the names of the job's nodes"
            )
        if len(set(names)) != len(names):
            raise UsageError(f"the node list has repetitions: {', '.join(names)}")
        return names

    def take_replicated(self) -> list[Position]:
        """Positions uploaded to `db_prefix` since the last call; on rank 0."""
        return self.engine.ledger.take_replicated()

    def _use_nodes(self, nodes: Sequence[str] | None) -> bool:
        """Fix the nodes at the first call; returns whether this was the first."""
        names = self._check_nodes(nodes)
        if self._nodes is not None and names != self._nodes:
            raise UsageError(
                f"this manager was initialised for the nodes {', '.join(self._nodes)}, "
                f"not {', '.join(names)}: use another manager (and another directory) for another job"
            )
        first, self._nodes = self._nodes is None, names
        self.engine.stored_names = {name: self.stored_name(name) for name in names}
        return first

    # Methods of Caffe2's managers

    def set_params(
        self, nodes: Sequence[str], path_prefix: str | None = None, path_type: str | None = None
    ) -> None:
        """Pass to the handler where this job keeps its checkpoints; None keeps an earlier value."""
        self._path_prefix = self._path_prefix if path_prefix is None else path_prefix
        self._path_type = self._path_type if path_type is None else path_type
        if self.metadata_handler is not None:
            self.metadata_handler.set_params(
                db_prefix=self.db_prefix,
                db_type=DB_TYPE,
                node_names=[self.stored_name(node) for node in nodes],
                path_prefix=self._path_prefix,
                path_type=self._path_type,
            )

    def get_resume_from_epoch_id(self, user_epoch: int | None = None) -> int | None:
        """The epoch to resume from: the handler's choice, or `user_epoch` without a handler."""
        if self.metadata_handler is None:
            return user_epoch
        return self.metadata_handler.last_epoch(user_epoch=user_epoch)

    def init(
        self,
        nodes: Sequence[str] | None = None,
        retrieve_from_epoch: int | None = None,
        path_prefix: str | None = None,
        path_type: str | None = None,
    ) -> Work:
        """Fix the checkpoint set: the names that the nodes hold now, or those of an epoch.

        `path_prefix` is another directory that has this epoch. Later calls return an empty group.
        """
        _check_path_type(path_type)
        self._use_nodes(nodes)
        if self.engine.members is not None:
            return TaskGroup(name="checkpoint init (done before)")
        if retrieve_from_epoch is None:
            return SessionGroup("checkpoint init", self.engine.seal)
        epoch = retrieve_from_epoch

        def seal_like(session: Session) -> None:
            engine = self.engine if path_prefix is None else self.engine.reading_from(path_prefix)
            self.engine.seal_like(session, engine.ledger.verify_epoch(session.peers, epoch).manifest)

        return SessionGroup("checkpoint init", seal_like)

    def note(self, facts: Facts) -> None:
        """Set the facts that the manifest of the next save stores."""
        self._facts = facts

    def save(self, epoch: int | Position) -> Work:
        """Save all nodes as `epoch`; the group ends when the epoch is committed and acknowledged.

        An asynchronous save of a run ends earlier; `settle` returns whether it was committed.
        """
        position = epoch if isinstance(epoch, Position) else Position(epoch)
        return SessionGroup(f"checkpoint save {position}", lambda session: self._save(session, position))

    def _save(self, session: Session, position: Position) -> None:
        """Save at a position; outside of a run, release the directory afterwards."""
        ledger = self.engine.ledger
        in_run = ledger.in_run
        try:
            self.engine.save(session, position, self._facts)
            if not in_run:
                ledger.drain(session.peers)
        finally:
            self._note_holder()
            if not in_run:
                ledger.close()

    def settle(self) -> Iterator[Outcome]:
        """Wait for the save in flight, if any, and return its outcome; see `Engine.settle`."""
        return self.engine.settle()

    def finish(self, session: Session) -> None:
        """Return when no save is in flight and all pending deletions are done; see `Engine.finish`."""
        self.engine.finish(session)

    def load(self, epoch: int, path_prefix: str | None = None, path_type: str | None = None) -> Work:
        """Load an epoch of the current branch into the nodes' workspaces, verified, all or nothing.

        `path_prefix` is another directory to read from.
        """
        _check_path_type(path_type)
        engine = self.engine if path_prefix is None else self.engine.reading_from(path_prefix)
        return SessionGroup(f"checkpoint load {epoch}", lambda session: engine.load_epoch(session, epoch))

    def go_on_at(self, nodes: Sequence[str], target: Target) -> Work:
        """Load a verified position, also one within an epoch, as `init` and `load` do for an epoch."""
        self._use_nodes(nodes)
        position = target.position
        return SessionGroup(
            f"checkpoint load {position}", lambda session: self.engine.go_on_at(session, target)
        )

    def load_blobs_from_checkpoint(self, blob_names: Sequence[str], epoch: int) -> Work:
        """Load those of these names that the epoch has; ignore the others."""
        return SessionGroup(
            f"checkpoint partial load {epoch}",
            lambda session: self.engine.load_blobs(session, blob_names, epoch, strict=False),
        )

    def load_blobs_locally(
        self, nodes: Sequence[str], blob_names: Sequence[str], epoch: int | None, session: Session
    ) -> bool:
        """Load names of an epoch into this session, also those of other nodes (`node:name`).

        Returns False, changes nothing and warns if the epoch is not committed, lacks a name, or lacks a
        shard.
        """
        if epoch is None:
            raise UsageError("no epoch to load blobs from: give epoch=")
        self._use_nodes(nodes or [place.name for place in session.nodes])
        return self.engine.load_blobs(session, blob_names, epoch, strict=True)

    def get_ckpt_db_name(self, node: str, epoch: int) -> str | None:
        """The logical name `prefix/node.epoch`; None for a node that this manager does not know."""
        if self._nodes is None or node not in self._nodes:
            return None
        return db_name(epoch, self.stored_name(node), self.db_prefix)

    def files(self, node: str, epoch: int) -> list[str]:
        """The committed files of a node in an epoch of the current branch; empty when there are none."""
        entry = self.engine.ledger.view().find(epoch)
        if entry is None:
            return []
        manifest = codec.read(self.engine.storage, entry)
        url, names, own = self.engine.storage.url, manifest.world.names, self.stored_name(node)
        return [f"{url}/{shard_path(manifest, one)}" for one in manifest.shards if names[one.node] == own]

    def blob_list(self) -> list[str]:
        """The names that the nodes of this process save, sorted; raises UsageError before `init`."""
        return self.engine.names()

    def check_db_exists(self, epoch: int) -> bool:
        """Whether an epoch is committed on the current branch."""
        return self.engine.ledger.view().find(epoch) is not None

    def cp_accessible(self, epoch: int | None = None) -> bool:
        """Whether the handler allows a save now; True without a handler."""
        if self.metadata_handler is None:
            return True
        return bool(self.metadata_handler.cp_accessible(epoch))

    def write_checkpoint_metadata(self, epoch: int) -> None:
        """Notify the handler that an epoch is saved."""
        if self.metadata_handler is not None:
            self._tell_holder(self.metadata_handler)
            self.metadata_handler.write(epoch=epoch)

    def report_checkpoint_stats(self, action: str) -> None:
        """Pass the seconds of the last save or load by logical path to the handler."""
        if self.metadata_handler is not None:
            self._tell_holder(self.metadata_handler)
            self.metadata_handler.report(action, self.engine.last_stats(action))

    def collect_checkpoint_stats(self, stats: dict[str, float]) -> None:
        """Add the seconds of the last save or load to `stats`, by logical path."""
        stats.update(self.engine.last_stats())

    def _note_holder(self) -> None:
        ledger = self.engine.ledger
        if ledger.writer is not None:
            view, base = ledger.writer.view, ledger.writer.view.current.base
            self._holder = Holder(
                str(view.job_uuid),
                str(view.job_name),
                ledger.generation,
                view.current.id,
                None if base is None else base.epoch,
            )

    def _tell_holder(self, handler: MetadataHandler) -> None:
        """Pass the log's current or last holder to a handler that has `opened`."""
        self._note_holder()
        opened = getattr(handler, "opened", None)
        if opened is not None and self._holder is not None:
            opened(self._holder)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.db_prefix!r})"


def check_handler(handler: Any, *of_caffe2: Any) -> MetadataHandler | None:
    """The handler, checked; raises UsageError for a wrong type and for Caffe2's `db_type` argument.

    `of_caffe2` are the positional arguments after it.
    """
    if not of_caffe2 and (
        handler is None or (isinstance(handler, MetadataHandler) and not isinstance(handler, type))
    ):
        return handler
    if isinstance(handler, str):
        raise UsageError(
            f"invalid metadata_handler {handler!r:.80}: expected an object, not Caffe2's db_type (files "
            "are always safetensors); give it as metadata_handler=..."
        )
    if of_caffe2:
        raise UsageError("too many positional arguments: give those after metadata_handler by keyword")
    raise UsageError(
        f"invalid metadata_handler {handler!r:.80}: expected an object with set_params, last_epoch, "
        "write, report and cp_accessible"
    )


def get_ckpt_filename(node_name: str, epoch: int) -> str:
    """Return the logical name of a node's part of an epoch, as Caffe2 named its file.

    Args:
        node_name: name of the node.
        epoch: number of the epoch.

    Returns:
        `node.epoch`.

    Example:
        >>> get_ckpt_filename("trainer_0", 3)
        'trainer_0.3'
    """
    return f"{check_node_name(node_name)}.{epoch}"


def db_name(epoch: int, node_name: str, db_prefix: str | Path, path_prefix: str | Path | None = None) -> str:
    """Return the logical path of a node's part of an epoch below a directory or URL.

    Args:
        epoch: number of the epoch.
        node_name: name of the node.
        db_prefix: directory or URL of the checkpoints.
        path_prefix: used instead of `db_prefix` if given.

    Returns:
        `db_prefix/node.epoch`.

    Example:
        >>> db_name(3, "trainer_0", "s3://bucket/run")
        's3://bucket/run/trainer_0.3'
    """
    return joined(str(db_prefix if path_prefix is None else path_prefix), get_ckpt_filename(node_name, epoch))


def _check_path_type(path_type: str | None) -> None:
    """Raise UsageError for a path type: it is only passed to the handler, by `set_params`."""
    if path_type is not None:
        raise UsageError(
            f"invalid path_type {path_type!r:.80}: leave it out; path_prefix is a directory, or a URL "
            "that names its storage (s3://bucket/run)"
        )


def _background_of(asynchronous: bool, staging_limit: int | None, verify: str) -> Background | None:
    """The background of an asynchronous manager, or None; raises UsageError for invalid values."""
    if type(asynchronous) is not bool:
        raise UsageError(f"invalid asynchronous={asynchronous!r:.80}: expected True or False")
    if staging_limit is not None and (type(staging_limit) is not int or staging_limit < 0):
        raise UsageError(f"invalid staging_limit={staging_limit!r:.80}: expected a number of bytes, or None")
    if staging_limit is not None and not asynchronous:
        raise UsageError("staging_limit needs asynchronous=True")
    if verify not in ("samples", "full"):
        raise UsageError(f"invalid verify_staging={verify!r:.80}: expected 'samples' or 'full'")
    if not asynchronous:
        return None
    from torchrelay.checkpoint.save.background import Background

    return Background(staging_limit, "full" if verify == "full" else "samples")

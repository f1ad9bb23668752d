"""What both managers are: faces of one engine, in the words of Caffe2's checkpoint managers.

Those verbs that do work return a group for `session.run`; the others answer at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrelay.checkpoint.format.manifest import codec
from torchrelay.checkpoint.format.manifest.schema import shard_paths
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
"""What `session.run` takes."""


class Manager:
    """Base of the managers; use CheckpointManager or MultiNodeCheckpointManager.

    `db_prefix` is the directory of the checkpoints, or a URL (`s3://bucket/run`). A manager may be used for
    several runs, one after another; the nodes it was first initialised with stay the same.

    `keep_last` epochs are kept, every `keep_every`-th one, and the best by a metric, `keep_best=("val/acc",
    "max")` or `("val/acc", "max", 3)` (None of all: all epochs); the newest that can be resumed from stays in
    any case. Only the newest `keep_optimizer_last` of these keep their optimizer, the others can be loaded
    but not resumed from.

    `asynchronous=True`: within a run a save returns when nothing can reach what it saves any more, and
    is written and committed behind the training, one at a time. Then `staging_limit` bytes per process
    are staged at most (None: half of its share of the free memory), and `verify_staging` says how much
    of what was copied behind the training is compared: "samples", or "full".

    Tensors that have not changed since the epoch before are referenced there instead of written again, as
    long as at most 8 older tries and half of each are in use; with `reuse=False` every epoch stands alone.
    Looking for them holds the training up, so asynchronous saves write all unless `reuse=True`.

    `include` and `exclude` are patterns of leaves (`"debug"`, `"*.inv_freq"`): saved is what the former mean
    (None: everything) and the latter do not. What is left out stays, after a load, as the program made it;
    a run that left it out resumes only with the same exception. Random states are always saved.

    `share_reads=True` is for several hosts and a storage that is slower than the network between them: of
    tensors that all nodes load whole, 8 MiB and more together, each host reads a share and sends it to the
    others, which verify it. All processes need the same setting, else each host reads everything, as without.

    Parameters and optimizer state are compared between their replicas, all bytes at the first save and every
    `compare_every` epochs (10), samples otherwise; a difference fails the save and names the tensors.

    A second job on the same place is kept out by names that cannot be created twice; a start tries that, and
    refuses a place where it does not hold (UsageError). `single_writer="external"` says that something else
    makes sure that never more than one job, or command that tags or pins, writes there; nothing is tried
    then.

    `tier=Tier(near="/local/nvme/run")` saves to a quick local directory, acknowledged as `local`, and sends
    what is saved there to `db_prefix` behind the training, where it is `replicated`; see `Tier`.

    A load of all nodes may meet another program than the one that saved. A blob that is new begins as the
    program made it; one that is not registered any more is left out. Each is said in a line, and
    `resume_strict=True` refuses instead. `rename={"old.": "new."}` finds stored leaves by their names of
    today, those in optimizers too. Leaves that `resume_exclude` names stay as made where they do not fit.
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
        """As whom the log was held last; known on rank 0 alone."""
        self._facts = Facts()

    @property
    def asynchronous(self) -> bool:
        """Whether saves of a run go on behind the training."""
        return self.engine.background is not None

    # Who

    def bind(self, job: Job, *, default_name: str | None = None) -> None:
        """Serve this job (called `default_name` if it has no name); another's directory is refused."""
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
        """Positions that came from the near place to `db_prefix` since the last time; on rank 0."""
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

    # What Caffe2's managers do

    def set_params(
        self, nodes: Sequence[str], path_prefix: str | None = None, path_type: str | None = None
    ) -> None:
        """Tell the handler where this job keeps its checkpoints; None keeps an earlier value."""
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
        """The handler's answer to the user's wish; without a handler the wish itself."""
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

        `path_prefix` is another directory to look up that epoch in. The set of the first call is kept: later
        calls return an empty group.
        """
        _check_path_type(path_type)
        self._use_nodes(nodes)
        if self.engine.has_set:
            return TaskGroup(name="checkpoint init (done before)")
        if retrieve_from_epoch is None:
            return SessionGroup("checkpoint init", self.engine.seal)
        epoch = retrieve_from_epoch
        return SessionGroup(
            "checkpoint init", lambda session: self.engine.seal_like(session, epoch, path_prefix)
        )

    def note(self, facts: Facts) -> None:
        """What the manifest of the next save shall remember of the run."""
        self._facts = facts

    def save(self, epoch: int | Position) -> Work:
        """Save all nodes as `epoch`; the group ends when the epoch is committed and acknowledged.

        Of an asynchronous manager in a run it ends before: `settle` tells whether it was committed.
        """
        position = epoch if isinstance(epoch, Position) else Position(epoch)
        return SessionGroup(f"checkpoint save {position}", lambda session: self._save(session, position))

    def _save(self, session: Session, position: Position) -> None:
        """Outside of a run the directory is let go again at once."""
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
        """Wait for the save in flight, if there is one, and tell what became of it; see `Engine.settle`."""
        return self.engine.settle()

    def finish(self, session: Session) -> None:
        """Return when nothing is in flight and nothing is being deleted; see `Engine.finish`."""
        self.engine.finish(session)

    def load(self, epoch: int, path_prefix: str | None = None, path_type: str | None = None) -> Work:
        """Load an epoch of the current branch into the nodes' workspaces, verified, all or nothing.

        `path_prefix` is another directory to read from.
        """
        _check_path_type(path_type)
        engine = self.engine if path_prefix is None else self.engine.reading_from(path_prefix)
        return SessionGroup(f"checkpoint load {epoch}", lambda session: engine.load_epoch(session, epoch))

    def go_on_at(self, nodes: Sequence[str], target: Target) -> Work:
        """Load a proved position, also one inside of an epoch, as `init` and `load` do an epoch."""
        self._use_nodes(nodes)
        position = target.position
        return SessionGroup(
            f"checkpoint load {position}", lambda session: self.engine.go_on_at(session, target)
        )

    def load_blobs_from_checkpoint(self, blob_names: Sequence[str], epoch: int) -> Work:
        """Load what of these names the epoch has; the others are ignored."""
        return SessionGroup(
            f"checkpoint partial load {epoch}",
            lambda session: self.engine.load_blobs(session, blob_names, epoch, strict=False),
        )

    def load_blobs_locally(
        self, nodes: Sequence[str], blob_names: Sequence[str], epoch: int | None, session: Session
    ) -> bool:
        """Load names of an epoch into this session, also such as other nodes saved (`node:name`).

        False, with nothing changed and a warning that says why, when the epoch is not committed, has nothing
        of a name, or lacks a shard that holds it.
        """
        if epoch is None:
            raise UsageError("give the epoch to load blobs from")
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
        return [f"{self.engine.storage.url}/{one}" for one in shard_paths(manifest, self.stored_name(node))]

    def blob_list(self) -> list[str]:
        """The names that the nodes of this process save, sorted; UsageError before `init` has fixed them."""
        return self.engine.names()

    def check_db_exists(self, epoch: int) -> bool:
        """Whether an epoch is committed on the current branch."""
        return self.engine.ledger.view().find(epoch) is not None

    def cp_accessible(self, epoch: int | None = None) -> bool:
        """Whether a save may be tried now, by the handler; without one always."""
        if self.metadata_handler is None:
            return True
        return bool(self.metadata_handler.cp_accessible(epoch))

    def write_checkpoint_metadata(self, epoch: int) -> None:
        """Tell the handler that an epoch is saved."""
        if self.metadata_handler is not None:
            self._tell_holder(self.metadata_handler)
            self.metadata_handler.write(epoch=epoch)

    def report_checkpoint_stats(self, action: str) -> None:
        """Give the handler the seconds of the last save or load by logical path."""
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
        """Say as whom the log is held, or was for a save by hand, to a handler that wants to know."""
        self._note_holder()
        opened = getattr(handler, "opened", None)
        if opened is not None and self._holder is not None:
            opened(self._holder)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.db_prefix!r})"


def check_handler(handler: Any, *of_caffe2: Any) -> MetadataHandler | None:
    """The handler; raises UsageError for what cannot be one, and for a `db_type` in Caffe2's place.

    `of_caffe2` is what stands behind it there.
    """
    if not of_caffe2 and (
        handler is None or (isinstance(handler, MetadataHandler) and not isinstance(handler, type))
    ):
        return handler
    if isinstance(handler, str):
        raise UsageError(
            f"metadata_handler is {handler!r:.80}: leave Caffe2's db_type out, files are safetensors; "
            "a handler is given as metadata_handler=..."
        )
    if of_caffe2:
        raise UsageError("the handler is the last argument by place: give what follows by its name")
    raise UsageError(
        f"metadata_handler is {handler!r:.80}; it is an object with set_params, last_epoch, write, report "
        "and cp_accessible"
    )


def get_ckpt_filename(node_name: str, epoch: int) -> str:
    """The logical name of a node's part of an epoch, `node.epoch`, as Caffe2 named its file."""
    return f"{check_node_name(node_name)}.{epoch}"


def db_name(epoch: int, node_name: str, db_prefix: str | Path, path_prefix: str | Path | None = None) -> str:
    """The same below a directory: `db_prefix/node.epoch`, or below `path_prefix` where that is given."""
    return joined(str(db_prefix if path_prefix is None else path_prefix), get_ckpt_filename(node_name, epoch))


def _check_path_type(path_type: str | None) -> None:
    if path_type is not None:
        raise UsageError(
            f"path_type is {path_type!r:.80}; leave it out: path_prefix is a directory, or a URL that names "
            "its storage (s3://bucket/run). A handler is told a path_type by set_params"
        )


def _background_of(asynchronous: bool, staging_limit: int | None, verify: str) -> Background | None:
    """The background of an asynchronous manager; raises UsageError for values that cannot be."""
    if type(asynchronous) is not bool:
        raise UsageError(f"asynchronous is {asynchronous!r:.80}; it is True or False")
    if staging_limit is not None and (type(staging_limit) is not int or staging_limit < 0):
        raise UsageError(f"staging_limit is {staging_limit!r:.80}; it is a number of bytes, or None")
    if staging_limit is not None and not asynchronous:
        raise UsageError("staging_limit is for asynchronous saves: give asynchronous=True too")
    if verify not in ("samples", "full"):
        raise UsageError(f"verify_staging is {verify!r:.80}; it is 'samples' or 'full'")
    if not asynchronous:
        return None
    from torchrelay.checkpoint.save.background import Background

    return Background(staging_limit, "full" if verify == "full" else "samples")

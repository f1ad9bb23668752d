"""Checks before a run begins, its start position, and binding of blobs.

Checks before the user's first task change nothing and leave nothing behind.
"""

from __future__ import annotations

import copy
import os
import secrets
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path

from torch import nn

from torchrelay.checkpoint.format.position import is_pattern
from torchrelay.checkpoint.format.values import encode
from torchrelay.checkpoint.log.view import Look
from torchrelay.checkpoint.manager.base import Manager
from torchrelay.checkpoint.state.flatten import leaves_of
from torchrelay.checkpoint.state.leaf import spec_of
from torchrelay.checkpoint.state.names import TensorNames
from torchrelay.checkpoint.state.tree_leaves import container_leaves
from torchrelay.checkpoint.storage.base import SingleWriter, check_exclusion
from torchrelay.checkpoint.storage.local import LocalStorage
from torchrelay.errors import BlobError, StorageError, UsageError
from torchrelay.jobs.blobs import Blob, Scope, holds_live, invoke, kind_of
from torchrelay.jobs.containers import is_container
from torchrelay.jobs.data.data_parallel import bare_ddp_instances
from torchrelay.jobs.job import Job
from torchrelay.jobs.session import Peers, decide, together
from torchrelay.jobs.workspace import Workspace
from torchrelay.metadata.fs import write_new
from torchrelay.metadata.run_directory import RunDirectory
from torchrelay.runners.session.base import SessionBase
from torchrelay.runners.session.steps import naming
from torchrelay.runners.session.stop import StopVerdict, only_time_is_up, over_there
from torchrelay.runners.training.journal import Journal
from torchrelay.runners.training.plan import Choice, Past, ResumeRequest, RunResult, check_epoch, choose

VISIBLE_WITHIN_SECS = 10.0
PROBE_BYTES = 1 << 20


def check_blobs(job: Job) -> None:
    """List the leaves of every existing object; raises BlobError with the path.

    Modules and optimizers are checked at the first save: `setup` may still materialise them.
    """
    for blob in job.blobs:
        if blob.is_factory or blob.scope is Scope.TRANSIENT or isinstance(blob.source, nn.Module):
            continue
        if is_container(blob.source):
            objects = {one.name: one.source for one in job.blobs}
            leaves = container_leaves(blob.name, blob.source, objects, TensorNames())
        else:
            leaves = leaves_of({blob.name: blob.source}) if not hasattr(blob.source, "param_groups") else []
        for leaf in leaves:
            spec_of(leaf)


def check_run_directory(
    run: RunDirectory, job: Job, session: SessionBase, single_writer: SingleWriter = None
) -> None:
    """Raise an error for a directory that is unusable, of another job, or not shared by all hosts."""
    peers = session.peers

    def check() -> None:
        run.check_usable()
        run.check_job(job.name)

    decide(peers, "check the run directory", check)
    if run.url is not None:
        return  # its store was checked before the download
    with _probe(run.path, peers, single_writer) as probe:
        seen = peers.exchange("run directory seen", [session.local_nodes[0].host, _appears(probe)])
    blind = sorted({host for host, sees in seen if not sees})
    if blind:
        raise UsageError(
            f"the run directory {run.path} on {seen[0][0]} differs from the one on {', '.join(blind)}: "
            "choose a directory that all hosts share"
        )


@contextmanager
def _probe(directory: Path, peers: Peers, single_writer: SingleWriter) -> Iterator[Path]:
    """Create a file on rank 0 that all ranks look for; created directories are removed again."""
    nonce = peers.exchange("probe", secrets.token_hex(8))[0]
    probe = directory / f".probe-{nonce}"
    made: list[Path] = []

    def write() -> None:
        if peers.rank == 0:
            made.extend(path for path in (directory, *directory.parents) if not path.exists())
            try:
                directory.mkdir(parents=True, exist_ok=True)
                write_new(probe, bytes(PROBE_BYTES))  # and sync, as a save will
            except OSError as error:
                raise StorageError(
                    f"the run directory {directory} cannot be used: {error.strerror}; "
                    "choose a writable directory with free space"
                ) from error
            check_exclusion(LocalStorage(directory, single_writer=single_writer))

    try:
        together(peers, "write to the run directory", write)
        yield probe
        peers.exchange("probed", None)
    finally:
        if peers.rank == 0:
            with suppress(OSError):
                probe.unlink()
            for path in made:
                with suppress(OSError):
                    path.rmdir()


def _appears(probe: Path) -> bool:
    """Wait for the file; listing the directory refreshes NFS caches."""
    deadline = time.monotonic() + VISIBLE_WITHIN_SECS
    while True:
        with suppress(OSError):
            if probe.name in os.listdir(probe.parent):
                return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)


_PROCESS = uuid.uuid4().hex  # drawn at the first import; processes forked later share it


def this_process() -> str:
    """Return an id of this process that distinguishes forks."""
    return f"{_PROCESS}.{os.getpid()}"


def look_and_choose(
    request: ResumeRequest, job: Job, session: SessionBase, manager: Manager | None, journal: Journal
) -> tuple[Choice, Look]:
    """Choose the start position, identical on all processes; returns it with the state of the log."""
    job.check()
    session.place(job.nodes())
    run, peers = journal.run, session.peers
    known = [place.name for place in session.nodes]
    unknown = [name for name in job.nodes_to_checkpoint() if name not in known]
    if unknown:
        raise UsageError(
            f"nodes_to_checkpoint names {', '.join(unknown)}, but the nodes are {', '.join(known)}: "
            "use the names of existing nodes"
        )
    together(peers, "check blobs", lambda: check_blobs(job))
    if run is not None:
        check_run_directory(run, job, session, None if manager is None else manager.engine.single_writer)
    if manager is None:
        if request.epoch is not None:
            raise UsageError(
                f"epoch {request.epoch} was requested, but nothing is saved: pass JobRunner a run "
                "directory or a manager"
            )
        return Choice("fresh"), Look()
    manager.bind(job, default_name=run.name if run else None)
    _check_requests(request, peers)
    handler = manager.metadata_handler

    def ask() -> int | None:
        manager.set_params(job.saved_among(known))
        asked = manager.get_resume_from_epoch_id(request.epoch)
        return check_epoch(asked, "the metadata handler's last_epoch")

    wish = replace(
        request,
        epoch=decide(peers, "resume epoch", ask),
        # for a run directory the handler decides only if it says so
        decided=handler is not None and bool(getattr(handler, "decides", run is None)),
        automatic=run is not None,
        process=this_process(),
    )
    look = manager.engine.ledger.look(peers, tolerant=run is None and request.resume != "must")
    for notice in look.notices:
        journal.warn(notice)
    recorded: int | None = None
    if not look.commits and run is not None and peers.rank == 0:
        with suppress(StorageError):
            saved = (line["epoch"] for line in run.metrics() if line.get("saved") is True)
            recorded = max(saved, default=None)
    past = Past(
        commits=look.commits,
        recorded=recorded,
        branch_request=look.request,
        epochs_over=(verdict := _verdict_at(look, job, session)) is not None and verdict.stop,
    )
    # Rank 0 chooses for all: a branch records the identity of its rank 0 only.
    choice = Choice(**decide(peers, "choose", lambda: asdict(choose(wish, past))))
    if choice.epoch is not None:
        manager.engine.ledger.check(peers, choice.epoch)
    return choice, look


def ended_result(
    choice: Choice, look: Look, job: Job, session: SessionBase, journal: Journal
) -> RunResult | None:
    """Return the result of a run whose end is recorded; None if work is left, even if only the record."""
    if look.rest or choice.start != "newest" or look.facts is None or look.epoch is None:
        return None
    verdict = _verdict_at(look, job, session)
    if verdict is None or not verdict.stop or not journal.has_ended(look.branch, look.epoch):
        return None
    return RunResult(
        look.epoch,
        status="STOPPED" if only_time_is_up(job, verdict) else "FINISHED",
        stop=tuple(v["reason"] for v in look.facts.stop.values() if v["stop"]),
        metrics=look.facts.last_metrics,
        run_dir=journal.where,
        committed=look.epoch,
        resumed_from=look.epoch,
    )


def _verdict_at(look: Look, job: Job, session: SessionBase) -> StopVerdict | None:
    """Return the verdict at the newest entry of the current branch; None without one."""
    if look.facts is None or look.epoch is None:
        return None
    return over_there(session, job, look.facts, look.epoch, inside=look.step > 0, rewound=look.rewound)


def _check_requests(request: ResumeRequest, peers: Peers) -> None:
    """Raise UsageError on all ranks if they request different starts."""
    asked = peers.exchange("start: requests", asdict(request))
    if any(one != asked[0] for one in asked):
        texts = [
            f"rank {rank}: {'no epoch' if one['epoch'] is None else one['epoch']}, resume={one['resume']!r}"
            + (", again" if one["again"] else "")
            for rank, one in enumerate(asked)
            if rank == 0 or one != asked[0]
        ]
        more = f"; {len(texts) - 8} more" if len(texts) > 8 else ""
        raise UsageError(
            f"the ranks request different starts ({'; '.join(texts[:8])}{more}): pass the same on all ranks"
        )


def bind_blobs(job: Job, session: SessionBase, *, before_setup: bool) -> None:
    """Register the blobs of each hosted node: objects before the setup group, factories after it.

    Factories run later because an optimizer needs the module that `setup` materialises. The registry is
    frozen once everything is bound. Blobs of an earlier job of the session are forgotten.
    """

    def bind() -> None:
        for place in session.local_nodes:
            workspace = session.workspace(place.name)
            if before_setup:
                workspace.forget_others(job.blobs)
                for name in workspace.outliving & workspace.entries().keys():  # of an earlier job
                    del workspace[name]
                read = [one for condition in job.stop_conditions if (one := getattr(condition, "blob", None))]
                workspace.outliving = {name for name, node in read if node in (None, place.name)}
            for blob in job.blobs:
                done = blob.is_factory if before_setup else not blob.is_factory and workspace.registered(blob)
                if not done:
                    _bind(blob, session, workspace)

    if before_setup:
        job.blobs.begin_setup()
    together(session.peers, "blobs", bind)
    if not before_setup:
        job.blobs.freeze()


def bind_for_load(job: Job, session: SessionBase, names: Iterable[str]) -> None:
    """Register what a load of these blobs needs, in order, as a factory may need an earlier one."""
    asked = [name.rpartition(":")[2] for name in names]

    def means(blob: Blob) -> bool:
        own = f"{blob.name}."
        return any(is_pattern(one) or f"{one}.".startswith(own) or own.startswith(f"{one}.") for one in asked)

    def bind() -> None:
        makes = any(blob.is_factory and means(blob) for blob in job.blobs)
        alone = len(session.local_nodes) == 1
        # Optimizers need the names of parameters of other objects.
        wanted = [one for one in job.blobs if means(one) or makes or (alone and not one.is_factory)]
        for place in session.local_nodes:
            workspace = session.workspace(place.name)
            for blob in wanted:
                if blob.name not in workspace.entries():
                    _bind(blob, session, workspace)

    together(session.peers, "blobs", bind)


def _bind(blob: Blob, session: SessionBase, workspace: Workspace) -> None:
    if blob.is_factory:
        with session.on_node(workspace.node):
            ctx = session.context(workspace.node)
            with naming(f"the factory of blob {blob.name!r}", ctx.place):
                made = invoke(blob.source, workspace, ctx)
        workspace.register(blob, made)
        return
    several = len(session.local_nodes) > 1
    if kind_of(blob.source) == "value" and not is_container(blob.source):
        workspace.register(blob, copy.deepcopy(blob.source) if several else blob.source)
        return
    if several and is_container(blob.source) and not holds_live(blob.source):
        workspace.register(blob, copy.deepcopy(blob.source), _unchanged(blob))
        return
    if several and not getattr(blob.source, "shared_by_nodes", False):
        raise UsageError(
            f"blob {blob.name!r} is one object, but {len(session.local_nodes)} nodes run in this process: "
            f"pass a factory, for example {blob.name}=lambda ctx: ..., so that each node has its own"
        )
    workspace.register(blob, blob.source)


def _unchanged(blob: Blob) -> Callable[[], None]:
    """Return a check that a container, of which each node has a copy, is not changed itself."""
    try:
        before = encode(blob.source, blob.name)
    except BlobError:  # the save reports what cannot be stored
        return lambda: None

    def check() -> None:
        if encode(blob.source, blob.name) != before:
            raise UsageError(
                f"blob {blob.name!r} was changed, but several nodes run in this process and each has its own "
                f"copy: change ctx[{blob.name!r}]"
            )

    return check


def warn_of_bare_ddp(session: SessionBase, warn: Callable[[str], None]) -> None:
    """Warn about bare DDP, whose sums differ after a resume on three and more ranks."""
    if len(session.nodes) > 2 and bare_ddp_instances():
        warn(
            "a module is wrapped in bare DistributedDataParallel: on more than 2 ranks a resumed run "
            "is not bit-identical; use torchrelay.data_parallel(module), or find_unused_parameters=True, "
            "for an exact resume"
        )

"""Putting a job's blobs into the workspaces of its nodes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable

from torchrelay.checkpoint.format.manifest.position import is_pattern
from torchrelay.checkpoint.format.values import encode
from torchrelay.errors import BlobError, UsageError
from torchrelay.jobs.blobs import Blob, holds_live, invoke, kind_of
from torchrelay.jobs.containers import is_container
from torchrelay.jobs.data.data_parallel import bare_ddp_instances
from torchrelay.jobs.job import Job
from torchrelay.jobs.session import together
from torchrelay.jobs.workspace import Workspace
from torchrelay.runners.session.base import SessionBase
from torchrelay.runners.session.steps import naming


def bind_blobs(job: Job, session: SessionBase, *, before_setup: bool) -> None:
    """Register the blobs of each hosted node: objects before the setup group runs, the rest after.

    Factories run after it, because an optimizer can only be built once `setup` has materialised its
    module. A registry is frozen once everything is bound. What an earlier job of the session had
    registered is forgotten, so that it is not taken for state of this one.
    """
    if before_setup:
        job.blobs.begin_setup()
    together(session.peers, "blobs", lambda: _bind_all(job, session, before_setup=before_setup))
    if not before_setup:
        job.blobs.freeze()


def _bind_all(job: Job, session: SessionBase, *, before_setup: bool) -> None:
    for place in session.local_nodes:
        workspace = session.workspace(place.name)
        if before_setup:
            workspace.forget_others(job.blobs)
            for name in workspace.outliving & workspace.entries().keys():  # of an earlier job
                del workspace[name]
            read = [one for condition in job.stop_conditions if (one := getattr(condition, "blob", None))]
            workspace.outliving = {name for name, node in read if node in (None, place.name)}
        for blob in job.blobs:
            if before_setup and blob.is_factory:
                continue
            if not before_setup and not blob.is_factory and workspace.registered(blob):
                continue
            _bind(blob, session, workspace)


def bind_for_load(job: Job, session: SessionBase, names: Iterable[str]) -> None:
    """Register what a load of these blobs fills in, where a session has nothing of these names.

    Factories are called in their order, as one may need what an earlier one has made.
    """
    asked = [name.rpartition(":")[2] for name in names]

    def means(blob: Blob) -> bool:
        own = f"{blob.name}."
        return any(is_pattern(one) or f"{one}.".startswith(own) or own.startswith(f"{one}.") for one in asked)

    def bind() -> None:
        makes = any(blob.is_factory and means(blob) for blob in job.blobs)
        alone = len(session.local_nodes) == 1
        # Objects that are not asked for name the parameters of an optimizer that is.
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
            f"blob {blob.name!r} is one object, and {len(session.local_nodes)} nodes run in this process: "
            f"give a factory, for example {blob.name}=lambda ctx: ..., so that each node has its own"
        )
    workspace.register(blob, blob.source)


def _unchanged(blob: Blob) -> Callable[[], None]:
    """Every node has a copy of a container: refuse changes of the object itself, which no node has."""
    try:
        before = encode(blob.source, blob.name)
    except BlobError:  # the save says what cannot be stored
        return lambda: None

    def check() -> None:
        if encode(blob.source, blob.name) != before:
            raise UsageError(
                f"blob {blob.name!r} was changed, but several nodes run in this process and each has a copy "
                f"of its own: change ctx[{blob.name!r}], or give a factory, {blob.name}=lambda ctx: ..."
            )

    return check


def warn_of_bare_ddp(session: SessionBase, warn: Callable[[str], None]) -> None:
    """Bare DDP regroups its buckets after the first step; on three and more ranks sums then differ."""
    if len(session.nodes) > 2 and bare_ddp_instances():
        warn(
            "a module is wrapped in bare DistributedDataParallel: on more than 2 ranks a resumed run "
            "ends in other bits; wrap it with torchrelay.data_parallel(module) for exact resume"
        )

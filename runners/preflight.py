"""What is checked before the user's first task runs, so that a mistake leaves nothing behind."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from torch import nn

from torchrelay.checkpoint.state.flatten import leaves_of
from torchrelay.checkpoint.state.leaf import spec_of
from torchrelay.checkpoint.state.leaves.tree import container_leaves
from torchrelay.checkpoint.state.names import TensorNames
from torchrelay.checkpoint.storage.base import SingleWriter, check_exclusion
from torchrelay.checkpoint.storage.local import LocalStorage
from torchrelay.errors import StorageError, UsageError
from torchrelay.jobs.blobs import Scope
from torchrelay.jobs.containers import is_container
from torchrelay.jobs.job import Job
from torchrelay.jobs.session import Peers, together
from torchrelay.metadata.fs import write_new
from torchrelay.metadata.run_directory import RunDirectory
from torchrelay.runners.session.base import SessionBase

VISIBLE_WITHIN_SECS = 10.0
PROBE_BYTES = 1 << 20


def check_before_start(
    job: Job, session: SessionBase, run: RunDirectory | None, single_writer: SingleWriter = None
) -> None:
    """Check what can be known before anything runs; raises UsageError or StorageError on all ranks."""
    check_nodes(job, session)
    together(session.peers, "check blobs", lambda: check_blobs(job))
    if run is not None:
        check_run_directory(run, job, session, single_writer)


def check_nodes(job: Job, session: SessionBase) -> None:
    """Refuse nodes to checkpoint that nobody plays."""
    known = [place.name for place in session.nodes]
    unknown = [name for name in job.nodes_to_checkpoint() if name not in known]
    if unknown:
        raise UsageError(
            f"nodes_to_checkpoint names {', '.join(unknown)}, but the nodes are {', '.join(known)}: "
            "name nodes that run, or leave it out"
        )


def check_blobs(job: Job) -> None:
    """Try to list the leaves of every object that exists already; raises BlobError with the path.

    Modules and optimizers are left to the first save: `setup` may still materialise them.
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
    """Refuse a directory that is a file, read-only, full, of another job, or not seen by all hosts."""

    def check() -> None:
        run.check_usable()
        run.check_job(job.name)

    peers = session.peers
    together(peers, "check the run directory", lambda: check() if peers.rank == 0 else None)
    if run.url is not None:
        return  # its store was tried before its files were brought from there
    with _probe(run.path, peers, single_writer) as probe:
        seen = peers.exchange("run directory seen", [session.local_nodes[0].host, _appears(probe)])
    blind = sorted({host for host, sees in seen if not sees})
    if blind:
        raise UsageError(
            f"the run directory {run.path} of {seen[0][0]} is not the one that {', '.join(blind)} sees: "
            "choose a directory that all hosts share"
        )


@contextmanager
def _probe(directory: Path, peers: Peers, single_writer: SingleWriter) -> Iterator[Path]:
    """A file of rank 0 in the directory while all look for it; made directories vanish again."""
    nonce = peers.exchange("probe", secrets.token_hex(8))[0]
    probe = directory / f".probe-{nonce}"
    made: list[Path] = []

    def write() -> None:
        if peers.rank == 0:
            made.extend(_make_directories(directory))
            _write_probe(probe)
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


def _make_directories(directory: Path) -> list[Path]:
    """Create the missing ones; returns them, innermost first."""
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        for path in missing:
            with suppress(OSError):
                path.rmdir()
        raise _refused(directory, error) from error
    return missing


def _write_probe(probe: Path) -> None:
    """Write and sync, as a save will."""
    try:
        write_new(probe, bytes(PROBE_BYTES))
    except OSError as error:
        with suppress(OSError):
            probe.unlink()
        raise _refused(probe.parent, error) from error


def _refused(directory: Path, error: OSError) -> StorageError:
    return StorageError(
        f"the run directory {directory} cannot be used: {error.strerror}; "
        "choose a writable place with free space"
    )


def _appears(probe: Path) -> bool:
    """Whether the file is seen in time; listing the directory refreshes what NFS remembers of it."""
    deadline = time.monotonic() + VISIBLE_WITHIN_SECS
    while True:
        with suppress(OSError):
            if probe.name in os.listdir(probe.parent):
                return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)

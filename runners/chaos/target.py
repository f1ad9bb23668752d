"""The built-in target: a small run that faults happen to.

An oracle, a file outside of the run directory, has a line for every epoch that was acknowledged.
"""

from __future__ import annotations

import gc
import os
import tempfile
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torchrelay
from torchrelay.checkpoint.log.job_file import PATH as JOB_FILE
from torchrelay.checkpoint.log.reader import open_log
from torchrelay.checkpoint.manager.checkpoint_manager import MultiNodeCheckpointManager
from torchrelay.checkpoint.storage.urls import is_url
from torchrelay.errors import RelayError
from torchrelay.metadata.handlers import FileMetadataHandler
from torchrelay.runners.chaos.contents import Blobs, Mixed
from torchrelay.runners.chaos.store_faults import strike_calls
from torchrelay.runners.session.local import LocalSession
from torchrelay.runners.training.job_runner import RUN_DIRECTORY_FAILED_SAVES, JobRunner
from torchrelay.runners.training.plan import Resume

_WATCH_SECS = 0.5
"""How long the counter of a writer is watched that may be alive: here none ever is."""


class _Oracle(FileMetadataHandler):
    """The default handler, which also tells a file outside what was acknowledged."""

    def __init__(self, directory: Path, oracle: Path) -> None:
        super().__init__(directory)
        self.oracle = oracle

    def write(self, epoch: int) -> None:
        append(self.oracle, epoch)
        super().write(epoch)


class _AtUrl(MultiNodeCheckpointManager):
    """Has no handler, for that would decide where a run goes on; tells the oracle itself."""

    oracle: Path

    def write_checkpoint_metadata(self, epoch: int) -> None:
        append(self.oracle, epoch)


def append(oracle: Path, epoch: int) -> None:
    """Note an acknowledged epoch in one write."""
    descriptor = os.open(oracle, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(descriptor, b"%d\n" % epoch)
    os.close(descriptor)


def acknowledged(oracle: Path) -> int:
    """The newest acknowledged epoch, -1 where there is none."""
    lines = oracle.read_text().split() if oracle.exists() else []
    return max(map(int, lines), default=-1)


def train(
    run: str, oracle: str, until: int, large: int = 0, options: Mapping[str, Any] | None = None,
    struck: Mapping[str, str] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Run the job up to epoch `until`; returns what happened, also where the run failed.

    `run` is a run directory, or the URL of its checkpoints, whose calls are `struck` then. Every epoch first
    proves that the objects are those of the epoch before.
    """
    job, _ = _job(until, large)
    runner = None
    said: dict[str, Any] = {"error": "", "kind": ""}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            make = _runner_at_url if is_url(run) else _runner
            runner = make(job, run, Path(oracle), options or {}, struck)
            said["epoch"] = int(runner.train(LocalSession()))
        except Exception as error:
            if "Mixed: " in _text(error):
                raise Mixed(_text(error)) from error
            said |= {
                "error": _text(error),
                "kind": type(error).__name__,
                "ours": isinstance(error, RelayError),
            }
    said["warnings"] = [str(one.message) for one in caught]
    del runner, job
    gc.collect()
    return {**said, "open": _open_below(run)}


def _runner(
    job: torchrelay.Job, run: str, oracle: Path, options: Mapping[str, Any], struck: Mapping[str, str] | None
) -> JobRunner:
    """The preloaded library strikes what happens in a run directory; here nothing is."""
    runner = JobRunner(job, run, **options)
    if runner.manager is not None:
        runner.manager.metadata_handler = _Oracle(Path(run), oracle)
        runner.manager.engine.ledger.takeover_secs = _WATCH_SECS
    return runner


def _runner_at_url(
    job: torchrelay.Job, url: str, oracle: Path, options: Mapping[str, Any], struck: Mapping[str, str] | None
) -> JobRunner:
    """Run directories do not lie in stores, and a bare manager begins anew unless it is told to go on."""
    manager = _AtUrl(url, takeover_secs=_WATCH_SECS, **options)
    manager.oracle = oracle
    storage = manager.engine.storage
    begun = storage.stat(JOB_FILE) is not None and bool(open_log(storage).entries)
    if struck is not None:
        strike_calls(storage, **struck)
    resume: Resume = "must" if begun else "auto"
    return JobRunner(job, manager, resume=resume, max_failed_saves=RUN_DIRECTORY_FAILED_SAVES)


def _text(error: BaseException) -> str:
    """The message, with those of what it came from: a failed step wraps the user's exception."""
    texts = [str(error)]
    while (cause := error.__cause__ or error.__context__) is not None and len(texts) < 5:
        error = cause
        texts.append(str(error))
    return " <- ".join(texts)


def _job(until: int, large: int) -> tuple[torchrelay.Job, Blobs]:
    blobs = Blobs(large)
    job = torchrelay.Job("chaos", blobs=dict(model=blobs.model, optimizer=blobs.optimizer, **blobs.tensors))

    @job.init
    def begin() -> None:
        blobs.fill(0)

    @job.epoch
    def work(ctx: torchrelay.Context) -> None:
        blobs.check(ctx.epoch - 1)
        ctx.before_mutation()
        blobs.fill(ctx.epoch)

    job.stop_when(torchrelay.max_epochs(until))
    return job, blobs


def _open_below(run: str) -> list[str]:
    """Files of the run directory, or staged for a store, that this process still has open."""
    below = f"{tempfile.gettempdir()}/" if is_url(run) else run
    found = []
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            target = str(Path(f"/proc/self/fd/{number}").readlink())
            if target.startswith(below):
                found.append(target)
    return found

"""The built-in target: a small run that faults happen to.

An oracle, a file outside of the run directory, has a line for every epoch that was acknowledged.
"""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torchrelay
from torchrelay.errors import RelayError
from torchrelay.metadata.file_handler import FileMetadataHandler
from torchrelay.runners.chaos.contents import Blobs, Mixed
from torchrelay.runners.job_runner import JobRunner
from torchrelay.runners.local_session import LocalSession

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
    run: str, oracle: str, until: int, large: int = 0, options: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Run the job up to epoch `until`; returns what happened, also where the run failed.

    Every epoch first proves that the objects are those of the epoch before.
    """
    job, _ = _job(until, large)
    runner = JobRunner(job, run, **(options or {}))
    if runner.manager is not None:
        runner.manager.metadata_handler = _Oracle(Path(run), Path(oracle))
        runner.manager.engine.ledger.takeover_secs = _WATCH_SECS
    said: dict[str, Any] = {"error": "", "kind": ""}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
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
    """Files of the run directory that this process still has open."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            target = str(Path(f"/proc/self/fd/{number}").readlink())
            if target.startswith(run):
                found.append(target)
    return found

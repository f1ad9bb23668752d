"""The built-in target: a small run that faults happen to, what it holds, and what a fault left of it.

An oracle, a file outside of the run directory, has a line for every epoch that was acknowledged.
"""

from __future__ import annotations

import gc
import os
import tempfile
import warnings
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

import torchrelay
from torchrelay.chaos.child.store_faults import strike_calls
from torchrelay.checkpoint.format.position import CommittedPosition
from torchrelay.checkpoint.load.checkpoint import Checkpoint
from torchrelay.checkpoint.load.open import place_of
from torchrelay.checkpoint.load.verify import verify_epoch
from torchrelay.checkpoint.log.chain import open_log
from torchrelay.checkpoint.log.record import JOB_PATH as JOB_FILE
from torchrelay.checkpoint.log.record import has_job, holds_job
from torchrelay.checkpoint.manager.checkpoint_manager import MultiNodeCheckpointManager
from torchrelay.checkpoint.storage.base import Storage
from torchrelay.checkpoint.storage.open import is_url, storage_of
from torchrelay.errors import RelayError
from torchrelay.metadata.handlers import FileMetadataHandler
from torchrelay.runners.session.local import LocalSession
from torchrelay.runners.training.job_runner import RUN_DIRECTORY_FAILED_SAVES, JobRunner
from torchrelay.runners.training.plan import Resume

SMALL = {"moved": 700, "frozen": 3000}
"""Tensors beside the model: how many float32 they hold. The frozen one is the same in every epoch."""


class Mixed(AssertionError):
    """The loaded bytes differ from the saved ones, and no error reported it."""


class Lost(AssertionError):
    """An acknowledged epoch is missing, or no run resumes from it."""


class Blobs:
    """The objects of the job, and what they must hold after an epoch."""

    def __init__(self, large: int) -> None:
        self.model = nn.Linear(16, 16)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        sizes = {**SMALL, **({"large": large} if large else {})}
        self.tensors = {name: torch.zeros(size) for name, size in sizes.items()}

    def fill(self, epoch: int) -> None:
        """Make everything what it is after `epoch`."""
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()
        with torch.no_grad():
            for name, tensor in self._all().items():
                tensor.copy_(_content(name, tensor, epoch))

    def check(self, epoch: int) -> None:
        """Raise Mixed unless everything is what it is after `epoch`."""
        compare(self._all(), epoch)

    def _all(self) -> dict[str, torch.Tensor]:
        found = dict(self.tensors)
        for name, parameter in self.model.named_parameters():
            found[f"model.{name}"] = parameter.data
            for key, value in self.optimizer.state[parameter].items():
                found[f"optimizer.state.model.{name}.{key}"] = value
        return found


def _content(name: str, like: torch.Tensor, epoch: int) -> torch.Tensor:
    if name.endswith(".step"):
        return torch.full_like(like, float(epoch + 1))
    start = sum(name.encode()) * 7.0 + (0 if name == "frozen" else epoch * 1000.0)
    return torch.arange(like.numel(), dtype=torch.float32).reshape(like.shape).add_(start)


def compare(found: Mapping[str, torch.Tensor], epoch: int) -> None:
    """Raise Mixed where a tensor is not that of `epoch`, bit for bit."""
    for name, tensor in found.items():
        if not torch.equal(tensor, _content(name, tensor, epoch)):
            raise Mixed(f"{name} is not that of epoch {epoch}")


_WATCH_SECS = 0.5
"""How long the counter of a writer is watched that may be alive: here none ever is."""


class _Oracle(FileMetadataHandler):
    """The default handler, which also writes acknowledged epochs to a file outside the run."""

    def __init__(self, directory: Path, oracle: Path) -> None:
        super().__init__(directory)
        self.oracle = oracle

    def write(self, epoch: int) -> None:
        append(self.oracle, epoch)
        super().write(epoch)


class _AtUrl(MultiNodeCheckpointManager):
    """A manager without a handler, which would decide where a run resumes; it writes to the oracle itself."""

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
    """Build a runner with a bare manager, which starts over unless it is asked to resume."""
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


def check(
    run: str, oracle: str, large: int = 0, options: Mapping[str, Any] | None = None, further: bool = True
) -> dict[str, Any]:
    """Verify the run directory, and that the run resumes from there.

    Raises Lost if an acknowledged epoch is missing, a committed one is incomplete, or the run does not
    resume. Raises Mixed if loaded bytes differ from saved ones. Otherwise returns what was found. With
    `further` the next epoch is trained too.
    """
    known = acknowledged(Path(oracle))
    newest = _check_log(run, known)
    if further:
        _go_on(run, oracle, newest, large, options)
    return {"newest": newest, "acknowledged": known}


def _check_log(run: str, known: int) -> int:
    """Verify all live epochs and their values; return the newest, -1 for none."""
    if not _begun(run):
        if known >= 0:
            raise Lost(f"epoch {known} was acknowledged, and there is no job.json")
        return -1
    place = place_of(_where(run))
    view = open_log(place.storage)
    if view.notices:
        raise Lost(f"the log is damaged: {view.notices}")
    newest = -1
    for entry in view.entries:
        proof = verify_epoch(place.storage, entry, level="full")
        if not proof.verified or not entry.healthy:
            raise Lost(f"epoch {entry.position} is committed and {proof.outcome.value}: {proof.reason}")
        epoch = entry.position.epoch
        newest = max(newest, epoch)
        compare(_tensors(run, entry), epoch)
    if newest < known:
        raise Lost(f"epoch {known} was acknowledged, the newest in the log is {newest}")
    if view.current.id != 0:
        raise Lost(f"the run is on branch {view.current.id}: a committed epoch was abandoned")
    return newest


@cache
def _where(run: str) -> str | Storage:
    """What `place_of` and `open_checkpoint` take; a store is opened once: its client takes a second."""
    return storage_of(run, "the run") if is_url(run) else run


def _begun(run: str) -> bool:
    where = _where(run)
    if isinstance(where, str):
        return has_job(Path(run) / "checkpoints")
    return holds_job(where)


def _tensors(run: str, entry: CommittedPosition) -> dict[str, torch.Tensor]:
    return tensors_of(
        torchrelay.open_checkpoint(_where(run), f"{entry.position.epoch},branch={entry.branch}"),
        entry.resumable,
    )


def tensors_of(checkpoint: Checkpoint, whole: bool = True) -> dict[str, torch.Tensor]:
    """What a reader loads of an epoch of the built-in run, verified; not `whole` is without the optimizer."""
    names = ["model", *SMALL, *(["optimizer.state.*"] if whole else [])]
    return checkpoint.load_tensors(names)


def _go_on(run: str, oracle: str, newest: int, large: int, options: Mapping[str, Any] | None) -> None:
    until = max(newest, 0) + 1
    said = train(run, oracle, until, large, options)
    if said["error"] or said.get("epoch") != until:
        raise Lost(f"the run does not resume after epoch {newest}: {said['kind']}: {said['error']}")
    if said["warnings"]:
        raise Lost(f"the next start warns: {said['warnings']}")
    if said["open"]:
        raise Lost(f"files are left open: {said['open']}")
    if acknowledged(Path(oracle)) != until:
        raise Lost(f"epoch {until} was not acknowledged")
    checkpoint = torchrelay.open_checkpoint(_where(run), "last")
    if checkpoint.epoch != until:
        raise Lost(f"the newest epoch is {checkpoint.epoch} instead of {until}")
    compare(tensors_of(checkpoint), until)


def look(run: str, oracle: str) -> str:
    """Load what a fresh process would, and every committed epoch; return what happened.

    Raises Mixed if loaded bytes differ from saved ones, or if an older epoch is loaded silently. Errors of
    other libraries propagate.
    """
    newest = acknowledged(Path(oracle))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            checkpoint = torchrelay.open_checkpoint(_where(run), "last")
            compare(tensors_of(checkpoint), checkpoint.epoch)
        except RelayError:
            return "refused"
    if checkpoint.epoch < newest:
        if not caught:
            raise Mixed(f"epoch {checkpoint.epoch} was loaded instead of {newest}, and nothing was said")
        return "an older epoch is used"
    return _look_at_older(run, checkpoint.epoch)


def _look_at_older(run: str, newest: int) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            entries = open_log(place_of(_where(run)).storage).entries
            for entry in entries:
                epoch = entry.position.epoch
                if epoch != newest:
                    compare(_tensors(run, entry), epoch)
        except RelayError:
            return "an older epoch is refused"
    return "harmless"

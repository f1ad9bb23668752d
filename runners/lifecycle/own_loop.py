"""Epochs of a loop of the user's own: a step `Runner` that trains by itself, and saves by `self.save`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Timer

from torchrelay.checkpoint.load.open import place_of, read_log
from torchrelay.checkpoint.log.view import whole_epochs
from torchrelay.errors import SaveFailedError, UnknownEpochError, UsageError
from torchrelay.jobs.session import Peers, decide
from torchrelay.runners.lifecycle.context import StepContext
from torchrelay.runners.remote_runs.names import is_remote
from torchrelay.runners.training.job_runner import JobRunner
from torchrelay.runners.training.startup import bind_for_load

_SAVER, _LAST = "saver of an own loop", "last epoch of an own loop"
_WAIT_SECS = 10.0


def save_epoch(context: StepContext, epoch: int) -> None:
    """Commit what the job of a context holds now. Raises UsageError and SaveFailedError."""
    if isinstance(epoch, bool) or not isinstance(epoch, int) or epoch < 0:
        raise UsageError(f"epoch={epoch!r:.60} is no number of an epoch: give k behind k epochs")
    session, saver = context.session, context.get(_SAVER)
    with _waiting(epoch, session.peers):
        told = session.peers.exchange("epoch of self.save", epoch)
    if saver is None:
        context[_LAST] = decide(session.peers, "epochs before", lambda: _newest(context.run_dir))
    last = context[_LAST]
    if last is not None and last >= min(told):
        raise UsageError(
            f"{context.run_dir} has epoch {last} already, so epoch {min(told)} cannot be saved behind it: "
            "load it and count on from there, or give another save_checkpoint_path"
        )
    if saver is None:
        saver = context[_SAVER] = JobRunner(context.job, context.run_dir, **context.job_options)
        session.place(context.job.nodes())
        bind_for_load(context.job, session, [blob.name for blob in context.job.blobs])
    if not saver.save_checkpoints(epoch, session):
        raise SaveFailedError(f"epoch {epoch} was not saved in {context.run_dir}: the warning says why")
    context[_LAST] = epoch


@contextmanager
def _waiting(epoch: int, peers: Peers) -> Iterator[None]:
    """Say it where other processes do not come: they wait for this one in a collective, or never call it."""
    text = f"torchrelay: rank {peers.rank} waits for the others in self.save({epoch}): all ranks call it\n"
    timer = Timer(_WAIT_SECS, lambda: sys.stderr.write(text))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _newest(run_dir: str) -> int | None:
    """The newest epoch of a run on this machine, None where there is none; a store tells when it saves."""
    if is_remote(run_dir) or not (Path(run_dir) / "checkpoints").is_dir():
        return None
    try:
        found = whole_epochs(read_log(place_of(run_dir)), None)
    except UnknownEpochError:  # made, and nothing is committed yet
        return None
    return found[0].position.epoch if found else None

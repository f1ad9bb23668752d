"""A remote run in one train call: downloaded before it starts, uploaded while it trains.

If a process dies between a commit and the next upload, its newest log lines are lost. Metrics are also in the
manifests, so a start on another host writes these lines again, into the file of its own generation.

Rank 0 uploads everything, each other process its own log and its crash file. For a local run directory all of
this does nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from torchrelay.checkpoint.load.info import glance
from torchrelay.checkpoint.load.verify import Target
from torchrelay.checkpoint.log.record import JOB_PATH as JOB_FILE
from torchrelay.checkpoint.log.record import slot_path
from torchrelay.checkpoint.log.view import LogView
from torchrelay.checkpoint.manager.base import Manager
from torchrelay.checkpoint.storage.base import RetryTimeouts, Storage
from torchrelay.errors import FencedError, RelayError, StorageError
from torchrelay.jobs.cluster import NodePlace
from torchrelay.jobs.session import decide, together
from torchrelay.metadata.fs import MAX_JSON_BYTES, finite, read_note
from torchrelay.metadata.run_directory import RunDirectory
from torchrelay.runners.distributed.launcher import final_calls
from torchrelay.runners.remote_runs.download import RunFiles, bring, found_in, unlisted
from torchrelay.runners.remote_runs.local_copies import check_store, lock_workspace, make_workspace, set_aside
from torchrelay.runners.remote_runs.names import CHECKPOINTS, NEEDED, STOP, for_a_start, travels
from torchrelay.runners.remote_runs.upload import EVERY_SECS, BackgroundUploader, Putter, local_is_newer
from torchrelay.runners.session.base import SessionBase
from torchrelay.runners.session.run_state import RunState
from torchrelay.runners.training.journal import Journal

MOST_EPOCHS = 200


def repair_curves(
    run: RunDirectory, view: LogView, storage: Storage, generation: int, upto: int, attempt: int
) -> list[int]:
    """Write missing metrics up to an epoch into the file of a generation; returns their epochs."""
    entries = {one.position.epoch: one for one in view.line() if one.position.boundary and one.healthy}
    last = max((line["epoch"] for line in run.metrics() if line["epoch"] <= upto), default=0)
    mended: list[int] = []
    for epoch in [one for one in sorted(entries) if last < one <= upto][-MOST_EPOCHS:]:
        try:
            facts = glance(storage, entries[epoch]).facts
        except OSError:  # unreadable entries stay missing
            continue
        line: dict[str, Any] = {
            "epoch": epoch,
            "step": facts.total_steps,
            "attempt": attempt,
            "time": round(time.time(), 3),
            "saved": True,
            "metrics": {name: finite(value) for name, value in facts.metrics.items()},
            "from_checkpoint": True,
        }
        run.log_metrics(generation, line)
        mended.append(epoch)
    return mended


BEGIN_SECS, END_SECS = 30.0, 60.0
"""Time limits of the first upload at a start, and of the last uploads at an end."""
FAILED_SECS, LAST_WORDS_SECS = 8.0, 4.0
"""Shorter limits after a failure, because launchers end a job soon, and when a thread ends the process."""
_OTHERS_SECS = 60.0
_BACKGROUND = RetryTimeouts(deadline_secs=15.0, longest_pause_secs=2.0)
_NAMED = 4
BRINGING_SECS = 1800.0


class StoredRun:
    """Uploads and downloads of one train call; its journal logs on rank 0 only."""

    def __init__(
        self,
        run: RunDirectory,
        session: SessionBase,
        state: RunState,
        journal: Journal,
        manager: Manager,
    ) -> None:
        self._run, self._session, self._state, self._journal = run, session, state, journal
        self._engine, self._peers = manager.engine, session.peers
        self._files = RunFiles.open(str(run.url), "the run directory", manager.engine.single_writer)
        self._uploader: BackgroundUploader | None = None
        self._putter: Putter | None = None
        self._lock: int | None = None
        self._left_out: dict[str, str] = {}

    # Before the run

    def begin(self, place: NodePlace) -> None:
        """Create the workspace, check the store, and download what a start needs, on all processes."""

        def make() -> None:
            make_workspace(self._run.path)
            if self._peers.rank == 0:
                self._lock = lock_workspace(self._run.path)

        together(self._peers, "make the workspace", make)
        check_store(self._files, self._peers, place)
        decide(self._peers, "download the run", self._bring, deadline_secs=BRINGING_SECS)

    def _bring(self) -> None:
        run, files = self._run, self._files
        found, left_out = found_in(files, for_a_start)
        found = {**unlisted(files, NEEDED.difference(found, left_out)), **found}
        if self._is_of_another(known="run.json" in found):
            beside = set_aside(run.path)
            self._journal.say(f"files of another run in the workspace were moved to {beside}")
        _, gone = bring(files, found, run.path, local_is_newer)
        self._left_out = gone | left_out
        for name, why in self._left_out.items():
            self._journal.warn(f"{run.url}/{name} is not downloaded: {why}")
        if files.stat(STOP) is not None:
            run.stop_file.touch()
        else:
            run.stop_file.unlink(missing_ok=True)

    def _is_of_another(self, *, known: bool) -> bool:
        """Return True if the workspace belongs to a run that the store does not have."""
        files = self._files
        try:
            here = self._run.identity()
        except RelayError:
            return True
        if here is None:
            return False
        if not known:  # lost before its first upload, or the run was deleted
            return all(files.stat(f"{CHECKPOINTS}/{name}") is None for name in (JOB_FILE, slot_path(0)))
        try:
            there = read_note(files.read_range("run.json", 0, MAX_JSON_BYTES))
        except (StorageError, ValueError):
            return False  # the reader reports what is wrong with it
        return isinstance(there, dict) and there.get("uuid") != here["uuid"]

    # While it runs

    def opened(self) -> None:
        """After the log is held: start uploads. Rank 0 waits for the first one."""
        ledger, files = self._engine.ledger, self._files
        if ledger.holding is None or self._peers.rank != 0:
            return
        with suppress(StorageError):
            # Abort uploads of a killed process; the log handles those of epochs.
            for name, upload in files.unfinished(""):
                if not name.startswith(f"{files.root.lstrip('/')}/{CHECKPOINTS}/"):
                    files.give_up((name, upload))
        if not self._start_uploader(travels, ledger.ask, EVERY_SECS).flush(BEGIN_SECS):
            self.look()

    def started(self, target: Target | None) -> None:
        """After the position and attempt are known: rank 0 repairs metrics, others start uploads."""
        attempt = self._state.attempt
        if self._peers.rank == 0:
            ledger = self._engine.ledger
            if target is not None and ledger.writer is not None:
                with suppress(StorageError):
                    view, upto = ledger.writer.view, target.position.epoch
                    mended = repair_curves(self._run, view, ledger.storage, ledger.generation, upto, attempt)
                    if mended:
                        some = f"epochs {mended[0]} to {mended[-1]}" if mended[1:] else f"epoch {mended[0]}"
                        text = f"metrics of {some}, lost with a process, are restored from the checkpoints"
                        self._journal.say(text)
            return
        log = f"logs/attempt_{attempt}/rank_{self._peers.rank}.log"
        nodes = [place.name for place in self._session.local_nodes]
        own = {log, f"{log}.1", *(f"crash/{node}.attempt_{attempt}.safetensors" for node in nodes)}
        self._start_uploader(own.__contains__, lambda: None, _OTHERS_SECS)

    def _start_uploader(
        self, wanted: Callable[[str], bool], may_put: Callable[[], None], every: float
    ) -> BackgroundUploader:
        self._files.patience = _BACKGROUND
        self._putter = Putter(self._files, self._run.path, wanted)
        self._putter.kept.update(self._left_out)
        look = self._look_around if self._peers.rank == 0 else lambda: None
        self._uploader = BackgroundUploader(self._putter, may_put, look, every)
        final_calls.append(self._final_upload)
        return self._uploader

    def _look_around(self) -> None:
        """Check for a stop file in the store, and for an overwritten status."""
        if self._files.stat(STOP) is not None and not self._run.stop_file.exists():
            with suppress(OSError):
                self._run.stop_file.touch()
        if self._putter is not None:
            self._putter.look_at_status()

    def look(self) -> None:
        """At an epoch boundary: trigger an upload, and report problems once."""
        uploader = self._uploader
        if uploader is None:
            return
        trouble = uploader.trouble()
        if trouble is not None and self._peers.rank == 0:
            self._journal.warn(
                f"{self._run.url} is not up to date: {trouble}. Training continues and retries; the files "
                f"are in {self._run.path}"
            )
        self._journal.aside(uploader.wake)  # after the log lines of the epoch

    # At its end

    def _final_upload(self) -> None:
        if self._uploader is not None:
            self._uploader.flush(LAST_WORDS_SECS)

    def finish(self, *, failed: bool = False, secs: float = END_SECS) -> None:
        """Upload the rest, within seconds if the run `failed`, and report the files that are missing."""
        uploader, self._uploader = self._uploader, None
        if uploader is None:
            return
        final_calls.forget(self._final_upload)
        left_secs = None if self._state.requests is None else self._state.requests.secs_left()
        if failed:
            secs = min(secs, FAILED_SECS)
        elif left_secs is not None:
            secs = min(secs, max(LAST_WORDS_SECS, left_secs - LAST_WORDS_SECS))
        left = uploader.close(min(secs, END_SECS))
        if self._peers.rank != 0:
            return
        if left:
            why = f" ({uploader.reason})" if uploader.reason else ""
            self._journal.warn(
                f"{self._run.url} lacks the newest version of {len(left)} files ({_some(left)}), which were "
                f"not uploaded in time{why}. They are in {self._run.path}; the same command uploads them"
            )
        if self._putter is not None and (links := sorted(self._putter.links)):
            self._journal.warn(
                f"links and special files are not uploaded ({_some(links)}): use copies of the files"
            )

    def finish_over(self) -> None:
        """For a finished run: upload what a process that died at its end has left here."""
        if self._peers.rank != 0:
            return
        here = b""
        with suppress(OSError):
            here = (self._run.path / "status.json").read_bytes()
        with suppress(RelayError):
            if self._files.read_range("status.json", 0, MAX_JSON_BYTES) != here:
                self._put_apart(self._run.status().get("generation"))

    def finish_by_hand(self) -> None:
        """Upload what a save outside of a train call has written; the log is not held then."""
        if self._peers.rank == 0:
            self._put_apart(self._engine.ledger.last_generation())

    def _put_apart(self, generation: object) -> None:
        """Upload, unless another writer has written there since that generation."""

        def may_put() -> None:
            if self._engine.ledger.last_generation() != generation:
                raise FencedError("another process has continued the run")

        self._start_uploader(travels, may_put, EVERY_SECS)
        self.finish(secs=BEGIN_SECS)

    def close(self) -> None:
        """Release the workspace; a second call does nothing."""
        self.finish(secs=0.0)
        descriptor, self._lock = self._lock, None
        if descriptor is not None:
            os.close(descriptor)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMED]) + (", ..." if names[_NAMED:] else "")

"""Decide who may write the log: the lease of one writer, and its takeover by another one.

`judge` decides from the log, without wall time, and only asks the system about one process. The holder moves
a counter, which a waiting writer measures with its own monotonic clock. The writer that creates the
takeover's slot first gets the log; all others judge again.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Container, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import datetime, timezone
from enum import Enum
from pathlib import Path
from threading import Event, Thread
from typing import cast

from torchrelay.checkpoint.format import canonical_json
from torchrelay.checkpoint.format.names import ATTEMPT_NAME, DATA
from torchrelay.checkpoint.format.position import State
from torchrelay.checkpoint.log.chain import OvertakenError, RecordDraft, Tail, append, mended, read_tail
from torchrelay.checkpoint.log.record import JOB_PATH, LOG, JobFile, check_job, encode_job
from torchrelay.checkpoint.log.state import restore
from torchrelay.checkpoint.log.view import LogView
from torchrelay.checkpoint.storage.base import Leftovers, Storage, Unfinished
from torchrelay.errors import DirectoryInUseError, NoProvableEpochError, StorageError
from torchrelay.records import Json, dataclass

_GONE_STATES = frozenset("ZX")
"""States of zombies and dead processes."""


@dataclass(frozen=True)
class WriterIdentity:
    """The writing process: its description, and what is needed to detect its end.

    An empty `boot_id` or `pid_namespace` (no /proc) equals no other. `launcher_id` is None outside of
    launchers; `restarts` counts the launcher's restarts, the outer launcher's first. `launch` is shared by
    the restarts of one launch, because two launches may have the same id; it is empty if unknown.
    """

    job: str
    host: str
    boot_id: str
    pid_namespace: str
    pid: int
    pid_start: str
    launcher_id: str | None = None
    restarts: tuple[int, ...] = ()
    launch: str = ""

    @classmethod
    def here(
        cls, job: str, environment: Mapping[str, str] = os.environ, *, launch: str = ""
    ) -> WriterIdentity:
        """The identity of this process in a `launch`."""
        # The launcher's id, and its restart counts.
        launcher_id, restarts = None, tuple[int, ...]()
        torchrun, slurm = environment.get("TORCHELASTIC_RUN_ID", "none"), environment.get("SLURM_JOB_ID")
        elastic = _count(environment.get("TORCHELASTIC_RESTART_COUNT"))
        if torchrun not in ("", "none"):
            launcher_id, restarts = f"torchrun:{torchrun}", (elastic,)
        elif slurm:
            restarts = (_count(environment.get("SLURM_RESTART_COUNT")), elastic)
            launcher_id = f"slurm:{slurm}"
        boot_id = pid_namespace = ""
        with suppress(OSError):
            boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        with suppress(OSError):
            pid_namespace = str(Path("/proc/self/ns/pid").readlink())
        return cls(
            job=job,
            host=socket.gethostname(),
            boot_id=boot_id,
            pid_namespace=pid_namespace,
            pid=os.getpid(),
            pid_start=process_start(os.getpid()) or "",
            launcher_id=launcher_id,
            restarts=restarts,
            launch=launch,
        )

    def json(self) -> dict[str, Json]:
        """The identity as stored in records."""
        return {**asdict(self), "restarts": list(self.restarts)}


class Right(Enum):
    """What a future writer may do with a log."""

    AT_ONCE = "take it at once"
    WATCH = "take it if the holder's counter does not move"
    REFUSED = "not take it"


@dataclass(frozen=True)
class LeaseVerdict:
    """A right and its reason."""

    right: Right
    reason: str


def judge(view: LogView, me: WriterIdentity, *, certain: bool, live_here: Container[str]) -> LeaseVerdict:
    """Whether `me` may take over the log of `view`.

    `certain` is False if newer records are damaged: one may be an unreadable takeover, so older ones do not
    decide. `live_here` are the nonces of the open writers of this process, which never takes over from
    itself.
    """
    holder = view.state.holder
    if holder.get("nonce") in live_here and not view.state.released:
        return LeaseVerdict(
            Right.REFUSED, "another manager in this process holds the directory; close it first"
        )
    if not certain:
        return LeaseVerdict(Right.WATCH, "the newest record is damaged")
    if view.state.released:
        return LeaseVerdict(Right.AT_ONCE, "the log was released" if holder else "the log is new")
    if _same_system(holder, me):  # the system knows it, regardless of launchers
        if _gone(holder, me):
            return LeaseVerdict(Right.AT_ONCE, "the process that wrote there is gone")
    elif _restarted(holder, me):
        return LeaseVerdict(Right.AT_ONCE, "the launcher started this job again")
    return LeaseVerdict(Right.WATCH, "the process that wrote there may be alive")


def is_gone(noted: Mapping[str, Json]) -> bool | None:
    """Whether a process described by `process_here` has ended; None if it is on another system."""
    here = WriterIdentity.here("")
    if not _same_system(noted, here):
        return None
    return (noted.get("pid"), noted.get("pid_start")) != (here.pid, here.pid_start) and _gone(noted, here)


def process_here() -> dict[str, Json]:
    """A description that distinguishes this process from all others."""
    here = WriterIdentity.here("").json()
    return {name: here[name] for name in ("host", "boot_id", "pid_namespace", "pid", "pid_start")}


def describe(holder: Mapping[str, Json], remedy: str) -> str:
    """Describe the holder of a log, for an error message."""
    since = holder.get("since", "an unknown time")
    return (
        f"job {holder.get('job', '?')!r} on {holder.get('host', '?')} (pid {holder.get('pid', '?')}, "
        f"since {since}): {remedy}"
    )


def process_start(pid: int) -> str | None:
    """Start time of a process in clock ticks; None if it has ended, as zombies have, "" if unknown."""
    try:
        # Field 2 is the program's name in parentheses and may contain any character.
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return "" if _answers(pid) else None
    return None if fields[0] in _GONE_STATES else fields[19]


def _restarted(holder: Mapping[str, Json], me: WriterIdentity) -> bool:
    """Whether the launcher that started the holder has ended it and started us.

    A requeued Slurm job has no process of its earlier start. Restarts of torchrun's agent count within one
    launch only, because two launches, or two steps of a job, may have equal ids.
    """
    before = holder.get("restarts")
    if me.launcher_id is None or holder.get("launcher_id") != me.launcher_id or not isinstance(before, list):
        return False
    if len(before) != len(me.restarts) or not tuple(before) < me.restarts:
        return False
    return before[:-1] < list(me.restarts[:-1]) or bool(me.launch and holder.get("launch") == me.launch)


def _same_system(holder: Mapping[str, Json], me: WriterIdentity) -> bool:
    same_boot = bool(me.boot_id) and holder.get("boot_id") == me.boot_id
    return same_boot and bool(me.pid_namespace) and holder.get("pid_namespace") == me.pid_namespace


def _gone(holder: Mapping[str, Json], me: WriterIdentity) -> bool:
    pid, start = holder.get("pid"), holder.get("pid_start")
    if type(pid) is not int or not isinstance(start, str) or not start:
        return False
    if (pid, start) == (me.pid, me.pid_start):
        return True  # this process, in which no writer of that nonce is open
    now = process_start(pid)
    return now is None or now not in ("", start)


def _answers(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True


def _count(text: str | None) -> int:
    return int(text) if text is not None and text.isdecimal() else 0


PATH = "writer.json"
LIMIT_BYTES = 4096
PERIOD_SECS = 1.0
PATIENCE_SECS = 15.0
_LOOKS = 60
"""Number of reads of a watched counter within the patience."""


class Beat:
    """A thread that calls `beat(count)` every period until that returns False or `stop()` is called.

    After an OSError it tries again at the next period. A counter that cannot be written does not move, so
    others may take over, as they should.
    """

    def __init__(self, beat: Callable[[int], bool], period_secs: float) -> None:
        self._beat, self._period_secs, self._stopped = beat, period_secs, Event()
        self._thread = Thread(target=self._run, name="torchrelay-writer-counter", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop and wait for the last beat to end."""
        self._stopped.set()
        self._thread.join(timeout=5.0)

    def _run(self) -> None:
        count = 1
        while not self._stopped.wait(self._period_secs):
            count += 1
            try:
                if not self._beat(count):
                    return
            except OSError:
                continue


def move(storage: Storage, generation: int, nonce: str, count: int) -> None:
    """Write the counter."""
    data = canonical_json.dumps({"generation": generation, "nonce": nonce, "counter": count})
    storage.replace(PATH, data)


def moves(storage: Storage, patience_secs: float) -> bool:
    """Watch another writer's counter; True as soon as it moves, False if it did not within the patience."""
    before = _look(storage)
    until = time.monotonic() + patience_secs
    while (left := until - time.monotonic()) > 0:
        time.sleep(min(left, patience_secs / _LOOKS))
        if _look(storage) != before:
            return True
    return False


def _look(storage: Storage) -> bytes | None:
    try:
        return storage.read_range(PATH, 0, LIMIT_BYTES)
    except FileNotFoundError:
        return None


_ATTEMPTS = 8
_REMEDY = "stop that job, or wait until it has ended"


def take_over(
    storage: Storage,
    job: JobFile,
    job_name: str | None,
    me: WriterIdentity,
    nonce: str,
    *,
    live_here: Container[str],
    patience_secs: float,
    follows: bool,
) -> tuple[Tail, frozenset[str]]:
    """Append our takeover, after watching the holder if it may be alive.

    Returns the log, and the attempts that existed before our record: those that the log does not know can
    never be committed any more.

    Raises UsageError for the log of another job than `job_name`, DirectoryInUseError, naming the holder, if
    it is alive, or if others are always faster, and NoProvableEpochError for epochs without their log, unless
    this one `follows` another.
    """
    holder: Mapping[str, Json] = {}
    for _ in range(_ATTEMPTS):
        older_attempts = frozenset(storage.list(DATA))  # before the log, whose first record precedes them
        tail = read_tail(storage, job)
        if tail.view.slot < 0 and not follows and any(map(ATTEMPT_NAME.fullmatch, older_attempts)):
            raise NoProvableEpochError(
                f"{storage.url}/{DATA} has epochs, but the log that lists them is missing: "
                f"restore {storage.url}/{LOG} from a copy"
            )
        check_job(storage, tail.job, job_name)
        holder = tail.view.state.holder
        verdict = judge(tail.view, me, certain=not tail.stepped_back, live_here=live_here)
        if verdict.right is Right.REFUSED:
            raise DirectoryInUseError(f"{storage.url} is in use: {verdict.reason}")
        if verdict.right is Right.WATCH and moves(storage, patience_secs):
            raise DirectoryInUseError(f"{storage.url} is in use by {describe(holder, _REMEDY)}")
        storage.mkdir(LOG)
        storage.mkdir(DATA)
        storage.sync_dir("")
        # Temporary files: of a crashed writer, or of one, or a guest, that is writing now. Their targets are
        # older than this takeover, whose slot exists then, so no record is lost with them; a live guest
        # writes its file again (`LocalStorage`).
        temporaries = list[str]()
        if isinstance(storage, Leftovers):
            names = (f"{LOG}/{name}" for name in storage.leftovers(LOG))
            temporaries = [*storage.leftovers(""), *names]
        begun = _begun(storage)
        storage.sync_dir(LOG)  # a name must survive a power cut before it is acted on
        try:
            taken, _ = append(storage, tail, _takeover(tail.job, me, nonce, verdict.reason))
        except OvertakenError:
            continue
        for path in temporaries:  # those that cannot be deleted stay for the next writer
            with suppress(StorageError):
                storage.delete(path)
        for upload in begun:
            with suppress(StorageError):
                cast(Unfinished, storage).give_up(upload)
        return _mended(storage, tail, taken), older_attempts
    raise DirectoryInUseError(f"{storage.url} is in use by {describe(holder, _REMEDY)}")


def _mended(storage: Storage, found: Tail, taken: Tail) -> Tail:
    """Write lost files again from the log, which this process holds."""
    try:
        if found.job.damage:
            storage.replace(JOB_PATH, encode_job(found.job))
            storage.sync_dir("")
        if found.base is not None and found.base.lost is not None:
            restore(storage, found.base.lost)
    except StorageError:
        return taken  # the next launch finds it in the same way
    return mended(taken)


def _begun(storage: Storage) -> list[tuple[str, str]]:
    """Incomplete uploads of older writers; empty without the right to list them."""
    if isinstance(storage, Unfinished):
        with suppress(StorageError):
            return storage.unfinished(DATA)
    return []


def _takeover(job: JobFile, me: WriterIdentity, nonce: str, reason: str) -> RecordDraft:
    since = datetime.now(timezone.utc).isoformat(timespec="seconds")
    # What `job.json` states, too, without the uuid, which is in every record.
    repeated = {"job": job.name, "created": job.created, "named": job.named}
    holder = {**me.json(), **repeated, "nonce": nonce, "since": since}

    def change(state: State) -> tuple[State, Mapping[str, Json]]:
        return replace(state, holder=holder, released=False), {"reason": reason}

    return RecordDraft("takeover", change)

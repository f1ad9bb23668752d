"""How a run stands, as its files say now: the one answer that `ls`, `top`, `status`, pages show.

created       made, and no process has begun to train
running       a process trains, as far as can be seen from here
silent        it says that it runs, has left no sign of life for a while, and cannot be asked from here
interrupted   it left, was stopped, or its process is gone; the same command resumes it
failed        an error ended it; the same command goes on
finished      its epochs are over
tested        finished, and its newest epoch has a test result
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, field
from pathlib import Path
from typing import Any, Literal, get_args

from torchrelay.checkpoint.log.lease import is_gone, process_start
from torchrelay.errors import RelayError
from torchrelay.metadata.experiments import newest_result
from torchrelay.metadata.fs import open_regular, read_note
from torchrelay.metadata.run_directory import RunDirectory
from torchrelay.records import dataclass

SILENT_SECS = 15.0
"""A running job leaves a sign every two seconds; a slow shared file system may hold it back."""
_EVENT_BYTES, _SAVE_BYTES = 64 << 10, 4 << 20
"""How much is read of the ends of the notes; a save of ten thousand nodes is a line of some MB."""
_WARNINGS = ("warning", "save failed", "failure")


@dataclass(frozen=True)
class RunLook:
    """What is seen of a run; what its files do not tell is None, empty or 0.

    `silent_secs` is how long a run that says it is running has left no sign. `slowest` is the node that the
    newest save waited for, with its seconds. `ranks` are those whose logs lie there, with the seconds since
    their last line; `unreadable` says what is wrong with a file. `stands` and `why` are for who also asks
    whether its process is there (`runners.monitoring.status`).
    """

    name: str
    state: str
    attempt: int = 0
    epoch: int | None = None
    last_epoch: int | None = None
    step: int | None = None
    steps: int | None = None
    per_sec: float | None = None
    unit: str = "steps"
    eta_secs: float | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    ckpt: str = ""
    doing: str = ""
    host: str = ""
    slowest: tuple[str, float] | None = None
    warnings: int = 0
    last_warning: str = ""
    silent_secs: float | None = None
    ranks: Mapping[int, float] = field(default_factory=dict)
    unreadable: str = ""
    stands: str = ""
    why: str = ""

    def json(self) -> dict[str, Any]:
        """As an object of `top --json`."""
        return asdict(self)


def runs_at(path: Path) -> list[Path]:
    """The run directory at `path`, else those right below it; empty where there is none (any more)."""
    if (path / "run.json").exists() or (path / "status.json").exists():
        return [path]
    try:
        below = sorted(one for one in path.iterdir() if one.is_dir())
    except OSError:
        return []
    return [one for one in below if (one / "run.json").exists()]


def look_at(path: Path, now: float | None = None) -> RunLook:
    """Look at a run; never raises for what its files are like."""
    now = time.time() if now is None else now
    run = RunDirectory(path)
    status, wrong = _read(run.status)
    live, odd = _read(run.live)
    state = status.get("state")
    look: dict[str, Any] = {"name": run.name, "unreadable": wrong or odd}
    if not isinstance(state, str):
        return RunLook(state="unreadable" if wrong else "starting", **look)
    look |= _whole_numbers(status, "attempt", "epoch") | _failure(status)
    if state == "RUNNING":
        look |= _from_live(live, status, now)
    look |= _from_lines(
        path, look.get("attempt", 0), _whole_numbers(status, "generation").get("generation"), now
    )
    return RunLook(state=state, **look)


def _read(read: Any) -> tuple[dict[str, Any], str]:
    try:
        return read(), ""
    except RelayError as error:
        return {}, str(error)


def _whole_numbers(found: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: found[name] for name in names if type(found.get(name)) is int}


def _failure(status: Mapping[str, Any]) -> dict[str, Any]:
    error, host = status.get("error"), status.get("host")
    return {"doing": error if isinstance(error, str) else "", "host": host if isinstance(host, str) else ""}


def _from_live(live: Mapping[str, Any], status: Mapping[str, Any], now: float) -> dict[str, Any]:
    """What the running process left; an older attempt's words do not count."""
    signs = [one for one in (status.get("updated"), live.get("time")) if isinstance(one, (int, float))]
    since = now - max(signs, default=now)
    found: dict[str, Any] = {"silent_secs": since if since > SILENT_SECS else None}
    if live.get("attempt") != status.get("attempt"):
        return found
    found |= _whole_numbers(live, "epoch", "last_epoch", "step", "steps")
    kinds: dict[Any, str] = {(int, float): "per_sec eta_secs", str: "unit ckpt doing", dict: "metrics"}
    for kind, names in kinds.items():
        found |= {name: live[name] for name in names.split() if isinstance(live.get(name), kind)}
    return found


def _from_lines(path: Path, attempt: int, generation: int | None, now: float) -> dict[str, Any]:
    found: dict[str, Any] = {"ranks": dict(_ranks(path / "logs" / f"attempt_{attempt}", now))}
    events = map(_object, _tail(path / f"events.{generation}.jsonl", _EVENT_BYTES))
    warned = [one for one in events if one is not None and one.get("kind") in _WARNINGS]
    found["warnings"] = len(warned)
    if warned:
        found["last_warning"] = str(warned[-1].get("text") or warned[-1].get("error") or "")
    for line in reversed(_tail(path / "metadata.jsonl", _SAVE_BYTES)):
        if b'"checkpoint_save"' in line and (save := _object(line)) is not None:
            found["slowest"] = _slowest(save)
            break
    return found


def _slowest(save: Mapping[str, Any]) -> tuple[str, float] | None:
    nodes = save.get("nodes")
    for node in nodes if isinstance(nodes, list) else []:
        slowest = isinstance(node, dict) and node.get("node") == save.get("slowest")
        if slowest and isinstance(secs := node.get("secs"), dict):
            return str(node["node"]), sum(one for one in secs.values() if isinstance(one, (int, float)))
    return None


def _ranks(folder: Path, now: float) -> Iterator[tuple[int, float]]:
    """Seconds since each rank's last line; ranks of other hosts write into the same directory."""
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            rank = entry.name.removeprefix("rank_").removesuffix(".log")
            if rank.isdecimal() and entry.name == f"rank_{rank}.log":
                with suppress(OSError):
                    yield int(rank), max(now - entry.stat().st_mtime, 0.0)


def _tail(path: Path, nbytes: int) -> list[bytes]:
    """The whole lines among the last bytes of a file; none where it cannot be read."""
    try:
        with open_regular(path) as file:
            file.seek(0, os.SEEK_END)
            start = max(file.tell() - nbytes, 0)
            file.seek(start)
            lines = file.read(nbytes).split(b"\n")
    except OSError:
        return []
    return lines[1:] if start else lines


def _object(line: bytes) -> dict[str, Any] | None:
    with suppress(ValueError):
        value = read_note(line)
        return value if isinstance(value, dict) else None
    return None


Word = Literal["created", "running", "silent", "interrupted", "failed", "finished", "tested"]
STATES: tuple[Word, ...] = get_args(Word)
OVER = ("finished", "tested")
SILENT_AFTER_SECS = 60.0
"""A process that runs leaves a sign every two seconds; a slow shared file system may hold it back."""
_BY_CTRL_C = 130
_WHY = 200
"""How much of a reason one line shows; `status.json`, `show` and `--json` have all of it."""


@dataclass(frozen=True)
class Standing:
    """`word` is one of those above, `why` says more, `epoch` is the newest one that the run tells of."""

    word: Word
    why: str = ""
    epoch: int | None = None

    @property
    def over(self) -> bool:
        """Whether its epochs are over."""
        return self.word in OVER

    @property
    def shown(self) -> str:
        """The word for people; of a silent run the sentence that says so."""
        return self.why if self.word == "silent" else self.word

    def state(self, noted: Any) -> Any:
        """What `status.json` has as the state, but never RUNNING of a run that is not known to run."""
        return self.word.upper() if noted == "RUNNING" else noted

    def __str__(self) -> str:
        if not self.why or self.word == "silent":
            return self.shown
        return f"{self.shown} ({self.why[:_WHY]}{' ...' if len(self.why) > _WHY else ''})"


NOT_BEGUN = Standing("created")


def standing(run: Path) -> Standing:
    """Look at a run; never raises for what its files are like, and writes nothing."""
    try:
        status = RunDirectory(run).status()
    except RelayError as error:
        return Standing("interrupted", str(error))
    epoch = status.get("epoch")
    known = epoch if type(epoch) is int else None
    word, why = _word(run, status, known)
    return Standing(word, why, known)


def _word(run: Path, status: Mapping[str, Any], epoch: int | None) -> tuple[Word, str]:
    state, told = status.get("state"), status.get("stop")
    reasons = ", ".join(map(str, told)) if isinstance(told, list) else ""
    if state == "RUNNING":
        return _going(run, status)
    if state == "FINISHED":
        result = newest_result(run)
        tested = result is not None and result.get("epoch") == epoch
        return ("tested" if tested else "finished"), ""
    if state == "FAILED":
        if status.get("exit_code") == _BY_CTRL_C:
            return "interrupted", "Ctrl-C"
        return "failed", str(status.get("error") or "")
    if state in ("PREEMPTED", "STOPPED"):
        return "interrupted", f"{str(state).lower()}: {reasons}" if reasons else str(state).lower()
    return "created", ""


def _going(run: Path, status: Mapping[str, Any]) -> tuple[Word, str]:
    """Of a run that calls itself running: its process decides if it is of this system, else its files do."""
    pid, gone = status.get("pid"), is_gone(status)
    if gone is None and "boot_id" not in status:  # written before processes were noted whole
        gone = status.get("host") == socket.gethostname() and type(pid) is int and not _lives(pid)
    if gone:
        return "interrupted", f"killed: process {pid} is gone"
    silent = look_at(run).silent_secs
    if silent is not None and silent > SILENT_AFTER_SECS:
        hours, minutes = divmod(int(silent) // 60, 60)
        return "silent", f"no sign of life for {f'{hours} h ' if hours else ''}{minutes} min"
    return "running", ""


def _lives(pid: int) -> bool:
    """Whether another process of this number exists; in containers a dead one's number comes again soon."""
    return pid not in (os.getpid(), os.getppid()) and process_start(pid) is not None

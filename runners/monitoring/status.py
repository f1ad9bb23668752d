"""State of a run as its files report it; used by `ls`, `top`, `status` and pages.

- created: made, but no process has begun to train
- running: a process trains, as far as this host can see
- silent: it claims to run, but has shown no activity for a while and cannot be checked from here
- interrupted: it stopped, or its process is gone; the same command resumes it
- failed: an error ended it; the same command resumes it
- finished: all its epochs are done
- tested: finished, and its newest epoch has a test result
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
"""A running job updates a file every two seconds; a slow shared file system may delay it."""
_EVENT_BYTES, _SAVE_BYTES = 64 << 10, 4 << 20
"""Bytes read from the end of the files; a save of ten thousand nodes is a line of some MB."""
_WARNINGS = ("warning", "save failed", "failure")


@dataclass(frozen=True)
class RunLook:
    """The view of a run; unknown values are None, empty or 0.

    `silent_secs`: time since the last activity of a run that claims to run. `slowest`: the node that the
    newest save waited for, with its seconds. `ranks`: seconds since the last line of each rank's log.
    `unreadable`: the error of a file. `stands` and `why`: the state, set by callers that also check the
    process.
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
        """Return the entry of `top --json`."""
        return asdict(self)


def runs_at(path: Path) -> list[Path]:
    """Return the run directory at `path`, else those directly below it; empty if there are none."""
    if (path / "run.json").exists() or (path / "status.json").exists():
        return [path]
    try:
        below = sorted(one for one in path.iterdir() if one.is_dir())
    except OSError:
        return []
    return [one for one in below if (one / "run.json").exists()]


def look_at(path: Path, now: float | None = None) -> RunLook:
    """Read the view of a run; never raises because of the content of its files."""
    now = time.time() if now is None else now
    run = RunDirectory(path)
    status, wrong = _read(run.status)
    live, odd = _read(run.live)
    state = status.get("state")
    look: dict[str, Any] = {"name": run.name, "unreadable": wrong or odd}
    if not isinstance(state, str):
        return RunLook(state="unreadable" if wrong else "starting", **look)
    look |= _whole_numbers(status, "attempt", "epoch")
    names = {"doing": "error", "host": "host"}
    look |= {name: value for name, key in names.items() if isinstance(value := status.get(key), str)}
    if state == "RUNNING":
        signs = [one for one in (status.get("updated"), live.get("time")) if isinstance(one, (int, float))]
        since = now - max(signs, default=now)
        look["silent_secs"] = since if since > SILENT_SECS else None
        if live.get("attempt") == status.get("attempt"):  # not those of an older attempt
            look |= _whole_numbers(live, "epoch", "last_epoch", "step", "steps")
            kinds: dict[Any, str] = {
                (int, float): "per_sec eta_secs",
                str: "unit ckpt doing",
                dict: "metrics",
            }
            for kind, keys in kinds.items():
                look |= {name: live[name] for name in keys.split() if isinstance(live.get(name), kind)}
    generation = _whole_numbers(status, "generation").get("generation")
    look["ranks"] = dict(_ranks(path / "logs" / f"attempt_{look.get('attempt', 0)}", now))
    events = map(_object, _tail(path / f"events.{generation}.jsonl", _EVENT_BYTES))
    warned = [one for one in events if one is not None and one.get("kind") in _WARNINGS]
    look["warnings"] = len(warned)
    if warned:
        look["last_warning"] = str(warned[-1].get("text") or warned[-1].get("error") or "")
    for line in reversed(_tail(path / "metadata.jsonl", _SAVE_BYTES)):
        if b'"checkpoint_save"' in line and (save := _object(line)) is not None:
            look["slowest"] = _slowest(save)
            break
    return RunLook(state=state, **look)


def _read(read: Any) -> tuple[dict[str, Any], str]:
    """Call `read`; return its result, or an error text."""
    try:
        return read(), ""
    except RelayError as error:
        return {}, str(error)


def _whole_numbers(found: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: found[name] for name in names if type(found.get(name)) is int}


def _slowest(save: Mapping[str, Any]) -> tuple[str, float] | None:
    nodes = save.get("nodes")
    for node in nodes if isinstance(nodes, list) else []:
        slowest = isinstance(node, dict) and node.get("node") == save.get("slowest")
        if slowest and isinstance(secs := node.get("secs"), dict):
            return str(node["node"]), sum(one for one in secs.values() if isinstance(one, (int, float)))
    return None


def _ranks(folder: Path, now: float) -> Iterator[tuple[int, float]]:
    """Yield the seconds since each rank's last line; ranks of all hosts share the directory."""
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            rank = entry.name.removeprefix("rank_").removesuffix(".log")
            if rank.isdecimal() and entry.name == f"rank_{rank}.log":
                with suppress(OSError):
                    yield int(rank), max(now - entry.stat().st_mtime, 0.0)


def _tail(path: Path, nbytes: int) -> list[bytes]:
    """Return the complete lines in the last bytes of a file; none if it cannot be read."""
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
    """Decode a line as a JSON object; None if it is invalid."""
    with suppress(ValueError):
        value = read_note(line)
        return value if isinstance(value, dict) else None
    return None


Word = Literal["created", "running", "silent", "interrupted", "failed", "finished", "tested"]
STATES: tuple[Word, ...] = get_args(Word)
OVER = ("finished", "tested")
SILENT_AFTER_SECS = 60.0
"""A running process updates a file every two seconds; a slow shared file system may delay it."""
_BY_CTRL_C = 130
_WHY = 200
"""Characters of a reason in one line; `status.json`, `show` and `--json` have all of it."""


@dataclass(frozen=True)
class Standing:
    """State of a run: `word` is one of those above, `why` a reason, `epoch` the newest known one."""

    word: Word
    why: str = ""
    epoch: int | None = None

    @property
    def over(self) -> bool:
        """True if all epochs are done."""
        return self.word in OVER

    @property
    def shown(self) -> str:
        """The word to display; for a silent run the sentence in `why`."""
        return self.why if self.word == "silent" else self.word

    def state(self, noted: Any) -> Any:
        """Return the state of `status.json`, but RUNNING only if the run is known to run."""
        return self.word.upper() if noted == "RUNNING" else noted

    def __str__(self) -> str:
        if not self.why or self.word == "silent":
            return self.shown
        return f"{self.shown} ({self.why[:_WHY]}{' ...' if len(self.why) > _WHY else ''})"


NOT_BEGUN = Standing("created")


def standing(run: Path) -> Standing:
    """Read the state of a run; writes nothing and never raises because of its files."""
    try:
        status = RunDirectory(run).status()
    except RelayError as error:
        return Standing("interrupted", str(error))
    epoch = status.get("epoch")
    known = epoch if type(epoch) is int else None
    word, why = _word(run, status, known)
    return Standing(word, why, known)


def _word(run: Path, status: Mapping[str, Any], epoch: int | None) -> tuple[Word, str]:
    state, stop = status.get("state"), status.get("stop")
    reasons = ", ".join(map(str, stop)) if isinstance(stop, list) else ""
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
    """Check a run that claims to run: by its process if it is on this system, else by its files."""
    pid, gone = status.get("pid"), is_gone(status)
    if gone is None and "boot_id" not in status:  # written by an older version
        gone = status.get("host") == socket.gethostname() and type(pid) is int and not _lives(pid)
    if gone:
        return "interrupted", f"killed: process {pid} is gone"
    silent = look_at(run).silent_secs
    if silent is not None and silent > SILENT_AFTER_SECS:
        hours, minutes = divmod(int(silent) // 60, 60)
        return "silent", f"no sign of life for {f'{hours} h ' if hours else ''}{minutes} min"
    return "running", ""


def _lives(pid: int) -> bool:
    """Return True if another process has this pid; in containers pids are reused quickly."""
    return pid not in (os.getpid(), os.getppid()) and process_start(pid) is not None

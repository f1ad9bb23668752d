"""How a run stands, in the words of the verbs.

created       made, and no process has begun to train
running       a process trains, as far as can be seen from here
interrupted   it left, was stopped, or was killed; the same command goes on
failed        an error ended it; the same command goes on
finished      its epochs are over
tested        finished, and its newest epoch has a test result
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from torchrelay.errors import RelayError
from torchrelay.metadata.experiment.results import newest_result
from torchrelay.metadata.run_directory import RunDirectory
from torchrelay.metadata.run_look import look_at

Word = Literal["created", "running", "interrupted", "failed", "finished", "tested"]
STATES: tuple[Word, ...] = get_args(Word)
OVER = ("finished", "tested")
DEAD_AFTER_SECS = 60.0
"""A process that runs leaves a sign every two seconds; one of another host is taken for dead after this."""
_BY_CTRL_C = 130


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

    def __str__(self) -> str:
        return f"{self.word} ({self.why})" if self.why else self.word


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
        why = _death(run, status)
        return ("interrupted", why) if why else ("running", "")
    if state == "FINISHED":
        return ("tested" if _is_tested(run, epoch) else "finished"), ""
    if state == "FAILED":
        if status.get("exit_code") == _BY_CTRL_C:
            return "interrupted", "Ctrl-C"
        return "failed", str(status.get("error") or "")
    if state in ("PREEMPTED", "STOPPED"):
        return "interrupted", f"{str(state).lower()}: {reasons}" if reasons else str(state).lower()
    return "created", ""


def _is_tested(run: Path, epoch: int | None) -> bool:
    found = newest_result(run)
    return found is not None and found.get("epoch") == epoch


def _death(run: Path, status: Mapping[str, Any]) -> str:
    """Why a run that says it is running does not; empty where it does."""
    pid, host = status.get("pid"), status.get("host")
    if host == socket.gethostname() and type(pid) is int and not _lives(pid):
        return f"killed: process {pid} is gone"
    silent = look_at(run).silent_secs
    if silent is not None and silent > DEAD_AFTER_SECS:
        return f"killed, or its host lost: no sign of {host} for {silent:.0f} s"
    return ""


def _lives(pid: int) -> bool:
    """Whether another process of this number exists; in containers a dead one's number comes again soon."""
    if pid in (os.getpid(), os.getppid()):
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return True

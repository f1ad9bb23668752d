"""How a run stands: the one answer that `ls`, `show`, `runs ls`, `top`, `status` and the pages show.

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
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from torchrelay.checkpoint.log.lease import is_gone, process_start
from torchrelay.errors import RelayError
from torchrelay.metadata.experiments import newest_result
from torchrelay.metadata.run_directory import RunDirectory
from torchrelay.metadata.run_status import look_at
from torchrelay.records import dataclass

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

"""From where a run can go on before something went bad, and the command that does."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from torchrelay.checkpoint.format.log_state import Entry
from torchrelay.records import dataclass
from torchrelay.runners.remote_runs.resolve import Selected


@dataclass(frozen=True)
class Resume:
    """From where to go on: the newest epoch before the bad one that can be resumed from, None without any."""

    entry: Entry | None
    command: str

    def line(self) -> str:
        """For people."""
        if self.entry is None:
            return "no epoch before it can be resumed from: begin anew with resume='never' (--resume never)"
        number = self.entry.position.epoch
        return (
            f"to go on from epoch {number}: {self.command} --resume-from-epoch {number}, "
            f"or train(resume_from_epoch={number})"
        )

    def json(self) -> dict[str, Any] | None:
        """As an object, null without an epoch."""
        if self.entry is None:
            return None
        number = self.entry.position.epoch
        return {"epoch": number, "arguments": ["--resume-from-epoch", str(number)]}


def resume_before(selected: Selected, earlier: Sequence[Entry]) -> Resume:
    """The newest of the earlier epochs that a start may use: one that the current branch sees."""
    usable = {one.key for one in selected.view.candidates()}
    able = [one for one in earlier if one.key in usable]
    run = selected.place.run
    words = (run.known_identity() if run else {}).get("command")
    known = isinstance(words, list) and words and all(isinstance(one, str) for one in words)
    command = shlex.join(words) if known and words else "the run's command with"
    return Resume(able[-1] if able else None, command)

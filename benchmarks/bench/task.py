"""What one process is asked to measure, as JSON on its command line, and how it answers."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

Answers = dict[str, dict[str, Any]]
"""By action: `secs`, and where they mean something `extra_memory`, `bytes`, `cached`, `least`."""


@dataclass(frozen=True)
class Asked:
    """Actions of one engine on one workload; the files lie in `folder`, the answers go to `answers`."""

    workload: str
    engine: str
    actions: tuple[str, ...]
    scale: float
    folder: str
    answers: str
    saves: int = 2
    layout: str = ""
    step_secs: float = 0.7

    def command(self, module: str) -> list[str]:
        """The command line of the process."""
        return [sys.executable, "-m", f"bench.{module}", json.dumps(asdict(self))]

    @classmethod
    def of_process(cls) -> Asked:
        """What this process was asked."""
        given = json.loads(sys.argv[1])
        return cls(**{**given, "actions": tuple(given["actions"])})

    def answer(self, found: Answers) -> None:
        """Leave the answers for the parent."""
        Path(self.answers).write_text(json.dumps(found))

    @property
    def path(self) -> Path:
        """The folder of the engine's files."""
        return Path(self.folder)

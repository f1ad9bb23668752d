"""What a launch was told, in one frozen value; every target makes its files of this and of nothing else."""

from __future__ import annotations

from dataclasses import field
from pathlib import Path

from torchrelay.records import dataclass
from torchrelay.runners.launch.layout import Layout


@dataclass(frozen=True)
class LaunchRequest:
    """A command on a layout.

    `command` is what torchrun takes: a script and its arguments, or `-m MODULE ARGS`. `run` is the run
    directory or URL, None where the command alone knows it (it is heard from the ranks then). `logs` is the
    directory of this launch: its files, and one directory per attempt. `time_limit` and `notice` (how long
    before its end the program is told) are seconds. `restarts` is how often the ranks may be started again.
    `environment` holds what was given by `--env`, never the launcher's own surroundings. `python` is the
    interpreter where the ranks run.
    """

    layout: Layout
    command: tuple[str, ...]
    workdir: Path
    name: str = "torchrelay"
    run: str | None = None
    logs: Path = Path("launch")
    time_limit: int | None = None
    notice: int = 300
    restarts: int = 0
    environment: tuple[tuple[str, str], ...] = ()
    options: tuple[tuple[str, str], ...] = field(default=())
    """What only one target understands (partition, image, queue ...), as given by `--set KEY=VALUE`."""
    python: str = "python"


@dataclass(frozen=True)
class LaunchFile:
    """A readable file that a target makes of a request: printed by `--dry-run`, submitted otherwise."""

    name: str
    text: str
    executable: bool = False

"""What the ranks of a launch tell whoever launched them, in files of the attempt's directory.

    run.json       which run it is, once its log is ours: only then does its status.json speak of this attempt
    failure.json   the first failure that the ranks agreed on
    agent_N.json   how the agent of a node ended, and which of its ranks failed

Where no launcher asked (`TORCHRELAY_LAUNCH_DIR` is not set) nothing is written; what cannot be written is
left out, because training does not depend on it.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

DIRECTORY = "TORCHRELAY_LAUNCH_DIR"
LAUNCH_ID = "TORCHRELAY_LAUNCH_ID"
ATTEMPT = "TORCHRELAY_LAUNCH_ATTEMPT"
NODE = "TORCHRELAY_LAUNCH_NODE"
NODE_IN = "TORCHRELAY_LAUNCH_NODE_IN"
"""Names the variable in which a scheduler tells an agent which node it is, from 0, in place of NODE."""
LAUNCHER = "TORCHRELAY_LAUNCHER_PID"
_MOST = 1 << 20


def tell_run(run: Path) -> None:
    """Told by the process that writes the run directory, from now on; the newest one told counts."""
    _tell("run.json", {"run": str(run), "host": socket.gethostname(), "pid": os.getpid()})


def tell_failure(rank: int, host: str, text: str, exit_code: int) -> None:
    """The first failure of the job, told by whichever rank is the first to do so."""
    _tell("failure.json", {"rank": rank, "host": host, "text": text, "exit_code": exit_code}, once=True)


def tell_agent(node: int, end: Mapping[str, Any]) -> None:
    """How an agent of torchrun ended."""
    _tell(f"agent_{node}.json", end)


def heard(directory: Path, name: str) -> dict[str, Any]:
    """What was told in a file; empty where nothing was, or nothing that can be read."""
    try:
        with (directory / name).open("rb") as file:
            found = json.loads(file.read(_MOST))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _tell(name: str, what: Mapping[str, Any], *, once: bool = False) -> None:
    directory = os.environ.get(DIRECTORY)
    if not directory:
        return
    path = Path(directory, name)
    own = path.with_name(f".{name}.{socket.gethostname()}.{os.getpid()}")
    with suppress(OSError):
        own.write_text(json.dumps(what))
        if once:
            with suppress(FileExistsError):
                path.hardlink_to(own)
            own.unlink()
        else:
            own.replace(path)

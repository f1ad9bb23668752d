"""What others hear of a process that ends: the first failure, last words, files for its launcher.

    run.json       which run it is, once its log is ours: only then does its status.json speak of this attempt
    failure.json   the first failure that the ranks agreed on
    agent_N.json   how the agent of a node ended, and which of its ranks failed

They are in the attempt's directory. Where no launcher asked (`TORCHRELAY_LAUNCH_DIR` is not set) nothing is
written; what cannot be written is left out, because training does not depend on it.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from torchrelay.records import dataclass

_MOST_TRACEBACK = 64 << 10


@dataclass(frozen=True)
class Failure:
    """What failed first: who, doing what, with which traceback, and the code to end with."""

    rank: int
    host: str
    task: str
    traceback: str
    exit_code: int

    def encode(self) -> bytes:
        """Return the failure as the store keeps it; a very long traceback keeps its end."""
        fields = asdict(self) | {"traceback": self.traceback[-_MOST_TRACEBACK:]}
        return json.dumps(fields).encode()

    @classmethod
    def decode(cls, data: bytes) -> Failure:
        """Read a failure back."""
        return cls(**json.loads(data))

    def headline(self) -> str:
        """Say who failed at what, and the last line of why."""
        lines = self.traceback.strip().splitlines()
        return f"rank {self.rank} on {self.host} failed in {self.task}: {lines[-1] if lines else 'no reason'}"

    def report(self, rank: int) -> str:
        """Return the text that `rank` prints."""
        if "\n" not in self.traceback.strip():
            return f"torchrelay: [rank {rank}] {self.headline()}\n"
        head = f"torchrelay: [rank {rank}] first failure: rank {self.rank} on {self.host}, in {self.task}"
        return f"{head}\n{self.traceback.rstrip()}\n"


SECS = 4.0
NOTE_SECS = 2.0


class Calls(list[Callable[..., None]]):
    """What is to be called before the process ends, in threads of their own."""

    def forget(self, call: Callable[..., None]) -> None:
        """It is not needed any more; may be called again."""
        if call in self:
            self.remove(call)

    def make(self, *values: Any, secs: float) -> None:
        """Call them all, side by side, and wait for at most so many seconds each; never raises."""
        _within(secs, [partial(call, *values) for call in self])


notes = Calls()
"""Are given a reason and an exit code before a failure ends the process from a thread."""
last_words = Calls()


def end_process(code: int) -> None:
    """Flush what was printed and end this process at once, wherever its threads are.

    Of a run in a store what its files say is put up first, for at most four seconds.
    """
    last_words.make(secs=SECS)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # closed, or the reader is gone
            continue
    os._exit(code)


def tell_stderr(text: str) -> None:
    """Print why this process ends; never raises. Whoever read it may be gone with the launcher."""
    with suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(text)
        sys.stderr.flush()


def tell_stderr_within(text: str, secs: float = SECS) -> None:
    """The same for at most so many seconds: whoever read it may read no more, and keeps nobody from ending.

    Where no thread can be made nothing is told.
    """
    _within(secs, [lambda: tell_stderr(text)])


def _within(secs: float, calls: Sequence[Callable[[], None]]) -> None:
    def quietly(call: Callable[[], None]) -> None:
        with suppress(Exception):
            call()

    threads = []
    for call in calls:
        thread = threading.Thread(target=quietly, args=(call,), daemon=True)
        with suppress(RuntimeError):  # no more threads in this process, which has to end all the same
            thread.start()
            threads.append(thread)
    for thread in threads:
        thread.join(secs)


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

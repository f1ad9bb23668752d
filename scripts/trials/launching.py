"""Launches of training programs as a person makes them, watched from outside: output, ranks, signals."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from torchrelay.errors import RelayError

REPOSITORY = Path(__file__).resolve().parents[2]
_CONTROL = re.compile(r"\x1b\[[0-9;]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f]")
_OTHER_LAUNCHERS = ("TORCHELASTIC_", "SLURM_", "MASTER_", "PYTEST_", "GROUP_", "ROLE_")
_PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


class TrialError(RelayError):
    """A trial did not go as torchrelay promises."""


def torchrun(*program: str, ranks: int, options: Sequence[str] = ()) -> list[str]:
    """The command that runs a program on ranks of this machine."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return [*command, *options, *program]


def end_like_an_error() -> None:
    """Let SIGTERM and SIGHUP unwind this program, so that it takes down what it has started."""

    def leave(number: int, _: object) -> None:
        sys.exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, leave)


def clean_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment without the traces of an outer launcher, one thread per rank, a line per epoch."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_OTHER_LAUNCHERS)}
    kept = {name: value for name, value in kept.items() if name not in _PLACE}
    return {
        "OMP_NUM_THREADS": "1",
        "TORCHRELAY_LOG_EVERY_N_SECS": "0",
        **kept,
        "PYTHONUNBUFFERED": "1",
        **(extra or {}),
    }


class Launch:
    """A program that runs; all it prints goes to `log`, line by line also to `on_line`.

    A context manager, so that nothing of it outlives the trial.
    """

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        *,
        on_line: Callable[[str], None] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.log = log
        self.lines: list[str] = []
        self.began = time.monotonic()
        self._on_line = on_line
        self.process = subprocess.Popen(
            command,
            env=dict(env) if env is not None else clean_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Launch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def _read(self) -> None:
        stream = self.process.stdout
        if stream is None:
            return
        with stream, self.log.open("a") as log:
            for line in stream:
                text = _CONTROL.sub("", line.rstrip("\n"))
                print(text, file=log, flush=True)
                self.lines.append(text)
                if self._on_line is not None:
                    self._on_line(text)

    @property
    def secs(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.began

    def ended(self) -> bool:
        """Whether the launcher has ended."""
        return self.process.poll() is not None

    def wait(self, timeout_secs: float) -> int:
        """Wait for the end and return the exit code; a launch that takes longer is killed: TrialError."""
        try:
            code = self.process.wait(timeout_secs)
        except subprocess.TimeoutExpired:
            self.kill()
            raise TrialError(f"the launch ran longer than {timeout_secs:g} s; see {self.log}") from None
        self._reader.join(5)
        return code

    def expect(self, code: int, timeout_secs: float) -> None:
        """Wait for the end; raises TrialError, showing the last lines, for another exit code."""
        found = self.wait(timeout_secs)
        if found != code:
            last = "\n".join(self.lines[-15:])
            raise TrialError(
                f"the launch ended with {found} instead of {code}; all of it is in {self.log}:\n{last}"
            )

    def ranks(self) -> dict[int, int]:
        """The pid of each rank that lives now."""
        found: dict[int, int] = {}
        for pid in descendants(self.process.pid):
            rank = environment_of(pid).get("RANK")
            if rank is not None and is_running(pid):
                found.setdefault(int(rank), pid)
        return found

    def kill(self) -> None:
        """End the launcher and its ranks, which have sessions of their own."""
        for pid in [*descendants(self.process.pid), self.process.pid]:
            send(pid, signal.SIGKILL)
        self.process.wait(10)
        self._reader.join(5)


def wait_until(
    condition: Callable[[], bool], timeout_secs: float, what: str, every_secs: float = 0.01
) -> None:
    """Poll until a condition holds; raises TrialError naming `what` when it does not in time."""
    end = time.monotonic() + timeout_secs
    while not condition():
        if time.monotonic() > end:
            raise TrialError(f"waited {timeout_secs:g} s for {what}")
        time.sleep(every_secs)


def descendants(pid: int) -> list[int]:
    """The processes that a process started, and theirs, in the order of their start."""
    found = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            direct = [int(child) for child in children.read_text().split()]
        except OSError:
            continue
        for child in direct:
            found += [child, *descendants(child)]
    return found


def environment_of(pid: int) -> dict[str, str]:
    """The environment that a process was started with; empty when it is gone."""
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    pairs = (item.decode(errors="replace").partition("=") for item in raw.split(b"\0") if item)
    return {name: value for name, _, value in pairs}


def state_of(pid: int) -> str:
    """The one-letter state of a process (`R`, `S`, `T` stopped, `Z` zombie); empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def is_running(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    return state_of(pid) not in ("", "Z", "X")


def send(pid: int, number: int) -> bool:
    """Send a signal to a process that may be gone; whether it was there."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True

"""Real servers of object stores and files on loopback, where their programs are (scripts/test-services).

Each is a context manager that yields where a test may write and what its clients need in the environment.
A server dies with the process that started it, however that ends.
"""

from __future__ import annotations

import importlib.util
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

HOST = "127.0.0.1"
STARTS_WITHIN_SECS = 100.0
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torchrelay-test-services"
"""Where scripts/test-services puts what is no package of the system."""
AZURITE = CACHE / "node_modules" / "azurite" / "dist" / "src" / "blob" / "main.js"


@dataclass(frozen=True)
class Served:
    """A server that runs: `url` is a place that exists there and is empty, `port` where it listens."""

    url: str
    port: int
    environment: dict[str, str] = field(default_factory=dict)
    """What a client needs in its environment; `{port}` stands for the port, so that a proxy's can be told."""

    def seen_at(self, port: int) -> dict[str, str]:
        """The environment of a client that is to use another port, behind which this server is."""
        return {name: text.replace("{port}", str(port)) for name, text in self.environment.items()}


Starting = Callable[[], AbstractContextManager[Served]]


def missing(*programs: str, modules: Sequence[str] = (), files: Sequence[Path] = ()) -> str:
    """What of it is not installed, in words; nothing if all is there."""
    absent = [name for name in programs if _program(name) is None]
    absent += [name for name in modules if importlib.util.find_spec(name) is None]
    absent += [str(path) for path in files if not path.exists()]
    return ", ".join(absent)


def _program(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")


def skip_without(what: str) -> None:
    """Skip the test, saying what is not installed."""
    if what:
        pytest.skip(f"NOT TRIED: {what} missing; scripts/test-services and torchrelay[test] have them")


class Daemons:
    """Programs that run until the block ends, or the process that started them does."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self._running: list[subprocess.Popen[bytes]] = []

    def start(self, *words: object, **environment: str) -> subprocess.Popen[bytes]:
        """Start a program in the foreground; what it says goes to a file in `home`."""
        program = _program(str(words[0])) or str(words[0])
        command = ["setpriv", "--pdeathsig", "KILL", program, *map(str, words[1:])]
        with (self.home / f"said-{len(self._running)}-{Path(program).name}").open("wb") as said:
            running = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, cwd=self.home,
                env={**os.environ, **environment},
            )  # fmt: skip
        self._running.append(running)
        return running

    def wait_until(self, ready: Callable[[], bool], what: str) -> None:
        """Wait for a condition; an error says what the programs said."""
        until = time.monotonic() + STARTS_WITHIN_SECS
        while not ready():
            dead = [one.args for one in self._running if one.poll() is not None]
            if dead or time.monotonic() > until:
                said = "\n".join(
                    path.read_text(errors="replace")[-2000:] for path in self.home.glob("said-*")
                )
                raise RuntimeError(f"{what} does not start {dead}: {said}")
            time.sleep(0.05)

    def stop(self) -> None:
        """End all, the last one first."""
        for one in reversed(self._running):
            one.send_signal(signal.SIGKILL)
            one.wait()


@contextmanager
def daemons(name: str) -> Iterator[Daemons]:
    """Programs with a directory of their own, which goes with them."""
    with tempfile.TemporaryDirectory(prefix=f"relay-{name}-", ignore_cleanup_errors=True) as home:
        made = Daemons(Path(home))
        try:
            yield made
        finally:
            made.stop()


def free_port() -> int:
    """A port below those that the system gives to connections, so that none of these takes it meanwhile."""
    for port in random.SystemRandom().sample(range(10_000, 32_000), 100):
        with socket.socket() as tried, suppress(OSError):
            tried.bind((HOST, port))
            return port
    raise AssertionError("no port is free")


def listens(port: int) -> bool:
    """Whether somebody takes connections there."""
    with socket.socket() as tried:
        tried.settimeout(5)
        return tried.connect_ex((HOST, port)) == 0


def answers(port: int) -> bool:
    """Whether a web server gives any answer there that is none of a server in trouble."""
    try:
        with urllib.request.urlopen(f"http://{HOST}:{port}/", timeout=5) as answer:
            return bool(answer.status < 500)
    except urllib.error.HTTPError as error:
        return error.code < 500
    except OSError:
        return False

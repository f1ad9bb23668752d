"""A real PostgreSQL server on loopback, of Debian's package: started, stopped, frozen."""

from __future__ import annotations

import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

USER = "postgres"
"""Who runs the server where the tests run as root: it refuses to be root itself."""
BINARIES = sorted(
    Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: int(path.parent.name.split(".")[0])
)
MISSING = "" if BINARIES and (BINARIES[-1] / "initdb").exists() else "Debian's package postgresql"
needs_postgresql = pytest.mark.skipif(
    bool(MISSING), reason=f"NOTHING IS TRIED ON POSTGRESQL: {MISSING} is missing; scripts/test-services"
)


class Server:
    """One cluster with a database `app` of the user `app`, who needs a password."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.password = secrets.token_hex(8)
        self.port = _free_port()

    @property
    def url(self) -> str:
        """As a user writes it."""
        return self.url_with(self.password)

    def url_with(self, password: str) -> str:
        """The same with another password."""
        return f"postgresql://app:{password}@127.0.0.1:{self.port}/app"

    def make(self) -> None:
        """The cluster and the database; `home` belongs to whoever runs the server."""
        (self.home / "password").write_text(self.password)
        if os.geteuid() == 0:
            for path in (self.home, self.home / "password"):
                shutil.chown(path, USER, USER)
        self._run(
            *("initdb", "-D", self._data, "-U", "app", "-A", "scram-sha-256", "--no-sync"),
            *(f"--pwfile={self.home / 'password'}", "-E", "UTF8", "--no-locale"),
        )
        self._start_first()
        self._run("createdb", "-h", self.home, "-p", self.port, "-U", "app", "app")

    def _start_first(self) -> None:
        """Somebody else may take a port between the look and the start: then another one is tried."""
        for _ in range(4):
            with suppress(subprocess.CalledProcessError):
                return self.start()
            self.port = _free_port()
        return self.start()

    def start(self) -> None:
        """Returns when it answers."""
        options = f"-p {self.port} -c listen_addresses=127.0.0.1 -c unix_socket_directories={self.home}"
        self._run(
            *("pg_ctl", "-D", self._data, "-w", "-t", "30", "-s", "-l", self.home / "log"),
            *("-o", f"{options} -c max_connections=20 -c shared_buffers=16MB", "start"),
        )

    def stop(self) -> None:
        """At once, as when its machine is switched off; a server that is stopped stays so."""
        with suppress(subprocess.CalledProcessError):
            self._run("pg_ctl", "-D", self._data, "-w", "-t", "30", "-s", "-m", "immediate", "stop")

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """It takes connections no more, and answers nobody, until the block ends."""
        postmaster = int((self.home / "data/postmaster.pid").read_text().split()[0])
        os.kill(postmaster, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(postmaster, signal.SIGCONT)

    @property
    def _data(self) -> Path:
        return self.home / "data"

    def _run(self, name: str, *arguments: object) -> None:
        words = [str(BINARIES[-1] / name), *map(str, arguments)]
        if os.geteuid() == 0:
            words = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", *words]
        env = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.home),
            "LANG": "C.UTF-8",
            "PGPASSWORD": self.password,
        }
        with (self.home / "said").open("a") as said:  # no pipe: the server would inherit it and hold it open
            subprocess.run(words, check=True, cwd=self.home, env=env, stdout=said, stderr=said, timeout=100)


def _free_port() -> int:
    """A port below those that the system gives to connections, so none takes it while the server is down."""
    for port in random.SystemRandom().sample(range(10_000, 32_000), 100):
        with socket.socket() as tried, suppress(OSError):
            tried.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")


@contextmanager
def postgresql() -> Iterator[Server]:
    """A server that is gone, with its files, after the block. Its folder can be reached by its user."""
    with tempfile.TemporaryDirectory(prefix="relay-pg-", ignore_cleanup_errors=True) as home:
        server = Server(Path(home))
        try:
            server.make()
            yield server
        finally:
            server.stop()

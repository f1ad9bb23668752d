"""Connection of a rank to the monitor of its host, which the lowest rank there starts."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torchrelay
from torchrelay.errors import DeadlineError, PeerError
from torchrelay.jobs.runtime import phase
from torchrelay.runners.distributed.host_monitor import CONNECT_SECS, Orders
from torchrelay.runners.distributed.launcher_status import Failure
from torchrelay.runners.distributed.liveness import JsonLineSocket, Message, ProcessId, by_group, connect_to
from torchrelay.runners.distributed.rendezvous import Deadline, StoreClient

_START_SECS = 120.0
_PROGRAM = (
    "import sys; sys.path.append({root!r}); "
    "from torchrelay.runners.distributed.host_monitor import main; main()"
)
_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH")
"""Variables for the interpreter; others are dropped, because ranks are found by them."""


class MonitorLine:
    """Receive failures from the host monitor; for one thread, but `leave` may come from another."""

    def __init__(self, line: JsonLineSocket, token: str, own: ProcessId) -> None:
        self._line = line
        self._own = own
        self._token = token
        self._failure: Failure | None = None
        self._left = False

    def introduce(self, thread: int) -> None:
        """Send rank, pid and the thread of this process that is always scheduled."""
        hello = {"token": self._token, "rank": self._own.rank, "thread": thread, "phase": phase.show()}
        self._line.send(hello)

    def reported(self) -> Failure | None:
        """Return the failure that the monitor reported, or the loss of the monitor; never waits."""
        for message in self._line.receive():
            if "failure" in message and self._failure is None:
                self._failure = Failure.decode(message["failure"].encode())
        if self._line.closed and self._failure is None and not self._left:
            text = f"PeerError: the host monitor of {self._own.host} is gone (killed, or out of memory)"
            self._failure = Failure(self._own.rank, self._own.host, "the job", text, PeerError.exit_code)
        return self._failure

    def leave(self) -> None:
        """Announce that the exit of this process will not be a failure."""
        self._left = True
        self._line.send({"left": True})


def join_host_monitor(
    store: StoreClient, rank: int, processes: Sequence[ProcessId], master: str, *, silence: float, look: float
) -> MonitorLine:
    """Connect to the monitor of this host; the host's lowest rank starts it first.

    `master` is an address of the job's store; the route to it gives this host's own address. Raises PeerError
    if the monitor does not start or answer, DeadlineError if no rank started it.
    """
    groups = list(by_group(processes).values())
    index = next(at for at, ranks in enumerate(groups) if rank in ranks)
    if groups[index][0] == rank:
        hub = _posted(store, 0) if index else None  # what the first host posted
        orders = Orders(
            token=hub["token"] if hub else secrets.token_hex(16),
            host=processes[rank].host,
            pids={one: processes[one].pid for one in groups[index]},
            silence=silence,
            look=look,
            shared=len(groups) > 1 and hub is None,
            hub={key: hub[key] for key in ("addresses", "port", "host", "ranks")} if hub else None,
        )
        posted: Message = {
            "port": launch_host_monitor(orders)[0],
            "token": orders.token,
            "host": orders.host,
            "ranks": groups[index],
        }
        posted["addresses"] = _addresses(master, orders.host) if orders.shared else []
        store.put(_key(index), json.dumps(posted).encode())
    found = _posted(store, index)
    try:
        line = connect_to("127.0.0.1", found["port"], CONNECT_SECS)
    except OSError as error:
        raise PeerError(f"the host monitor of {processes[rank].host} does not answer: {error}") from error
    return MonitorLine(line, found["token"], processes[rank])


def _posted(store: StoreClient, index: int) -> Message:
    """Wait for the address of a host's monitor."""
    deadline = Deadline(_START_SECS)
    while not store.wait([_key(index)], deadline.left):
        if deadline.over:
            raise DeadlineError(
                f"waited {_START_SECS:g} s for the lowest rank of host {index} to start its host monitor"
            )
    return dict(json.loads(store.get([_key(index)])[0]))


def launch_host_monitor(orders: Orders) -> tuple[int, int]:
    """Start a host monitor and return its port and pid; it shares only stderr with this process.

    Raises PeerError if it does not start.
    """
    root = str(Path(torchrelay.__file__).resolve().parents[1])
    command = [sys.executable, "-S", "-I", "-c", _PROGRAM.format(root=root)]
    try:
        process = subprocess.Popen(  # noqa: S603 - this very interpreter
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
            start_new_session=True,
        )
    except OSError as error:
        raise PeerError(f"cannot start the host monitor of {orders.host} ({command[0]}): {error}") from error
    assert process.stdin and process.stdout  # noqa: S101 - they are pipes
    with process.stdin as orders_to, process.stdout as port:
        orders_to.write(json.dumps(asdict(orders)).encode() + b"\n")
        orders_to.flush()
        told = port.readline()
    if not told.strip().isdigit():
        raise PeerError(f"the host monitor of {orders.host} did not start (exit code {process.wait(10)})")
    process.returncode = 0  # not waited for: it ends after its last rank
    return int(told), process.pid


def _addresses(master: str, host: str) -> list[str]:
    """List addresses by which other hosts may reach this one: that of the route to the store, and names."""
    found: list[str] = []
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((master, 9))
                found.append(probe.getsockname()[0])
        except OSError:
            continue
    return list(dict.fromkeys([*found, master, host]))


def _key(index: int) -> str:
    """Return the store key of a host's monitor."""
    return f"monitor/{index}"

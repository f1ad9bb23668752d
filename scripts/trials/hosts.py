"""Hosts as network namespaces: a name, an address, a network stack and host name of their own, one kernel.

Two hosts are joined by a veth pair. What they run sees the other only through it; files are shared, unless
a host gets a private file system over a directory. Needs root, `ip` and `unshare`.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from launching import TrialError, is_running, send, wait_until

NAMESPACES = Path("/run/netns")
NAMES_OF = Path("/etc/netns")
_NOBODY = "02:00:00:00:00:99"
_AS_HOST = """
hostname "$1"
if [ -n "$2" ]; then mount -t tmpfs none "$2"; fi
shift 2
exec "$@"
"""


@dataclass(frozen=True)
class Host:
    """One of the two: `name` is what `hostname` says there, `namespace` what the kernel calls it."""

    name: str
    address: str
    namespace: str

    def command(self, program: Sequence[str], *, private: Path | None = None) -> list[str]:
        """The command that runs a program there; `private` gets a file system that only it sees."""
        inside = ["sh", "-ec", _AS_HOST, "sh", self.name, str(private or ""), *program]
        return ["ip", "netns", "exec", self.namespace, "unshare", "--uts", "--mount", *inside]

    def pids(self) -> list[int]:
        """Everything that runs there."""
        done = subprocess.run(
            ["ip", "netns", "pids", self.namespace], capture_output=True, text=True, check=False
        )
        return [int(pid) for pid in done.stdout.split()]

    def deafen(self, other: Host) -> Callable[[], None]:
        """Drop what the other host sends here, without a word to anybody; return what undoes it.

        The other's packets go to an unused hardware address.
        """
        words = ["neigh", "replace", self.address, "lladdr", _NOBODY, "nud", "permanent", "dev", "eth0"]
        _ip("-n", other.namespace, *words)
        return lambda: _ip("-n", other.namespace, "neigh", "del", self.address, "dev", "eth0")

    def unplug(self) -> Callable[[], None]:
        """Take the network device down; return what undoes it."""
        _ip("-n", self.namespace, "link", "set", "eth0", "down")
        return lambda: _ip("-n", self.namespace, "link", "set", "eth0", "up")

    def kill(self) -> None:
        """SIGKILL everything there, as when a machine is switched off but its network still answers."""
        for pid in self.pids():
            send(pid, signal.SIGKILL)
        wait_until(
            lambda: not any(map(is_running, self.pids())), 10, f"the end of all processes of {self.name}"
        )


class TwoHosts:
    """Two joined hosts for the time of a `with` block; raises TrialError where they cannot be made."""

    def __init__(self, names: tuple[str, str] = ("alpha", "beta")) -> None:
        token = secrets.token_hex(4)
        self.hosts = tuple(
            Host(name, f"10.77.0.{number}", f"tr-{token}-{name}") for number, name in enumerate(names, 1)
        )

    def __enter__(self) -> tuple[Host, Host]:
        why = why_not()
        if why is not None:
            raise TrialError(why)
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        first, second = self.hosts
        return first, second

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def _make(self) -> None:
        first, second = (host.namespace for host in self.hosts)
        names = "".join(f"{host.address} {host.name}\n" for host in self.hosts)
        for host in self.hosts:
            _ip("netns", "add", host.namespace)
            etc = NAMES_OF / host.namespace
            etc.mkdir(parents=True)
            (etc / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
        _ip("link", "add", "eth0", "netns", first, "type", "veth", "peer", "name", "eth0", "netns", second)
        for host in self.hosts:
            _ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _ip("-n", host.namespace, "link", "set", device, "up")

    def _remove(self) -> None:
        for host in self.hosts:
            with suppress(TrialError):
                host.kill()
            with suppress(TrialError):
                _ip("netns", "del", host.namespace)
            shutil.rmtree(NAMES_OF / host.namespace, ignore_errors=True)


def why_not() -> str | None:
    """Why hosts cannot be made on this machine; None when they can."""
    if os.geteuid() != 0:
        return "two hosts need root, to make network namespaces"
    for tool in ("ip", "unshare"):
        if shutil.which(tool) is None:
            return f"two hosts need the program {tool!r} (iproute2, util-linux)"
    return _kernel_refuses()


def _kernel_refuses() -> str | None:
    """Try it: containers often have root and the tools, but not the right."""
    name = f"tr-{secrets.token_hex(4)}-try"
    try:
        _ip("netns", "add", name)
        _ip("link", "add", "eth0", "netns", name, "type", "veth", "peer", "name", "eth1", "netns", name)
    except TrialError as error:
        return f"this machine does not let us make network namespaces: {error}"
    finally:
        with suppress(TrialError):
            _ip("netns", "del", name)
    return None


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise TrialError(f"ip {' '.join(words)}: {done.stderr.strip()}")

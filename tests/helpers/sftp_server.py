"""OpenSSH's sftp server, for one user with a key of its own."""

from __future__ import annotations

import getpass
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from store_servers import HOST, Served, daemons, free_port, listens, missing

MISSING = missing("sshd", "ssh-keygen", modules=("asyncssh",))


@contextmanager
def sftp() -> Iterator[Served]:
    """Serve a directory by sftp."""
    with daemons("sftp") as running:
        home, port = running.home, free_port()
        (home / "files").mkdir()
        _keys(home)
        (home / "sshd_config").write_text(_configuration(home, port))
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        running.start("/usr/sbin/sshd", "-D", "-e", "-f", home / "sshd_config")
        running.wait_until(lambda: listens(port), "sshd")
        user = getpass.getuser()
        yield Served(
            f"sftp://{user}@{HOST}{home}/files/", port,
            {"FSSPEC_SFTP_PORT": "{port}", "FSSPEC_SFTP_CLIENT_KEYS": f"{home}/user",
             "FSSPEC_SFTP_KNOWN_HOSTS": f"{home}/known_hosts"},
        )  # fmt: skip


def _keys(home: Path) -> None:
    for name in ("host", "user"):
        words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(home / name)]
        subprocess.run(words, check=True, timeout=60)
    (home / "authorized_keys").write_text((home / "user.pub").read_text())
    (home / "known_hosts").write_text(f"* {(home / 'host.pub').read_text()}")  # behind a proxy, too


def _configuration(home: Path, port: int) -> str:
    return f"""
Port {port}
ListenAddress {HOST}
HostKey {home}/host
AuthorizedKeysFile {home}/authorized_keys
UsePAM no
StrictModes no
PasswordAuthentication no
PermitRootLogin yes
PidFile {home}/pid
MaxSessions 20
MaxStartups 100
Subsystem sftp internal-sftp
"""

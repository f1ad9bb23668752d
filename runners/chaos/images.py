"""File systems in files: made, mounted over a loop device, copied as a power cut would leave them."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from torchrelay.errors import StorageError
from torchrelay.records import dataclass

_COMMAND_SECS = 60.0


@dataclass(frozen=True)
class FileSystem:
    """How a file system is made and mounted. Its own commits are far apart: only syncs make durable."""

    name: str
    mib: int
    make: tuple[str, ...]
    options: str


FILE_SYSTEMS = {
    one.name: one
    for one in (
        FileSystem("ext4", 128, ("mkfs.ext4", "-q", "-F"), "noatime,commit=300"),
        FileSystem("xfs", 320, ("mkfs.xfs", "-q", "-f"), "noatime"),
        FileSystem("btrfs", 128, ("mkfs.btrfs", "-q", "-f"), "noatime,commit=300"),
    )
}


def why_not(system: FileSystem, directory: Path) -> str | None:
    """Why this file system cannot be tried here; None where it can, which is tried out."""
    if os.geteuid() != 0:
        return "mounting an image of a file system needs root"
    for program in (system.make[0], "losetup", "mount"):
        if shutil.which(program) is None:
            return f"there is no {program}: install it (xfsprogs, btrfs-progs, e2fsprogs, mount)"
    try:
        image = make(system, directory / f"probe-{system.name}")
        with mounted(system, image, directory / f"probe-{system.name}.mnt"):
            pass
        image.unlink()
    except StorageError as error:
        return str(error)
    return None


def make(system: FileSystem, image: Path) -> Path:
    """An empty file system in a sparse file."""
    with open(image, "wb") as file:
        file.truncate(system.mib << 20)
    _run(*system.make, str(image))
    return image


@contextmanager
def mounted(system: FileSystem, image: Path, where: Path) -> Iterator[Path]:
    """The image, mounted. A file system that was cut off recovers here."""
    where.mkdir(exist_ok=True)
    device = _run("losetup", "-f", "--show", str(image)).strip()
    try:
        _run("mount", "-t", system.name, "-o", system.options, device, str(where))
        try:
            yield where
        finally:
            _run("umount", str(where))
    finally:
        with suppress(StorageError):
            _run("losetup", "-d", device)


def settle(where: Path) -> None:
    """Make durable what was written so far below a mounted image."""
    _run("sync", "-f", str(where))


def copy(image: Path, to: Path) -> None:
    """What the device holds now; what the file system only has in memory is not there."""
    _run("cp", "--sparse=always", "--reflink=auto", str(image), str(to))


def _run(*command: str) -> str:
    try:
        done = subprocess.run(  # noqa: S603 - fixed programs
            command,
            capture_output=True,
            text=True,
            timeout=_COMMAND_SECS,
            check=False,
            env={**os.environ, "LC_ALL": "C"},
        )
    except subprocess.TimeoutExpired:
        raise StorageError(f"{' '.join(command)} did not end within {_COMMAND_SECS:g} s") from None
    if done.returncode:
        raise StorageError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
    return done.stdout

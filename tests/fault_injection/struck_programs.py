"""Programs that the chaos tests strike: calls of every sort, and the built-in run with a rule taken out."""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import torchrelay
from torchrelay.chaos import damage
from torchrelay.chaos.child import target
from torchrelay.checkpoint.manager.engine import Engine
from torchrelay.checkpoint.storage import local

LIBC = ctypes.CDLL(None, use_errno=True)
HERE = Path(__file__).resolve()


def every_call(root: str) -> None:
    """Each call that the library knows, once, in the order of `EVERY_KIND`."""
    os.chdir(root)
    os.mkdir("folder")
    folder = os.open("folder", os.O_RDONLY | os.O_DIRECTORY)
    file = os.open("a", os.O_RDWR | os.O_CREAT | os.O_EXCL, dir_fd=folder)
    os.write(file, b"1234")
    os.pwrite(file, b"56", 4)
    os.writev(file, [b"x", b"y"])
    os.pwritev(file, [b"z"], 0)
    os.posix_fallocate(file, 0, 4096)
    os.ftruncate(file, 8192)
    LIBC.sync_file_range(file, ctypes.c_int64(0), ctypes.c_int64(4096), 2)
    os.fsync(file)
    os.fdatasync(file)
    os.fchmod(file, 0o600)
    os.chmod("folder/a", 0o644)
    os.link("folder/a", f"{root}/b")
    os.link("a", "c", src_dir_fd=folder, dst_dir_fd=folder)
    os.rename("b", "d")
    LIBC.renameat2(-100, b"d", -100, b"e", 1)
    number, here = {"x86_64": 316, "aarch64": 276}[os.uname().machine], ctypes.c_long(-100)
    LIBC.syscall(ctypes.c_long(number), here, b"e", here, b"f", ctypes.c_long(0))
    other = os.open("g", os.O_WRONLY | os.O_CREAT)
    os.sendfile(other, file, 0, 10)
    os.copy_file_range(file, other, 10, 0)
    os.close(other)
    os.unlink("g")
    os.unlink("c", dir_fd=folder)
    os.close(file)
    os.close(folder)
    os.unlink("folder/a")
    os.rmdir("folder")
    os.close(os.open("f", os.O_RDONLY))
    os.close(os.open("/proc/self/stat", os.O_RDONLY))  # not below the root: never counted


EVERY_KIND = [
    *("mkdir", "opendir", "create", "write", "write", "write", "write", "allocate", "truncate", "range"),
    *(
        "sync",
        "sync",
        "mode",
        "mode",
        "link",
        "link",
        "rename",
        "rename",
        "rename",
        "create",
        "write",
        "write",
    ),
    *("close", "unlink", "unlink", "close", "release", "unlink", "rmdir", "open", "release"),
]


def write_one(root: str, direct: bool = False) -> list[int]:
    """Write 64 KiB in one call until all is written; the sizes of the parts."""
    flags = os.O_WRONLY | os.O_CREAT | (os.O_DIRECT if direct else 0)
    file, sizes, done = os.open(f"{root}/file", flags), [], 0
    memory = mmap.mmap(-1, 1 << 16)
    memory.write(b"a" * (1 << 16))
    while done < 1 << 16 and len(sizes) < 5:
        sizes.append(os.pwrite(file, memoryview(memory)[done:], done))
        done += sizes[-1]
    os.close(file)
    return sizes


def reads(root: str) -> str:
    """Read a file; the error's number, or what it held."""
    try:
        return Path(root, "file").read_text()
    except OSError as error:
        return str(error.errno)


def threads(root: str) -> None:
    """Eight threads write 50 times each."""

    def write(number: int) -> None:
        file = os.open(f"{root}/{number}", os.O_WRONLY | os.O_CREAT)
        for _ in range(50):
            os.write(file, b"x")
        os.close(file)

    running = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for one in running:
        one.start()
    for one in running:
        one.join()


def two_processes(root: str) -> None:
    """A child and its parent write ten times each; the parent fails if the child was killed."""
    pid = os.fork()
    file = os.open(f"{root}/{'parent' if pid else 'child'}", os.O_WRONLY | os.O_CREAT)
    for _ in range(10):
        os.write(file, b"x")
    if pid == 0:
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0


# The built-in run with a rule taken out


def without_syncs(**arguments: Any) -> dict[str, Any]:
    """No file and no directory is synced."""
    os.fsync = lambda descriptor: None
    return target.train(**arguments)


def acknowledging_early(**arguments: Any) -> dict[str, Any]:
    """The oracle hears of an epoch before it is saved."""
    real = Engine.save

    def save(self: Engine, session: Any, position: Any, facts: Any) -> None:
        target.append(Path(arguments["oracle"]), position.epoch)
        real(self, session, position, facts)

    Engine.save = save
    return target.train(**arguments)


def swallowing_errors(**arguments: Any) -> dict[str, Any]:
    """A failed sync of a file is passed over."""
    real = local.LocalWriteHandle.sync_file

    def sync(self: local.LocalWriteHandle) -> None:
        with suppress(OSError):
            real(self)

    local.LocalWriteHandle.sync_file = sync
    return target.train(**arguments)


def leaving_files_open(**arguments: Any) -> dict[str, Any]:
    """Descriptors of written files are never closed."""
    local.LocalWriteHandle.close = lambda self: None
    return target.train(**arguments)


def look_without_proof(run: str, oracle: str, changes: list[dict[str, Any]]) -> list[list[str]]:
    """Damaged runs as a reader sees them that does not prove tensors."""
    target.torchrelay.open_checkpoint = functools.partial(torchrelay.open_checkpoint, verify="headers")
    return damage.look_at_all(run, oracle, changes)

"""The preloaded library: compiled from its source when it is first needed."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from torchrelay.errors import StorageError, UsageError

SOURCE = Path(__file__).with_name("faults.c")
_COMPILE_SECS = 60.0


def library() -> Path:
    """The library for this machine, from the user's cache where it was compiled before.

    Raises UsageError where there is no C compiler, or it refuses the source.
    """
    if not sys.platform.startswith("linux"):
        raise UsageError("chaos preloads a library into the tested process, which needs Linux")
    stamp = hashlib.sha256(SOURCE.read_bytes() + os.uname().machine.encode()).hexdigest()[:16]
    directory = _cache()
    built = directory / f"faults-{stamp}.so"
    if not built.exists():
        _compile(built)
    return built


def _cache() -> Path:
    """The user's cache; where that cannot be written, a directory of his own for temporary files."""
    home = os.environ.get("XDG_CACHE_HOME") or str(Path("~/.cache").expanduser())
    for base in (Path(home) / "torchrelay", Path(tempfile.gettempdir()) / f"torchrelay-{os.getuid()}"):
        try:
            base.mkdir(mode=0o700, parents=True, exist_ok=True)
            owner = base.stat().st_uid
        except OSError:
            continue
        if owner == os.getuid() and os.access(base, os.W_OK | os.X_OK):
            return base
    raise StorageError("there is no directory for the compiled library: set XDG_CACHE_HOME to a writable one")


def _compile(built: Path) -> None:
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if not compiler or not shutil.which(compiler):
        raise UsageError("chaos compiles a small C library and finds no compiler: install gcc, or set CC")
    temporary = built.with_name(f".tmp-{os.getpid()}-{built.name}")
    command = [compiler, "-std=gnu11", "-O2", "-fPIC", "-shared", "-o", str(temporary), str(SOURCE), "-ldl"]
    done = subprocess.run(  # noqa: S603 - the compiler of this machine
        command, capture_output=True, text=True, timeout=_COMPILE_SECS, check=False
    )
    if done.returncode != 0:
        temporary.unlink(missing_ok=True)
        first = (done.stderr.strip().splitlines() or ["it said nothing"])[0]
        raise UsageError(f"{compiler} cannot compile {SOURCE}: {first}")
    temporary.replace(built)

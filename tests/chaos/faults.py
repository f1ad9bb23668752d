"""One fault, the plan by which the preloaded library makes it happen, and the calls that were made."""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

from torchrelay.errors import StorageError, UsageError
from torchrelay.records import dataclass

ERRNOS = ("ENOSPC", "EIO", "EACCES", "EROFS", "ESTALE", "EINTR", "EMFILE", "EDQUOT")
STORE_ERRNOS = ("EIO", "EBUSY", "ETIMEDOUT", "ECONNRESET", "EACCES", "ENOSPC")
"""What fsspec makes of a store's answers 500, 503, of time-outs, lost connections, 403 and a full quota."""
WHATS = ("kill", "short", "zero", "stale", "stall", "pause")
WHENS = ("before", "after", "middle")
_FLAGS = ("lasting", "reads")
_FORM = re.compile(r"([A-Za-z]+)@([1-9][0-9]{0,8})((?::[a-z]+)*)")


@dataclass(frozen=True)
class Fault:
    """`what` is `kill`, `short`, `zero`, `stale` (a listing without names), `stall`, `pause` or an errno.

    It happens to call number `at`; where `lasting`, to all later calls of the same sort too. `when` is for
    kills and pauses: before or after the call, or in the middle of a write; in a store for errors too, which
    after the call are lost answers. With `reads` the reads of files are counted too.
    """

    what: str
    at: int
    when: str = "before"
    lasting: bool = False
    reads: bool = False

    @property
    def errno(self) -> int:
        """The errno that the call reports; 0 for faults that are not errors."""
        return int(getattr(errno, self.what, 0))

    def __str__(self) -> str:
        """`kill@37:after`, `ENOSPC@12:lasting`; `fault_of` reads it again."""
        when = "" if self.when == "before" else f":{self.when}"
        flags = "".join(f":{name}" for name in ("lasting", "reads") if getattr(self, name))
        return f"{self.what}@{self.at}{when}{flags}"


def fault_of(text: str) -> Fault:
    """Read what `str` of a fault wrote; raises UsageError for anything else."""
    found = _FORM.fullmatch(text)
    what = found[1] if found else ""
    words = found[3].split(":")[1:] if found else []
    known = what in (*WHATS, *ERRNOS, *STORE_ERRNOS)
    if found is None or not known or any(word not in (*WHENS, *_FLAGS) for word in words):
        raise UsageError(
            f"{text!r:.80} is not a fault: write kill@37:after, ENOSPC@12:lasting, stall@5, with one of "
            f"{', '.join(dict.fromkeys((*WHATS, *ERRNOS, *STORE_ERRNOS)))}"
        )
    when = next((word for word in words if word not in _FLAGS), "before")
    return Fault(what, int(found[2]), when, "lasting" in words, "reads" in words)


VARIABLE = "TORCHRELAY_CHAOS_PLAN"
"""Where a process that is started under the library finds its plan."""
_MAGIC = 0x53544C46
_PLAN_FORM = struct.Struct("=I5i2q4q2i1024s1024s1024s1024s")
"""The fields of `struct plan` in faults.c, in its order and without gaps."""
_TEXT = 1024
_CALLS, _FIRED, _PAUSED, _RESUMED = 40, 48, 56, 64
_STRUCK = 80
_ACTS = {"": 0, "kill": 1, "short": 3, "zero": 4, "stall": 5, "pause": 6}
_FAIL = 2
_WHENS = {"before": 0, "after": 1, "middle": 2}


class PlanFile:
    """A plan in a file; armed for one trial after another, never while a process follows it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.write_bytes(bytes(_PLAN_FORM.size))
        with open(path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), _PLAN_FORM.size)

    def arm(
        self, root: Path, fault: Fault | None, *, log: Path | None = None, reads: bool | None = None,
        stall_secs: float = 0.02,
    ) -> None:  # fmt: skip
        """Count calls below `root`, and let `fault` happen.

        `log` gets a line per call; reads of files count too where `reads`, or else the fault, says so.
        Raises UsageError for paths that the library has no room for.
        """
        texts = [b"", *(_text(one) for one in (str(root.resolve()), str(root.absolute()), str(log or "")))]
        counted = fault is not None and fault.reads if reads is None else reads
        what = 0 if fault is None else _FAIL if fault.errno else _ACTS[fault.what]
        data = _PLAN_FORM.pack(
            _MAGIC, what, _WHENS[fault.when] if fault else 0, fault.errno if fault else 0,
            int(fault.lasting) if fault else 0, int(counted), fault.at if fault else 0,
            int(stall_secs * 1e6), 0, 0, 0, 0, 0, 0, *texts,
        )  # fmt: skip
        self._map[:] = data

    @property
    def calls(self) -> int:
        """How many calls were counted."""
        return self._number(_CALLS)

    @property
    def fired(self) -> int:
        """How often the fault happened."""
        return self._number(_FIRED)

    @property
    def struck(self) -> str:
        """The first call that the fault happened to: its sort and its path."""
        return self._map[_STRUCK : _STRUCK + _TEXT].partition(b"\0")[0].decode(errors="replace")

    @property
    def paused(self) -> int:
        """The number of the call that stands still now, or did last; 0 before the first."""
        return self._number(_PAUSED)

    def resume(self, number: int) -> None:
        """Let call `number` continue."""
        struct.pack_into("=q", self._map, _RESUMED, number)

    def close(self) -> None:
        """Close the file and remove it."""
        self._map.close()
        self.path.unlink(missing_ok=True)

    def _number(self, offset: int) -> int:
        return int(struct.unpack_from("=q", self._map, offset)[0])


def _text(path: str) -> bytes:
    data = os.fsencode(path)
    if len(data) >= _TEXT:
        raise UsageError(f"{path:.80}... is longer than {_TEXT - 1} bytes: choose a shorter path")
    return data


CHANGING = ("create", "write", "sync", "link", "rename", "unlink", "mkdir", "rmdir", "truncate", "close")
"""Sorts of calls that change something, or bring a change on its way."""


@dataclass(frozen=True)
class Call:
    """One call; `path` is relative to the tested root, `error` the errno or 0."""

    number: int
    pid: int
    kind: str
    result: int
    error: int
    path: str


def read_calls(log: Path, root: Path) -> tuple[Call, ...]:
    """The calls of a log, by number; a last line that a kill has torn is left out."""
    if not log.exists():
        return ()
    found = []
    for line in log.read_text(errors="replace").splitlines(keepends=True):
        parts = line.rstrip("\n").split(" ", 6)
        if len(parts) == 7 and line.endswith("\n"):
            number, pid, _, kind, result, error, path = parts
            found.append(Call(int(number), int(pid), kind, int(result), int(error), _relative(path, root)))
    return tuple(sorted(found, key=lambda one: one.number))


def _relative(path: str, root: Path) -> str:
    for base in (str(root.resolve()), str(root.absolute())):
        if path.startswith(base):
            return path[len(base) :].lstrip("/")
    return path


SOURCE = Path(__file__).with_name("child") / "faults.c"
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
        raise UsageError("chaos compiles a small C library and finds no compiler: install gcc")
    temporary = built.with_name(f".tmp-{os.getpid()}-{built.name}")
    command = [compiler, "-std=gnu11", "-O2", "-fPIC", "-shared", "-o", str(temporary), str(SOURCE), "-ldl"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_SECS, check=False)
    if done.returncode != 0:
        temporary.unlink(missing_ok=True)
        first = (done.stderr.strip().splitlines() or ["it said nothing"])[0]
        raise UsageError(f"{compiler} cannot compile {SOURCE}: {first}")
    temporary.replace(built)


_SPARED = ("HINT", "writer.json", ".probe-", ".tmp-", "stats.json", "live.json", "/logs/attempt_")
"""Files that verification does not need, such as notes for monitoring: failures there may be silent."""
_HARMLESS = ("open", "read", "release", "range", "mkdir")
"""Reads whose bytes were verified in the end, advice, and directories: a missing one shows at once."""
_REPEATED = ("EIO", "EBUSY", "ETIMEDOUT", "ECONNRESET")
"""What a store may answer and then not again: the call is made again, and its effect looked up before."""


def may_be_silent(fault: Fault, struck: str, run: str) -> bool:
    """Whether the failed call loses nothing: advice, a repeated read, a file that is not needed.

    A process that cannot read the directory above the checkpoints has not created them in it. That of a run
    is made and removed again before the run begins.
    """
    if fault.what in ("short", "EINTR") or (fault.what == "zero" and not fault.lasting):
        return True
    kind, _, path = struck.partition(" ")
    above = path == run and (kind == "rmdir" or (kind == "opendir" and fault.what == "EACCES"))
    return kind in _HARMLESS or above or any(name in path for name in _SPARED)


def may_be_silent_in_store(fault: Fault, struck: str) -> bool:
    """The same of calls to a store.

    Listings decide nothing, so neither do those that fail or lack names; what cannot be read is read again.
    """
    kind, _, path = struck.partition(" ")
    again = not fault.lasting and (fault.what in _REPEATED or kind in ("look", "read"))
    return again or kind in ("list", "mkdir") or any(name in path for name in _SPARED)

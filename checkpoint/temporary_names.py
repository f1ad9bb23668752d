"""Hidden names beside files that are being made, and what killed writers left under such names.

A name tells what is made and by which process, so that a later writer of the same file can clear up without
any lock: a process that is seen to be gone writes nothing more. Of one that cannot be seen from here (another
host, an earlier boot, another container) nothing is believed but that nothing of it has changed for a week.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import time
from contextlib import suppress
from pathlib import Path

from torchrelay.checkpoint.format.canonical_json import sha256
from torchrelay.checkpoint.log.lease import WriterIdentity, process_start
from torchrelay.checkpoint.storage.base import PRIVATE
from torchrelay.records import dataclass

UNSEEN_SECS = 7 * 24 * 3600.0
"""So long nothing of a writer that cannot be seen has changed before it is taken for gone."""
_DIGITS = 12
_NAME = re.compile(rf"{re.escape(PRIVATE)}([0-9a-f]+)-([0-9a-f]+)-([0-9]{{1,9}})-([0-9]{{1,19}})-[0-9a-f]+")


@dataclass(frozen=True)
class Maker:
    """The process behind a name: where processes can be told apart (nothing if nowhere), pid, start."""

    place: str
    pid: int
    start: str

    @classmethod
    def here(cls) -> Maker:
        """The process that asks."""
        me = WriterIdentity.here("")
        known = bool(me.boot_id and me.pid_namespace and me.pid_start)
        return cls(_digest(f"{me.boot_id} {me.pid_namespace}") if known else "0", me.pid, me.pid_start or "0")

    def seen_from(self, other: Maker) -> bool:
        """Whether `other` can tell if this one lives."""
        return self.place == other.place != "0"

    def is_gone(self) -> bool:
        """Whether the process has ended; asked where it can be seen."""
        now = process_start(self.pid)
        return now is None or now not in ("", self.start)


def temporary_beside(path: Path) -> Path:
    """A new name for what is to become `path`, which listings hide; what dead writers left of it goes."""
    sweep(path)
    me = Maker.here()
    return path.with_name(
        f"{PRIVATE}{_digest(path.name)}-{me.place}-{me.pid}-{me.start}-{secrets.token_hex(6)}"
    )


def sweep(path: Path) -> None:
    """Delete what writers of `path` left that are gone; what cannot be deleted stays, in silence."""
    me, mine = Maker.here(), _digest(path.name)
    names: list[str] = []
    with suppress(OSError):
        names = os.listdir(path.parent)
    for name in names:
        found = _NAME.fullmatch(name)
        if found is None or found[1] != mine:
            continue
        maker, left = Maker(found[2], int(found[3]), found[4]), path.with_name(name)
        if maker.is_gone() if maker.seen_from(me) else _is_old(left):
            _delete(left)


def _is_old(path: Path) -> bool:
    """Whether nothing of it has changed for long."""
    with suppress(OSError):
        newest = max(one.lstat().st_mtime for one in (path, *path.rglob("*")))
        return time.time() - newest > UNSEEN_SECS
    return False


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
        return
    with suppress(OSError):
        path.unlink()


def _digest(text: str) -> str:
    return sha256(os.fsencode(text))[:_DIGITS]

"""Giving a finished file its name, on a local file system, without ever replacing another one."""

from __future__ import annotations

import ctypes
import errno
import os
from functools import cache
from pathlib import Path
from typing import Any

_AT_FDCWD = -100
_NOREPLACE = 1
_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EINVAL})
_NO_RENAMES = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})


def give_name(temporary: Path, full: Path, *, alone: bool = False) -> None:
    """Make the file of `temporary` appear as `full`: by `link`, else by a rename that does not replace.

    `temporary` may be left. With `alone` nobody else writes there, and a look before a plain rename will do
    where neither exists. Raises FileExistsError when the name is taken, another OSError when it cannot be.
    """
    try:
        os.link(temporary, full)
    except FileExistsError:
        # A lost reply (NFS) repeats a link that had worked: then both names are one file.
        if not _same_file(temporary, full):
            raise
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        _rename(temporary, full, error, alone=alone)


def _rename(temporary: Path, full: Path, no_link: OSError, *, alone: bool) -> None:
    try:
        rename_without_replacing(temporary, full)
    except OSError as error:
        if error.errno not in _NO_RENAMES:
            raise
        if not alone:
            raise no_link from error
        if os.path.lexists(full):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(full)) from None
        temporary.rename(full)


def rename_without_replacing(source: Path, target: Path) -> None:
    """`renameat2` with RENAME_NOREPLACE; OSError with ENOSYS where the system has no such call."""
    call = _renameat2()
    if call is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), str(target))
    if call(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), _NOREPLACE) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(target))


@cache
def _renameat2() -> Any:
    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        return None
    call.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint]
    return call


def _same_file(one: Path, other: Path) -> bool:
    try:
        a, b = os.lstat(one), os.lstat(other)
    except OSError:
        return False
    return (a.st_dev, a.st_ino) == (b.st_dev, b.st_ino)

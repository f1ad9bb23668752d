"""Environment of a launch: `captured.<attempt>.json`, written before its first epoch is saved.

    argv, directory, python, packages, host     of the process of rank 0
    code                                        code id, location of the source, git metadata
    config, config_id, overrides                of the configuration, if any
    params                                      hyper-parameters passed by the program, else None
    torch, world                                from the runner
    config/<name>                               the configuration's files as they were read
    code/<code id>.zip                          the source, once per code id
    code/<digest>.diff                          difference between git's commit and the source

`run.json` has the run's identity and is written once; everything that may differ between launches is here.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import field
from functools import lru_cache
from pathlib import Path
from typing import Any

from torchrelay.errors import DamagedError, StorageError, UsageError
from torchrelay.metadata.code.archive import is_plain
from torchrelay.metadata.fs import finite, read_json, replace_file, write_json
from torchrelay.metadata.run_directory import MASK, command_words, names_secret, without_password
from torchrelay.records import dataclass

FORMAT = {"major": 1, "minor": 0, "features": []}
_FILE = re.compile(r"captured\.(0|[1-9][0-9]*)\.json")
_CODE_ID = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Given:
    """Configuration of a launch: its files as read, by name, and the digest of the identifying part."""

    config: Mapping[str, bytes] = field(default_factory=dict)
    config_id: str | None = None
    overrides: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in self.config:
            if not is_plain(name):
                raise UsageError(f"invalid name of a configuration file: {name!r}")


_PARAMS_BYTES = 256 << 10


def params_of(given: Any) -> dict[str, Any] | None:
    """Convert hyper-parameters (a mapping, Namespace or dataclass object) to JSON values; None stays None.

    Other values become texts. Passwords in URLs are masked, and texts named as secrets (`names_secret`).
    Raises UsageError, also for more than 256 kB.
    """
    if given is None:
        return None
    if isinstance(given, argparse.Namespace):
        given = vars(given)
    elif dataclasses.is_dataclass(given) and not isinstance(given, type):
        given = {one.name: getattr(given, one.name) for one in dataclasses.fields(given)}
    if not isinstance(given, Mapping):
        raise UsageError(
            f"invalid params {given!r:.80}: expected a mapping, the Namespace of argparse, or a dataclass"
        )
    try:
        found: dict[str, Any] = _plain_value(given)
        text = json.dumps(found)
    except Exception as error:  # a cycle, or a value whose own code fails
        raise UsageError(
            f"params cannot be recorded: {type(error).__name__}: {error}; pass names with plain values"
        ) from error
    if len(text) > _PARAMS_BYTES:
        raise UsageError("params are larger than 256 kB: pass hyper-parameters only, without data")
    return found


def _plain_value(value: Any, *, secret: bool = False) -> Any:
    if isinstance(value, Mapping):
        return {
            str(name): _plain_value(one, secret=secret or names_secret(str(name)))
            for name, one in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_plain_value(one, secret=secret) for one in value]
    if value is None or type(value) in (bool, int):
        return value
    if type(value) is float:
        return finite(value)
    return MASK if secret and str(value) else without_password(str(value))


def command() -> dict[str, Any]:
    """Return the current command line and directory of the process, which a program may change."""
    return {
        "argv": command_words(),
        "directory": os.getcwd(),  # noqa: PTH109 - the text
    }


def surroundings() -> dict[str, Any]:
    """Describe the environment of the process, without environment variables, which may be secret."""
    return {
        "executable": sys.executable,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": socket.gethostname(),
        "packages": packages(),
    }


def packages() -> dict[str, str]:
    """Return installed distributions and versions by name; the first on the path counts, as in imports.

    Cached while the directories of the path do not change, because reading hundreds of files is slow.
    """
    return dict(_packages(tuple((place, _changed(place)) for place in sys.path)))


def _changed(place: str) -> int:
    try:
        return os.stat(place or os.curdir).st_mtime_ns  # noqa: PTH116 - sys.path has texts
    except OSError:
        return 0


@lru_cache(maxsize=1)
def _packages(_path: tuple[tuple[str, int], ...]) -> dict[str, str]:
    found: dict[str, str] = {}
    for one in importlib.metadata.distributions():
        text = one.read_text("METADATA") or one.read_text("PKG-INFO") or ""
        head: dict[str, str] = {}  # only that: parsing complete metadata would take 0.1 s
        for line in text[:4096].splitlines():
            name, colon, value = line.partition(":")
            if not colon or {"name", "version"} <= head.keys():
                break
            head.setdefault(name.lower(), value.strip())
        if "name" in head:
            found.setdefault(head["name"], head.get("version", ""))
    return dict(sorted(found.items(), key=lambda item: item[0].lower()))


def write_capture(run: Path, attempt: int, content: Mapping[str, Any]) -> Path:
    """Write the record of a launch under the next free number; raises StorageError."""
    taken = {number for number, _ in _files(run)}
    number = attempt
    while number in taken:
        number += 1
    path = run / f"captured.{number}.json"
    write_json(path, {"format": FORMAT, "attempt": attempt, "time": round(time.time(), 3), **content})
    return path


def write_config(run: Path, given: Given, attempt: int) -> str | None:
    """Write the files to `config/`, or `config/attempt_N/` if an earlier launch had others."""
    if not given.config:
        return None
    for folder in ("config", f"config/attempt_{attempt}"):
        there = {name: _read(run / folder / name) for name in given.config}
        if all(there[name] in (None, data) for name, data in given.config.items()):
            break
    for name, data in given.config.items():
        if there[name] is None or there[name] != data:
            _store(run / folder / name, data)
    return folder


def write_diff(run: Path, diff: bytes) -> str:
    """Write a diff to `code/` under its digest and return its name; raises StorageError."""
    name = f"code/{hashlib.sha256(diff).hexdigest()[:16]}.diff"
    if not (run / name).is_file():
        _store(run / name, diff)
    return name


def _store(path: Path, data: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"cannot create {path.parent}: {error.strerror}") from error
    replace_file(path, data)


def captures(run: Path) -> list[dict[str, Any]]:
    """Return the records of a run's launches, the newest last; raises DamagedError, StorageError."""
    return [{**(read_json(path) or {}), "number": number} for number, path in _files(run)]


def config_texts(run: Path, captured: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the configuration files of a launch by name; raises StorageError."""
    folder, names = captured.get("config"), captured.get("config_files")
    if not (isinstance(names, list) and is_plain(folder)):
        return {}
    found = {name: _read(run / str(folder) / name) for name in names if is_plain(name)}
    return {name: data for name, data in found.items() if data is not None}


def code_id_of(captured: Mapping[str, Any]) -> str | None:
    """Return the code id of a launch; None if its source was not archived. Raises DamagedError."""
    code = captured.get("code")
    found = code.get("id") if isinstance(code, dict) else None
    if found is None:
        return None
    if not (isinstance(found, str) and _CODE_ID.fullmatch(found)):
        raise DamagedError(f"captured.{captured.get('number')}.json: {found!r:.80} is not a code id")
    return found


def capture_with_code(run: Path, attempt: int | None = None) -> dict[str, Any]:
    """Return launch `attempt`, or the newest one with archived source; raises UsageError."""
    if not run.is_dir():
        raise UsageError(f"run directory {run} does not exist")
    found = captures(run)
    chosen: list[dict[str, Any]] = [one for one in found if attempt is None or one["number"] == attempt]
    if not found:
        raise UsageError(f"{run} has no records of its launches (captured.0.json)")
    if not chosen:
        there = ", ".join(str(one["number"]) for one in found)
        raise UsageError(f"{run} has no launch {attempt}; known are {there}")
    if archived := [one for one in chosen if code_id_of(one) is not None]:
        return archived[-1]
    code = chosen[-1].get("code")
    why = code.get("why", "unknown reason") if isinstance(code, dict) else "unknown reason"
    raise UsageError(f"the source of {run} was not archived: {why}")


def _files(run: Path) -> list[tuple[int, Path]]:
    try:
        names = os.listdir(run)
    except OSError as error:
        raise StorageError(f"cannot list {run}: {error.strerror}") from error
    return sorted((int(match[1]), run / name) for name in names if (match := _FILE.fullmatch(name)))


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror}") from error

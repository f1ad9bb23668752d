"""What a start of a run was: `captured.<attempt>.json`, written before its first epoch is saved.

    argv, directory, python, packages, host     of the process of rank 0
    code                                        the code id, where the source lay, what git knew of it
    config, config_id, overrides                of the configuration, where there was one
    params                                      hyper-parameters that the program passed, else None
    torch, world                                told by the runner
    config/<name>                               the configuration's texts, as they were read
    code/<code id>.zip                          the source, once per code id
    code/<digest>.diff                          what git's commit and the source differed in

`run.json` is the run's identity and written once; what may differ between starts stands here, a file each.
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
from torchrelay.metadata.run_directory import without_password
from torchrelay.records import dataclass

FORMAT = {"major": 1, "minor": 0, "features": []}
_FILE = re.compile(r"captured\.(0|[1-9][0-9]*)\.json")
_CODE_ID = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Given:
    """What whoever starts the run says of its configuration.

    `config` has texts by their names below `config/`, as they were when they were read; `config_id` is the
    digest of what identifies the run, `overrides` are those of the command line.
    """

    config: Mapping[str, bytes] = field(default_factory=dict)
    config_id: str | None = None
    overrides: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in self.config:
            if not is_plain(name):
                raise UsageError(f"a configuration's file cannot be called {name!r}")


_PARAMS_BYTES = 256 << 10


def params_of(given: Any) -> dict[str, Any] | None:
    """Hyper-parameters as JSON can hold them; None stays None.

    Args:
        given: A mapping by name, an `argparse.Namespace`, or a dataclass object. Values that JSON does not
            have are stored as text, and passwords in URLs are masked.

    Raises:
        UsageError: It is none of these, or its JSON is longer than 256 kB.
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
    found: dict[str, Any] = _plain_value(given)
    if len(json.dumps(found)) > _PARAMS_BYTES:
        raise UsageError("params are larger than 256 kB: pass hyper-parameters only, without data")
    return found


def _plain_value(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _plain_value(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain_value(one) for one in value]
    if value is None or type(value) in (bool, int):
        return value
    return finite(value) if type(value) is float else without_password(str(value))


def command() -> dict[str, Any]:
    """How the process was called, as it is now: a program may change both."""
    return {
        "argv": [without_password(word) for word in sys.argv],
        "directory": os.getcwd(),  # noqa: PTH109 - the text
    }


def surroundings() -> dict[str, Any]:
    """What the process runs on, without its environment variables, which may be secrets."""
    return {
        "executable": sys.executable,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": socket.gethostname(),
        "packages": packages(),
    }


def packages() -> dict[str, str]:
    """Installed distributions and their versions, by name; the first on the path counts, as in imports.

    Looked for again only where a directory of the path has changed: the files of some hundred distributions
    take more time than all else that the start of a run does.
    """
    return dict(_packages(tuple((place, _changed(place)) for place in sys.path)))


def _changed(place: str) -> int:
    try:
        return os.stat(place or os.curdir).st_mtime_ns  # noqa: PTH116 - sys.path has texts
    except OSError:
        return 0


@lru_cache(maxsize=1)
def _packages(path: tuple[tuple[str, int], ...]) -> dict[str, str]:
    found: dict[str, str] = {}
    for one in importlib.metadata.distributions():
        head = _head(one.read_text("METADATA") or one.read_text("PKG-INFO") or "")
        if "name" in head:
            found.setdefault(head["name"], head.get("version", ""))
    return dict(sorted(found.items(), key=lambda item: item[0].lower()))


def _head(text: str) -> dict[str, str]:
    """The first two fields that matter: parsing whole descriptions would take a tenth of a second."""
    found: dict[str, str] = {}
    for line in text[:4096].splitlines():
        name, colon, value = line.partition(":")
        if not colon or len(found) == 2:
            break
        if name.lower() in ("name", "version"):
            found.setdefault(name.lower(), value.strip())
    return found


def write_capture(run: Path, attempt: int, content: Mapping[str, Any]) -> Path:
    """Store what a start was; raises StorageError. Never written over: a number that is taken is passed."""
    taken = {number for number, _ in _files(run)}
    number = attempt
    while number in taken:
        number += 1
    path = run / f"captured.{number}.json"
    write_json(path, {"format": FORMAT, "attempt": attempt, "time": round(time.time(), 3), **content})
    return path


def write_config(run: Path, given: Given, attempt: int) -> str | None:
    """Store the texts below `config/`; where others of an earlier start lie there, below `config/attempt_N/`.

    Returns the folder; None where there are no texts. Raises StorageError.
    """
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
    """Store a difference below `code/` under its digest; returns its name. Raises StorageError."""
    name = f"code/{hashlib.sha256(diff).hexdigest()[:16]}.diff"
    if not (run / name).is_file():
        _store(run / name, diff)
    return name


def _store(path: Path, data: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"cannot make {path.parent}: {error.strerror}") from error
    replace_file(path, data)


def captures(run: Path) -> list[dict[str, Any]]:
    """What the starts of a run were, the newest last; raises DamagedError, StorageError."""
    return [{**(read_json(path) or {}), "number": number} for number, path in _files(run)]


def config_texts(run: Path, captured: Mapping[str, Any]) -> dict[str, bytes]:
    """The texts of a start's configuration by name; raises StorageError."""
    folder, names = captured.get("config"), captured.get("config_files")
    if not (isinstance(names, list) and is_plain(folder)):
        return {}
    found = {name: _read(run / str(folder) / name) for name in names if is_plain(name)}
    return {name: data for name, data in found.items() if data is not None}


def code_id_of(captured: Mapping[str, Any]) -> str | None:
    """The code id of a start; None where its source was not archived. Raises DamagedError."""
    code = captured.get("code")
    found = code.get("id") if isinstance(code, dict) else None
    if found is None:
        return None
    if not (isinstance(found, str) and _CODE_ID.fullmatch(found)):
        raise DamagedError(f"captured.{captured.get('number')}.json: {found!r:.80} is no code id")
    return found


def capture_with_code(run: Path, attempt: int | None = None) -> dict[str, Any]:
    """The newest start whose source was archived, or this one; raises UsageError where there is none."""
    if not run.is_dir():
        raise UsageError(f"there is no run directory {run}")
    found = captures(run)
    chosen: list[dict[str, Any]] = [one for one in found if attempt is None or one["number"] == attempt]
    if not found:
        raise UsageError(f"{run} has no record of its starts (captured.0.json): nothing tells what it ran")
    if not chosen:
        there = ", ".join(str(one["number"]) for one in found)
        raise UsageError(f"{run} has no start {attempt}; it has {there}")
    archived = [one for one in chosen if code_id_of(one) is not None]
    if archived:
        return archived[-1]
    code = chosen[-1].get("code")
    why = code.get("why", "not said why") if isinstance(code, dict) else "not said why"
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

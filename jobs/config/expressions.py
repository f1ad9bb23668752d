"""Parse expressions in texts (`{workspace}`, `${key.path}`, `${env:NAME}`), and read values of upstream runs.

`$$` before a brace means `$`, `{{workspace}}` means the characters `{workspace}`; all other braces are kept.

A run stores copies of its upstream runs in `lineage/<alias>/`, laid out like run directories. So the same
code reads the upstream's directory in a new run, and the copy in a resumed or deployed one.
"""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Iterator, Sequence
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import Any

from torchrelay.errors import UsageError
from torchrelay.jobs.config.schema import key_at
from torchrelay.jobs.config.tree import (
    Missing,
    find,
    hint,
    leaves,
    nearest,
    path_of,
    recovered,
    value_at,
    with_leaves,
)
from torchrelay.jobs.runtime import split_run
from torchrelay.records import dataclass

_TOKEN = re.compile(r"\$\$(?=\{)|\$\{(?P<inside>[^{}]*)\}|\$\{|\{\{workspace\}\}|\{workspace\}")
_ENV = re.compile(r"env:(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?:,(?P<default>.*))?", re.DOTALL)


class WorkspaceToken(Enum):
    """`{workspace}` in a text."""

    WORKSPACE = "{workspace}"


@dataclass(frozen=True)
class Reference:
    """`${key.path}`; `written` is the token."""

    path: str
    written: str


@dataclass(frozen=True)
class Variable:
    """`${env:NAME,default}`."""

    name: str
    default: str | None
    written: str


@dataclass(frozen=True)
class Unreadable:
    """An invalid expression; `message` is the reason."""

    message: str
    written: str


Part = str | WorkspaceToken | Reference | Variable | Unreadable


def parts_of(text: str) -> list[Part]:
    """Split a text into literals and expressions, without empty parts."""
    return [part for part in _parts(text) if part != ""]


def _parts(text: str) -> Iterator[Part]:
    at = 0
    for found in _TOKEN.finditer(text):
        yield text[at : found.start()]
        at = found.end()
        sign = found[0]
        if sign == "$$":
            yield "$"
        elif sign == WorkspaceToken.WORKSPACE.value:
            yield WorkspaceToken.WORKSPACE
        elif sign == "{{workspace}}":
            yield WorkspaceToken.WORKSPACE.value
        elif sign == "${":
            yield Unreadable(
                "`${` is not closed, or has a brace inside; write `$${` for the characters", sign
            )
        elif variable := _ENV.fullmatch(inside := found["inside"]):
            yield Variable(variable["name"], variable["default"], sign)
        elif not inside.strip() or ":" in inside:
            yield Unreadable("expected `${key.path}`, `${env:NAME}` or `${env:NAME,default}`", sign)
        else:
            yield Reference(inside.strip(), sign)
    yield text[at:]


def written(parts: list[str | WorkspaceToken]) -> str:
    """Return the text that `parts_of` splits into these parts."""
    joined: list[str | WorkspaceToken] = []
    for part in parts:
        if joined and isinstance(part, str) and isinstance(last := joined[-1], str):
            joined[-1] = last + part
        else:
            joined.append(part)
    return "".join(_escaped(joined, at) for at in range(len(joined)))


def _escaped(parts: list[str | WorkspaceToken], at: int) -> str:
    before, part, after = ["", *parts, ""][at : at + 3]
    if isinstance(part, WorkspaceToken):  # `{{workspace}}` is a literal
        is_inside = str(before).endswith("{") and str(after).startswith("}")
        return "${workspace}" if is_inside else WorkspaceToken.WORKSPACE.value
    text, brace = (
        part.replace(WorkspaceToken.WORKSPACE.value, "{{workspace}}"),
        "{" if isinstance(after, WorkspaceToken) else "",
    )
    return re.sub(r"\$(?=\{)", "$$", text + brace).removesuffix(brace)


UPSTREAM, LINEAGE, STAGE = "upstream", "lineage", "stage.json"
_CAPTURED = re.compile(r"captured\.([0-9]{1,9})\.json")
_FOLDER = re.compile(r"config(/attempt_[0-9]{1,9})?")


class UpstreamValueError(UsageError):
    """A missing upstream or value of its configuration; `near` is the suggested name."""

    def __init__(self, message: str, near: str | None = None) -> None:
        super().__init__(message)
        self.near = near


def stage_folder(alias: str, run: str | None, own: Sequence[str | Path]) -> Path:
    """Return the directory with the configuration and source of an upstream, else raise UpstreamValueError.

    `run` is its absolute path or URL (None: unknown), `own` are the runs that may be built on it. A copy of
    the same run in one of them is preferred to the upstream's directory. If that is gone, `own` may also be
    directories of runs, whose newest copy is used.
    """
    path = None if run is None else split_run(run)[0]
    there = path is not None and os.path.isdir(path)  # noqa: PTH112 - False for a name too long
    for folder in (Path(one, LINEAGE, alias) for one in own):
        if not os.path.isfile(folder / STAGE):  # noqa: PTH113
            continue
        copied = _json(folder / STAGE).get("path")
        if not there or os.path.normpath(str(copied)) == os.path.normpath(str(path)):
            return folder
    if there:
        return Path(str(path))
    copies = [
        Path(found).parent
        for one in own
        if os.path.isdir(one)  # noqa: PTH112
        for found in glob.glob(f"{glob.escape(str(Path(one)))}/*/{LINEAGE}/{glob.escape(alias)}/{STAGE}")  # noqa: PTH207
    ]
    if copies:
        return max(copies, key=lambda one: (one / STAGE).stat().st_mtime_ns)
    raise UpstreamValueError(_not_there(alias, path, own))


@lru_cache(maxsize=64)
def _parsed(path: str, _changed: tuple[int, int]) -> dict[str, Any]:
    """Read the values of a resolved configuration, cached while the file does not change."""
    try:
        found = recovered(Path(path).read_bytes(), path)
    except OSError as error:
        raise UpstreamValueError(f"cannot read {path}: {error.strerror}") from None
    if found.tree is None or found.problems:
        raise UpstreamValueError(
            f"{path} is damaged ({found.problems[0]}): restore it from a copy of the run"
        )
    value = found.tree.value
    workspace = _literal(str(value.get("workspace", "")), "")
    return {**with_leaves(value, lambda one: _literal(one, workspace)), "workspace": workspace}


def configuration(folder: Path) -> dict[str, Any]:
    """Return all configuration values of the last launch of a run, or of its copy in `lineage/`."""
    for path in _resolved_forms(folder):
        at = path.stat()
        return _parsed(str(path), (at.st_mtime_ns, at.st_size))
    raise UpstreamValueError(
        f"{folder} has no configuration: only a run of a YAML file has values; the source of any run is what "
        "torchrelay.load_upstream gives"
    )


def value_of(alias: str, folder: Path, path: str) -> Any:
    """Return a value of an upstream by its dotted path; `upstream.NAME.` is the upstream's own upstream.

    A path that does not begin with a key of the schema, such as `width`, is looked up in `hyper_parameters`.
    """
    words = path.split(".")
    if words[0] == UPSTREAM and len(words) > 2 and key_at((UPSTREAM, words[1], words[2])) is None:
        inner = folder / LINEAGE / words[1]
        if os.path.isdir(inner):  # noqa: PTH112
            return value_of(f"{alias}.{UPSTREAM}.{words[1]}", inner, ".".join(words[2:]))
    values = configuration(folder)
    found = find(values, path)
    if isinstance(found, Missing) and key_at((words[0],)) is None:
        inside = find(values, f"hyper_parameters.{path}")
        found = found if isinstance(inside, Missing) else inside
    if not isinstance(found, Missing):
        return value_at(values, found)
    known = [path_of(values, where) for where in leaves(values, ())]
    near = nearest(path, known) or nearest(f"hyper_parameters.{path}", known)
    remedy = f"did you mean `{near}`?" if near else hint(found.rest[0], found.known)
    raise UpstreamValueError(
        f"upstream `{alias}` has no `{path}` in its configuration, {folder}; {remedy}", near
    )


def _resolved_forms(folder: Path) -> Iterator[Path]:
    """Return the resolved configurations of its launches, the newest first."""
    try:
        names = os.listdir(folder)
    except OSError as error:
        raise UpstreamValueError(f"cannot list {folder}: {error.strerror}") from None
    numbers = sorted((int(match[1]) for name in names if (match := _CAPTURED.fullmatch(name))), reverse=True)
    for number in numbers:
        place = _json(folder / f"captured.{number}.json").get("config")
        if (
            isinstance(place, str)
            and _FOLDER.fullmatch(place)
            and (folder / place / "resolved.yaml").is_file()
        ):
            yield folder / place / "resolved.yaml"


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise UpstreamValueError(f"cannot read {path}: {error.strerror}") from None
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise UpstreamValueError(f"{path} is damaged: restore it from a copy of the run")
    return found


def _literal(text: Any, workspace: str) -> Any:
    """Expand the only expression of resolved texts, `{workspace}`."""
    if not isinstance(text, str):
        return text
    return "".join(
        part
        if isinstance(part, str)
        else workspace
        if isinstance(part, (WorkspaceToken, Reference))
        else part.written
        for part in parts_of(text)
    )


def _not_there(alias: str, path: str | None, own: Sequence[str | Path]) -> str:
    looked = f", and no copy of it in {' or '.join(str(Path(one, LINEAGE)) for one in own)}" if own else ""
    if path is None:
        return f"upstream `{alias}`: no run is given{looked}: use upstream="
    if "://" in path:
        return f"upstream `{alias}`: cannot read a configuration at a URL: copy {path} here{looked}"
    return f"upstream `{alias}`: the run {path} does not exist{looked}: train that stage first"

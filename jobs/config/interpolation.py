"""Expand the expressions in all texts of a tree, also with values of upstream runs; report unresolved ones.

Expressions are `{workspace}`, `${key.path}` and `${env:NAME}`. `$$` before a brace means `$`, `{{workspace}}`
means the characters `{workspace}`; all other braces are kept. A text that consists of one expression becomes
the value with its type. An environment variable is parsed as a YAML scalar, unless the schema expects a text.

A run stores copies of its upstream runs in `lineage/<alias>/`, laid out like run directories. So the same
code reads the upstream's directory in a new run, and the copy in a resumed or deployed one.
"""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from torchrelay.errors import UsageError
from torchrelay.jobs.config.schema import form_at, is_infer, key_at
from torchrelay.jobs.config.section_types import local_path, split_weights
from torchrelay.jobs.config.tree import (
    ConfigProblem,
    ConfigTree,
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
from torchrelay.jobs.config.yaml_reader import LIMIT_BYTES, LIMIT_DEPTH, LIMIT_VALUES, NotOne, Where, plain
from torchrelay.jobs.runtime import split_run
from torchrelay.records import dataclass

_TOKEN = re.compile(r"\$\$(?=\{)|\$\{(?P<inside>[^{}]*)\}|\$\{|\{\{workspace\}\}|\{workspace\}")
_ENV = re.compile(r"env:(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?:,(?P<default>.*))?", re.DOTALL)


@dataclass(frozen=True)
class Expression:
    """An expression as `written`: the key at `path`, a `variable` with its `default`, or else an `error`."""

    written: str
    path: str | None = None
    variable: str | None = None
    default: str | None = None
    error: str = ""


WORKSPACE = Expression("{workspace}", "workspace")
Part = str | Expression
_SIGNS: dict[str, Part] = {"$$": "$", "{workspace}": WORKSPACE, "{{workspace}}": "{workspace}"}


def parts_of(text: str) -> list[Part]:
    """Split a text into literals and expressions, without empty parts."""
    parts: list[Part] = []
    at = 0
    for found in _TOKEN.finditer(text):
        parts += [text[at : found.start()], _part(found)]
        at = found.end()
    return list(filter(None, [*parts, text[at:]]))


def _part(found: re.Match[str]) -> Part:
    sign, inside = found[0], found["inside"] or ""
    if sign in _SIGNS:
        return _SIGNS[sign]
    if sign == "${":
        why = "`${` is not closed, or has a brace inside; write `$${` for the characters"
        return Expression(sign, error=why)
    if variable := _ENV.fullmatch(inside):
        return Expression(sign, variable=variable["name"], default=variable["default"])
    if not inside.strip() or ":" in inside:
        return Expression(sign, error="expected `${key.path}`, `${env:NAME}` or `${env:NAME,default}`")
    return Expression(sign, inside.strip())


def written(parts: Sequence[Part]) -> str:
    """Return the text that `parts_of` splits into these literals and workspaces."""
    joined: list[Part] = [""]
    for part in parts:
        if isinstance(part, str) and isinstance(last := joined[-1], str):
            joined[-1] = last + part
        else:
            joined.append(part)
    return "".join(map(_escaped, ["", *joined], joined, [*joined[1:], ""]))


def _escaped(before: Part, part: Part, after: Part) -> str:
    if isinstance(part, Expression):  # `{{workspace}}` is a literal
        is_inside = str(before).endswith("{") and str(after).startswith("}")
        return "${workspace}" if is_inside else WORKSPACE.written
    brace = "{" if isinstance(after, Expression) else ""
    text = part.replace(WORKSPACE.written, "{{workspace}}") + brace
    return re.sub(r"\$(?=\{)", "$$", text).removesuffix(brace)


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
    looked = f", and no copy of it in {' or '.join(str(Path(one, LINEAGE)) for one in own)}" if own else ""
    why = f"the run {path} does not exist{looked}: train that stage first"
    if path is None:
        why = f"no run is given{looked}: use upstream="
    elif "://" in path:
        why = f"cannot read a configuration at a URL: copy {path} here{looked}"
    raise UpstreamValueError(f"upstream `{alias}`: {why}")


@lru_cache(maxsize=64)
def _parsed(path: str, _changed: tuple[int, int]) -> dict[str, Any]:
    """Read the values of a resolved configuration, cached while the file does not change."""
    found = recovered(_bytes_of(Path(path)), path)
    if found.tree is None or found.problems:
        why = f"{path} is damaged ({found.problems[0]})"
        raise UpstreamValueError(f"{why}: restore it from a copy of the run")
    value = found.tree.value
    workspace = _literal(str(value.get("workspace", "")), "")
    return {**with_leaves(value, lambda one: _literal(one, workspace)), "workspace": workspace}


def configuration(folder: Path) -> dict[str, Any]:
    """Return all configuration values of the last launch of a run, or of its copy in `lineage/`."""
    try:
        names = os.listdir(folder)
    except OSError as error:
        raise UpstreamValueError(f"cannot list {folder}: {error.strerror}") from None
    numbers = sorted((int(match[1]) for name in names if (match := _CAPTURED.fullmatch(name))), reverse=True)
    for number in numbers:
        place = _json(folder / f"captured.{number}.json").get("config")
        if isinstance(place, str) and _FOLDER.fullmatch(place):
            path = folder / place / "resolved.yaml"
            if path.is_file():
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


def _bytes_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UpstreamValueError(f"cannot read {path}: {error.strerror}") from None


def _json(path: Path) -> dict[str, Any]:
    found = None
    with suppress(ValueError):
        found = json.loads(_bytes_of(path))
    if not isinstance(found, dict):
        raise UpstreamValueError(f"{path} is damaged: restore it from a copy of the run")
    return found


def _literal(text: Any, workspace: str) -> Any:
    """Expand the only expression of resolved texts, `{workspace}`."""
    if not isinstance(text, str):
        return text
    parts = parts_of(text)
    return "".join(one if isinstance(one, str) else workspace if one.path else one.written for one in parts)


LIMIT_CHAIN = 50
_WORKSPACE: Where = ("workspace",)
_BROKEN: Any = object()


@dataclass(frozen=True)
class Expanded:
    """Result of the expansion; `portable` still has `{workspace}`, `referred` has targets of references."""

    tree: ConfigTree
    portable: dict[str, Any]
    workspace: Path
    referred: frozenset[Where] = frozenset()


@dataclass(frozen=True)
class RunPlace:
    """Location of the runs if it is not that of the configuration: `run` is one, `runs` their directory."""

    run: str | None = None
    runs: str | None = None


@dataclass(frozen=True)
class _Text:
    """A text of literals and the workspace; the type of a `variable` depends on where it is used."""

    parts: tuple[Part, ...]
    variable: str | None = None

    def at(self, workspace: str) -> str:
        """Return the text with the workspace replaced."""
        return "".join(one if isinstance(one, str) else workspace for one in self.parts)


def expanded(
    tree: ConfigTree, folder: Path, environ: Mapping[str, str], place: RunPlace | None = None
) -> tuple[Expanded, list[ConfigProblem]]:
    """Expand a tree and return the problems; `folder` is the base of a relative workspace."""
    work = _Interpolation(tree, environ, place or RunPlace())
    begins = work.node(_WORKSPACE) if "workspace" in tree.value else None
    text = begins.at("") if isinstance(begins, _Text) else "."
    workspace = Path(os.path.normpath(folder / os.path.expanduser(text)))  # noqa: PTH111 - as in local_path
    work.workspace = workspace
    top = work.node(())
    value, portable = _rendered(top, str(workspace)), _rendered(top, None)
    if isinstance(begins, _Text):
        value["workspace"] = str(workspace)
    portable["workspace"] = written([str(workspace)])
    if isinstance(begins, _Text) and not os.path.isdir(workspace):  # noqa: PTH112 - False for a name too long
        work.wrong(_WORKSPACE, f"directory {workspace} does not exist")
    done = ConfigTree(value, tree.origins, tree.keys, tree.broken | work.broken)
    return Expanded(done, portable, workspace, frozenset(work.referred)), work.problems


@dataclass
class _Interpolation:
    """State of the expansion. Nodes are values with every text as a _Text; each is expanded once."""

    tree: ConfigTree
    environ: Mapping[str, str]
    place: RunPlace
    workspace: Path | None = None
    problems: list[ConfigProblem] = field(default_factory=list)
    broken: set[Where] = field(default_factory=set)
    referred: set[Where] = field(default_factory=set)
    _done: dict[Where, Any] = field(default_factory=dict)
    _doing: list[Where] = field(default_factory=list)
    _values: int = 0
    _characters: int = 0

    def wrong(self, where: Where, message: str, token: str = "", near: str | None = None) -> Any:
        """Report the text at `where`, or a token in it; returns _BROKEN."""
        origin = self.tree.origin(where)
        at = origin.text.find(token, origin.place.column - 1) if token else -1
        if at >= 0:  # the token must be visible in the shown line
            origin = replace(origin, place=replace(origin.place, column=at + 1))
        self.problems.append(ConfigProblem(origin, self.tree.path(where), message, near))
        self.broken.add(where)
        return _BROKEN

    def node(self, where: Where) -> Any:
        """Return the expanded node at a location."""
        if where not in self._done:
            self._doing.append(where)
            value = value_at(self.tree.value, where)
            if where in self.tree.broken:
                value = _BROKEN
            elif isinstance(value, dict):
                value = {name: self.node((*where, name)) for name in value}
            elif isinstance(value, list):
                value = [self.node((*where, at)) for at in range(len(value))]
            elif isinstance(value, str):
                value = self._of_text(parts_of(value), where)
            self._done[where] = value
            self._doing.pop()
        return self._done[where]

    def _of_text(self, parts: Sequence[Part], where: Where) -> Any:
        if len(parts) == 1 and isinstance(parts[0], Expression) and parts[0] is not WORKSPACE:
            return self._typed(self._node_of(parts[0], where), where)
        inner = [self._inner(part, where) for part in parts]
        found = [one for some in inner for one in some or ()]
        self._characters += sum(len(one) for one in found if isinstance(one, str))
        if self._characters > LIMIT_BYTES:
            return self.wrong(where, f"all texts together are longer than {LIMIT_BYTES >> 20} MiB, the limit")
        return _BROKEN if None in inner else _Text(tuple(found))

    def _inner(self, part: Part, where: Where) -> tuple[Part, ...] | None:
        """Expand one part of a longer text; None after a reported problem."""
        if isinstance(part, str):
            return (part,)
        node = self._node_of(part, where)
        if isinstance(node, _Text):
            return node.parts
        if node is None or isinstance(node, (dict, list)):
            what = "has no value" if node is None else "is not a single value"
            why = f"`{part.written}` {what}, so it cannot be part of a text"
            node = self.wrong(where, why, part.written)
        self.broken |= {where} if node is _BROKEN else set()
        return None if node is _BROKEN else (_shown(node),)

    def _typed(self, node: Any, where: Where) -> Any:
        """Return the node of a text that is one expression, with the type that the schema expects."""
        if node is _BROKEN:
            self.broken.add(where)
            return node
        textual = (form := form_at(where)) is not None and form.textual
        if isinstance(node, _Text) and node.variable is not None:
            word = node.variable if textual else plain(node.variable)
            node = _Text(node.parts) if isinstance(word, (str, NotOne)) else word
        elif textual and isinstance(node, (bool, int, float)):
            node = _Text((_shown(node),))
        return node if self._affordable(node, where) else _BROKEN

    def _node_of(self, part: Expression, where: Where) -> Any:
        if part.variable is not None:
            text = self.environ.get(part.variable, part.default)
            if text is None:
                return self.wrong(where, f"the environment has no {part.variable}: set it", part.written)
            if not text.isascii() and text.encode(errors="ignore").decode() != text:
                why = f"{part.variable} of the environment is not valid UTF-8"
                return self.wrong(where, why, part.written)
            return _Text((text,), text)
        if part.path is None:
            return self.wrong(where, part.error, part.written)
        if part.path == "workspace":
            if _WORKSPACE in self._doing:
                return self._cycle(_WORKSPACE, where, part.written)
            return _Text((WORKSPACE,))
        target = find(self.tree.value, part.path)
        if isinstance(target, Missing):
            upstream = len(target.where) == 2 and target.where[0] == UPSTREAM
            if upstream and key_at((*target.where, target.rest[0])) is None:
                return self._of_upstream(target, part, where)
            spec = key_at((*target.where, *target.rest))
            if spec is not None and spec.default is not None and not isinstance(spec.default, (dict, list)):
                return _Text((spec.default,)) if isinstance(spec.default, str) else spec.default
            word, known = target.rest[0], target.known
            message = f"`{part.path}` is not in the configuration; {hint(word, known)}".rstrip("; ")
            return self.wrong(where, message, part.written, nearest(word, known))
        if target in self._doing:
            return self._cycle(target, where, part.written)
        if len(self._doing) > LIMIT_CHAIN:
            return self.wrong(where, f"a chain of more than {LIMIT_CHAIN} references", part.written)
        self.referred.add(target)
        return self.node(target)

    def _of_upstream(self, missing: Missing, part: Expression, where: Where) -> Any:
        """Return the node of a value of an upstream's configuration."""
        if self.workspace is None:
            message = "the workspace cannot come from an upstream, whose path depends on it"
            return self.wrong(where, message, part.written)
        short = isinstance(value_at(self.tree.value, missing.where), str)
        run = missing.where if short else (*missing.where, "run")
        if run in self._doing:
            return self._cycle(run, where, part.written)
        text = self._text(run)
        if text is None:  # reported at its own location
            self.broken.add(where)
            return _BROKEN
        alias, path = str(missing.where[1]), text if "://" in text else str(local_path(text, self.workspace))
        own, folders = self._own_runs(self.workspace), dict[Path, None]()
        for one in own:
            with suppress(UpstreamValueError):
                folders[stage_folder(alias, path, [one])] = None
        try:  # each run of this configuration uses one of them
            chosen = list(folders) or [stage_folder(alias, path, own)]
            found = [(folder, value_of(alias, folder, ".".join(missing.rest))) for folder in chosen]
        except UpstreamValueError as error:
            return self.wrong(where, str(error), part.written, error.near)
        (folder, value), *others = found
        for other, differing in others:
            if differing != value:
                message = f"`{part.path}` is {value!r:.40} in {folder} and {differing!r:.40} in {other}"
                return self.wrong(where, f"{message}: run one profile at a time with `mode`", part.written)
        return with_leaves(value, lambda one: _Text((one,)) if isinstance(one, str) else one)  # literal ones

    def _own_runs(self, workspace: Path) -> list[Path]:
        """Return the run directories of the selected profiles, as far as known without an upstream."""
        if self.place.run is not None:
            return [Path(self.place.run)]
        mode, runners = self.tree.value.get("mode"), self.tree.value.get("runner")
        chosen = [("mode", at) for at in range(len(mode))] if isinstance(mode, list) else [("mode",)]
        names = {self._text(one) for one in chosen} if isinstance(mode, (list, str)) else set()
        run_dir, name, runs = self._text(("run_dir",)), self._text(("name",)), self.place.runs
        if runs is not None:
            run_dir, name = os.path.abspath(runs), name or workspace.name  # noqa: PTH100
        found: dict[Path, None] = {}
        for at, runner in enumerate(runners if isinstance(runners, list) else []):
            own, infers = self._text(("runner", at, "name")), isinstance(runner, dict) and is_infer(runner)
            if names and own not in names:
                continue
            said = self._text(("runner", at, "init_model_path" if infers else "save_checkpoint_path"))
            if not infers and (said is None or runs is not None):
                said = "/".join(filter(None, (run_dir or "runs", name, own)))
            if said and "://" not in said:
                place = str(local_path(said, workspace))
                found[Path(split_weights(place)[0] if infers else place)] = None
        return list(found)

    def _text(self, where: Where) -> str | None:
        """Return the text at a location; None if there is none, or while it is being expanded."""
        try:
            value = value_at(self.tree.value, where)
        except (LookupError, TypeError):
            return None
        node = self.node(where) if isinstance(value, str) and where not in self._doing else None
        return node.at(str(self.workspace)) if isinstance(node, _Text) else None

    def _cycle(self, target: Where, where: Where, token: str) -> Any:
        begin = self._doing.index(target)
        names = [self.tree.path(one) or "the whole file" for one in (*self._doing[begin:], target)]
        return self.wrong(where, f"refers to itself: {' -> '.join(names)}", token)

    def _affordable(self, node: Any, where: Where) -> bool:
        """Check that repeating a collection does not exceed the limits on size."""
        pending = [(node, len(where))]
        while pending:
            one, depth = pending.pop()
            self._values += 1
            if self._values > LIMIT_VALUES or depth > LIMIT_DEPTH:
                what = f"{LIMIT_VALUES} values" if depth <= LIMIT_DEPTH else f"{LIMIT_DEPTH} levels"
                self.wrong(where, f"references make it larger than {what}, the limit")
                return False
            inner = one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()
            pending.extend((each, depth + 1) for each in inner)
        return True


def _shown(value: bool | float) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _rendered(node: Any, workspace: str | None) -> Any:
    """Convert a node to a value; without a workspace, texts keep their expressions, escaped."""

    def of(one: Any) -> Any:
        if not isinstance(one, _Text):
            return None if one is _BROKEN else one
        return written(list(one.parts)) if workspace is None else one.at(workspace)

    return with_leaves(node, of)

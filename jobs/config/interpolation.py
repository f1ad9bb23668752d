"""Expand the expressions in all texts of a tree and report unresolved ones.

A text that consists of one expression becomes the value with its type; other texts are concatenated. The
content of an environment variable is parsed as a YAML scalar, unless the schema expects a text.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import field
from pathlib import Path
from typing import Any

from torchrelay.jobs.config.expressions import (
    UPSTREAM,
    Part,
    Reference,
    Unreadable,
    UpstreamValueError,
    Variable,
    WorkspaceToken,
    parts_of,
    stage_folder,
    value_of,
    written,
)
from torchrelay.jobs.config.runner_schema import is_infer
from torchrelay.jobs.config.schema import form_at, key_at
from torchrelay.jobs.config.section_types import local_path, split_weights
from torchrelay.jobs.config.tree import (
    ConfigProblem,
    ConfigTree,
    Missing,
    SourceSpan,
    find,
    hint,
    nearest,
    value_at,
    with_leaves,
)
from torchrelay.jobs.config.yaml_reader import (
    LIMIT_BYTES,
    LIMIT_DEPTH,
    LIMIT_VALUES,
    NotOne,
    TextPosition,
    Where,
    plain,
)
from torchrelay.records import dataclass

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
    """A text of literals and the workspace."""

    parts: tuple[str | WorkspaceToken, ...]

    def at(self, workspace: str) -> str:
        """Return the text with the workspace replaced."""
        return "".join(workspace if isinstance(one, WorkspaceToken) else one for one in self.parts)


def expanded(
    tree: ConfigTree, folder: Path, environ: Mapping[str, str], place: RunPlace | None = None
) -> tuple[Expanded, list[ConfigProblem]]:
    """Expand a tree and return the problems; `folder` is the base of a relative workspace."""
    work = _Interpolation(tree, environ, place or RunPlace())
    begins = work.node(_WORKSPACE) if "workspace" in tree.value else None
    text = "".join(str(one) for one in begins.parts) if isinstance(begins, _Text) else "."
    workspace = Path(os.path.normpath(folder / os.path.expanduser(text)))  # noqa: PTH111 - as in local_path
    work.workspace = workspace
    top = work.node(())
    value, portable = _rendered(top, str(workspace)), _rendered(top, None)
    if isinstance(begins, _Text):
        value["workspace"] = str(workspace)
    portable["workspace"] = written([str(workspace)])
    if isinstance(begins, _Text) and not os.path.isdir(workspace):  # noqa: PTH112 - False for a name too long
        work.wrong(_WORKSPACE, f"directory {workspace} does not exist")
    broken = tree.broken | work.broken
    done = ConfigTree(value, tree.origins, tree.keys, broken)
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
            origin = SourceSpan(origin.source, TextPosition(origin.place.line, at + 1))
        self.problems.append(ConfigProblem(origin, self.tree.path(where), message, near))
        self.broken.add(where)
        return _BROKEN

    def node(self, where: Where) -> Any:
        """Return the expanded node at a location."""
        if where not in self._done:
            self._doing.append(where)
            self._done[where] = self._expanded(where)
            self._doing.pop()
        return self._done[where]

    def _expanded(self, where: Where) -> Any:
        value = value_at(self.tree.value, where)
        if where in self.tree.broken:
            return _BROKEN
        if isinstance(value, dict):
            return {name: self.node((*where, name)) for name in value}
        if isinstance(value, list):
            return [self.node((*where, at)) for at in range(len(value))]
        return self._of_text(value, where) if isinstance(value, str) else value

    def _of_text(self, text: str, where: Where) -> Any:
        parts = parts_of(text)
        if len(parts) == 1 and isinstance(parts[0], (Reference, Variable)):
            return self._typed(self._node_of(parts[0], where), where)
        inner = [self._inner(part, where) for part in parts]
        found = [one for some in inner for one in some or ()]
        self._characters += sum(len(one) for one in found if isinstance(one, str))
        if self._characters > LIMIT_BYTES:
            return self.wrong(where, f"all texts together are longer than {LIMIT_BYTES >> 20} MiB, the limit")
        return _BROKEN if None in inner else _Text(tuple(found))

    def _inner(self, part: Part, where: Where) -> tuple[str | WorkspaceToken, ...] | None:
        """Expand one part of a longer text; None after a reported problem."""
        if isinstance(part, str):
            return (part,)
        node = self._node_of(part, where)
        if isinstance(node, _Text):
            return node.parts
        if node is _BROKEN:
            self.broken.add(where)
            return None
        if node is None or isinstance(node, (dict, list)):
            what = "has no value" if node is None else "is not a single value"
            token = "" if isinstance(part, WorkspaceToken) else part.written
            self.wrong(where, f"`{token}` {what}, so it cannot be part of a text", token)
            return None
        return (_shown(node),)

    def _typed(self, node: Any, where: Where) -> Any:
        """Return the node of a text that is one expression, with the type that the schema expects."""
        if node is _BROKEN:
            self.broken.add(where)
            return node
        form = form_at(where)
        textual = form is not None and form.textual
        if isinstance(node, _Variable):
            word = node.text if textual else plain(node.text)
            node = _Text((node.text,)) if isinstance(word, (str, NotOne)) else word
        elif textual and isinstance(node, (bool, int, float)):
            node = _Text((_shown(node),))
        return node if self._affordable(node, where) else _BROKEN

    def _node_of(self, part: WorkspaceToken | Reference | Variable | Unreadable, where: Where) -> Any:
        if isinstance(part, Unreadable):
            return self.wrong(where, part.message, part.written)
        if isinstance(part, Variable):
            return self._variable(part, where)
        return (
            self._workspace(where, part.value)
            if isinstance(part, WorkspaceToken)
            else self._referred(part, where)
        )

    def _variable(self, part: Variable, where: Where) -> Any:
        text = self.environ.get(part.name, part.default)
        if text is None:
            why = f"the environment has no {part.name}: set it, or write `${{env:{part.name},default}}`"
            return self.wrong(where, why, part.written)
        if not text.isascii() and text.encode(errors="ignore").decode() != text:
            return self.wrong(where, f"{part.name} of the environment is not valid UTF-8", part.written)
        return _Variable((text,), text)

    def _workspace(self, where: Where, token: str) -> Any:
        if _WORKSPACE in self._doing:
            return self._cycle(_WORKSPACE, where, token)
        return _Text((WorkspaceToken.WORKSPACE,))

    def _referred(self, part: Reference, where: Where) -> Any:
        if part.path == "workspace":
            return self._workspace(where, part.written)
        target = find(self.tree.value, part.path)
        if isinstance(target, Missing):
            upstream = len(target.where) == 2 and target.where[0] == UPSTREAM
            if upstream and key_at((*target.where, target.rest[0])) is None:
                return self._of_upstream(target, part, where)
            return self._default(target, part, where)
        if target in self._doing:
            return self._cycle(target, where, part.written)
        if len(self._doing) > LIMIT_CHAIN:
            return self.wrong(where, f"a chain of more than {LIMIT_CHAIN} references", part.written)
        self.referred.add(target)
        return self.node(target)

    def _of_upstream(self, missing: Missing, part: Reference, where: Where) -> Any:
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

    def _default(self, missing: Missing, part: Reference, where: Where) -> Any:
        """Return the node of the schema's default for a missing key."""
        spec = key_at((*missing.where, *missing.rest))
        if spec is not None and spec.default is not None and not isinstance(spec.default, (dict, list)):
            return _Text((spec.default,)) if isinstance(spec.default, str) else spec.default
        word, near = missing.rest[0], nearest(missing.rest[0], missing.known)
        message = f"`{part.path}` is not in the configuration; {hint(word, missing.known)}".rstrip("; ")
        return self.wrong(where, message, part.written, near)

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


@dataclass(frozen=True)
class _Variable(_Text):
    """Content of an environment variable, whose type depends on where it is used."""

    text: str


def _shown(value: bool | float) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _rendered(node: Any, workspace: str | None) -> Any:
    """Convert a node to a value; without a workspace, texts keep their expressions, escaped."""

    def of(one: Any) -> Any:
        if not isinstance(one, _Text):
            return None if one is _BROKEN else one
        return written(list(one.parts)) if workspace is None else one.at(workspace)

    return with_leaves(node, of)

"""A validated configuration, read from a file and overrides, with its sections and its identity.

The identity excludes limits, intervals, retention and paths, the kind and number of processes, and everything
that only `infer` uses. Default values count as missing.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar, overload

from torchrelay.errors import UsageError
from torchrelay.jobs.config.interpolation import Expanded, RunPlace, expanded
from torchrelay.jobs.config.overrides import References, overridden
from torchrelay.jobs.config.schema import TOP, Settings, completed, form_at, is_infer, key_at
from torchrelay.jobs.config.section_types import bound
from torchrelay.jobs.config.tree import (
    ConfigError,
    ConfigKeyError,
    ConfigProblem,
    Missing,
    Tracked,
    find,
    hint,
    leaves,
    nearest,
    recovered,
    value_at,
)
from torchrelay.jobs.config.types import At, FieldType, KeySpec, Reading, Section
from torchrelay.jobs.config.yaml_reader import Where, yaml_content, yaml_lines
from torchrelay.records import dataclass

_EMPTY: tuple[Any, ...] = (None, {}, [])


def identity(normal: Mapping[str, Any], runner: str | None = None) -> dict[str, Any]:
    """Return the identifying part of a normalised configuration for one runner, or all that train."""
    runners = list(normal.get("runner", []))
    if runner is not None:
        chosen = [one for one in runners if one["name"] == runner]
    else:
        chosen = [one for one in runners if not is_infer(one)] or runners
    phases = _used(normal, "phase", [one.get("phases") for one in chosen])
    names = (one.get("dataset_name") for one in phases)
    datasets = _used(normal, "dataset", [None if name is None else [name] for name in names])
    found = _picked(TOP, {**normal, "runner": chosen, "phase": phases, "dataset": datasets})
    return dict(found)


def digest(identifying: Mapping[str, Any]) -> str:
    """Return the SHA-256 of the canonical JSON."""
    text = json.dumps(identifying, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def _used(normal: Mapping[str, Any], section: str, wanted: Collection[list[str] | None]) -> list[Any]:
    """Return the wanted items of a section; None in `wanted` means all items."""
    items = list(normal.get(section, []))
    if not wanted or any(names is None for names in wanted):
        return items
    named = {name for names in wanted for name in names or ()}
    return [one for one in items if one["name"] in named]


def _picked(form: FieldType, value: Any) -> Any:
    if not isinstance(form, Section):
        return form.mapped(value, _picked)
    keys = form.keys
    known = {name: _of_key(keys[name], value[name]) for name in keys if name in value}
    own = {name: one for name, one in value.items() if name not in keys}
    return {name: one for name, one in known.items() if one not in _EMPTY} | own


def _of_key(spec: KeySpec, value: Any) -> Any:
    """Return the identifying part of a key's value; None if it has none."""
    if not spec.identity or (spec.default is not None and value == spec.form.normal(spec.default)):
        return None
    return _picked(spec.form, value)


DEFAULT = "default"
T = TypeVar("T")


@dataclass(frozen=True)
class Config:
    """A configuration from a file, whose text is `source`, and overrides; see `load_config`.

    Immutable, except that it records which of the user's keys are read, for `unused`.
    """

    name: str
    source: bytes
    settings: Settings
    overrides: tuple[str, ...]
    _expanded: Expanded
    _reading: Reading

    @property
    def workspace(self) -> Path:
        """The absolute base directory of paths."""
        return self._expanded.workspace

    @overload
    def section(self, path: str) -> Tracked: ...

    @overload
    def section(self, path: str, to: type[T]) -> T: ...

    def section(self, path: str, to: Any = None) -> Any:
        """Return a section by its dotted path (`hyper_parameters`, `dataset.digits`).

        Args:
            path: The dotted path.
            to: dict, a dataclass, or a pydantic model to convert the section to.

        Returns:
            A read-only mapping that records reads, or an object of class `to`.

        Raises:
            ConfigError: Values do not fit `to`; has the location of each.
            ConfigKeyError: The section does not exist.

        Example:
            config.section("hyper_parameters")["width"]
        """
        where = self._where(path)
        content = {} if where is None else value_at(self._expanded.tree.value, where)
        at = At(self._reading, (path,) if where is None else where)
        if to is None:
            if not isinstance(content, dict):
                origin = self._expanded.tree.origin(at.where)
                raise UsageError(f"{origin}: {path} is a single value, not a section")
            return Tracked(content, at.where, self._reading)
        before = len(self._reading.problems)
        found = bound(to, {} if content is None else content, at)
        problems = self._reading.problems[before:]
        del self._reading.problems[before:]
        if problems:
            raise ConfigError(problems)
        return found

    def value(self, path: str, default: Any = None) -> Any:
        """Return the value at a dotted path, which then counts as read.

        Args:
            path: The dotted path.
            default: Returned if the value is missing and the schema has no default.

        Returns:
            The value with expressions expanded, else the default of the schema, else `default`.

        Example:
            config.value("hyper_parameters.width", 64)
        """
        found = find(self._expanded.tree.value, path)
        if isinstance(found, Missing):
            where = (*found.where, *found.rest)
            self._reading.misses[where] = None
            spec = key_at(where)
            return default if spec is None or spec.default is None else spec.default
        value = value_at(self._expanded.tree.value, found)
        if isinstance(value, dict):
            return Tracked(value, found, self._reading)
        self._reading.reads.update(leaves(value, found))
        return default if value is None else value

    def without_effect(self) -> tuple[ConfigProblem, ...]:
        """Return a problem for each key that is accepted for PaddleRec's files but has no effect."""
        optimizer = self.settings.hyper_parameters.optimizer
        if optimizer is None or optimizer.strategy in (None, "sync"):
            return ()
        where: Where = ("hyper_parameters", "optimizer", "strategy")
        tree = self._reading.tree
        why = (
            f"{optimizer.strategy} changes nothing: without parameter servers, gradients are reduced "
            "between the ranks in every step; leave the key out"
        )
        return (ConfigProblem(tree.origin(where), tree.path(where), why),)

    def unused(self, sections: Sequence[Tracked] | None = None) -> tuple[ConfigProblem, ...]:
        """Return the user's keys of some sections, or all, that were not read so far, in text order.

        A section that was converted to a dict counts as read.
        """
        own = self.settings.hyper_parameters
        scheduler = None if own.optimizer is None else own.optimizer.lr_scheduler
        kept = (one.arguments for one in (own.optimizer, scheduler) if one is not None)
        parts = (
            sections
            if sections is not None
            else (*(one.extra for one in self.settings.dataset), own.extra, *kept)
        )
        tree, found = self._reading.tree, []
        for where in (one for part in parts for one in part.unread()):
            name, asked = (
                str(where[-1]),
                [str(one[-1]) for one in self._reading.misses if one[:-1] == where[:-1]],
            )
            near = nearest(name, asked)
            remedy = f"; `{near}` was requested but is missing" if near else ""
            if near is None and isinstance(form := form_at(where[:-1]), Section):
                near = nearest(name, form.keys)
                remedy = f"; did you mean `{near}`?" if near else ""
            why = f"was never read{remedy}"
            found.append(ConfigProblem(tree.key_origin(where), tree.path(where), why, near))
        return tuple(sorted(found, key=lambda one: one.origin.place))

    def check_unused(self, *, strict: bool, sections: Sequence[Tracked] | None = None) -> tuple[str, ...]:
        """Return a line for each unused key; call it when start-up ends. `strict`: raise ConfigError."""
        found = self.unused(sections)
        if found and strict:
            raise ConfigError(found)
        return tuple(str(one) for one in found)

    @cached_property
    def resolved(self) -> dict[str, Any]:
        """All values including defaults; `{workspace}` is not expanded."""
        return dict(completed(TOP, self._normal))

    def resolved_text(self) -> str:
        """`resolved` as YAML, which gives a configuration with the same id, read from any directory."""
        return "".join(f"{line}\n" for line in yaml_lines(self.resolved))

    def printed(self) -> list[str]:
        """Return `resolved` as lines of YAML, each value with its origin as a comment."""
        return list(yaml_lines(self.resolved, self.provenance))

    def origins(self) -> dict[str, str]:
        """Map the dotted path of each value of `resolved` to its origin."""
        places = leaves(self.resolved, ())
        return {self._expanded.tree.path(where): self.provenance(where) for where in places}

    def provenance(self, where: Where) -> str:
        """Return the origin of a value: `config.yaml:3:5`, `command line:1:1`, or `default`."""
        tree = self._expanded.tree
        if where in tree.origins:
            unset = value_at(tree.value, where) is None and key_at(where) is not None
            return DEFAULT if unset else str(tree.origins[where])
        around = where[:-1]
        if around not in tree.origins or isinstance(value_at(tree.value, around), dict):
            return DEFAULT
        form = form_at(around)  # a single value stands for a list or mapping
        is_other = isinstance(form, Section) and form.short != where[-1]
        return DEFAULT if is_other else str(tree.origins[around])

    @cached_property
    def identity(self) -> dict[str, Any]:
        """The part that identifies a training, without limits, intervals and keys only used by `infer`."""
        return identity(self._normal)

    @property
    def id(self) -> str:
        """SHA-256 of `identity`."""
        return digest(self.identity)

    def id_of(self, runner: str) -> str:
        """Return the SHA-256 of the part used by one runner; raises ConfigKeyError for an unknown runner."""
        names = [one.name for one in self.settings.runner]
        if runner not in names:
            raise ConfigKeyError(f"{self.name}: unknown runner `{runner}`; {hint(runner, names)}")
        return digest(identity(self._normal, runner))

    @cached_property
    def _normal(self) -> Mapping[str, Any]:
        return TOP.normal(self._expanded.portable)  # type: ignore[no-any-return]

    def _where(self, path: str) -> Where | None:
        """Locate a section; None for a section of the schema that is not written, and so empty."""
        found = find(self._expanded.tree.value, path)
        if not isinstance(found, Missing):
            return found
        spec = key_at((*found.where, *found.rest))
        if spec is not None and isinstance(spec.form, Section):
            return None
        near = hint(found.rest[0], found.known)
        raise ConfigKeyError(f"{self.name}: unknown section `{path}`; {near}".rstrip("; "))


def load_config(
    path: str | os.PathLike[str],
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    source: Path | None = None,
    *,
    place: RunPlace | None = None,
) -> Config:
    """Read a configuration file.

    Args:
        path: The file; a relative workspace is relative to its directory.
        overrides: Texts `key.path=value`.
        environ: Variables for `${env:NAME}`; None means the environment of the process.
        source: Directory to take files with classes from, instead of the workspace.
        place: Location of the runs, if other than in the configuration; `${upstream...}` is looked up in
            their `lineage/` first.

    Returns:
        The validated configuration.

    Raises:
        ConfigError: The configuration is invalid; has all problems.
        UsageError: The file cannot be read.

    Example:
        config = load_config("config.yaml", ["runner.train1.epochs=3"])
    """
    data = yaml_content(path)
    return read_config(data, os.fspath(path), Path(path).absolute().parent, overrides, environ, source, place)


def read_config(
    data: bytes,
    name: str,
    folder: Path,
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    source: Path | None = None,
    place: RunPlace | None = None,
) -> Config:
    """Validate a configuration text, called `name` in messages; raises ConfigError with all problems."""
    read = recovered(data, name)
    if read.tree is None:
        raise ConfigError(read.problems)
    tree, problems = overridden(read.tree, overrides)
    done, more = expanded(tree, folder, os.environ if environ is None else environ, place)
    reading = Reading(done.tree, done.workspace, source=source)
    for where in done.referred:
        reading.reads.update(leaves(value_at(done.tree.value, where), where))
    settings = TOP.take(done.tree.value, At(reading))
    References(reading).check()
    reported = {str(one.origin) for one in read.problems}  # already reported as a YAML error
    found = [one for one in (*problems, *more, *reading.problems) if str(one.origin) not in reported]
    if not read.whole:  # a missing key may be in one of the skipped lines
        found = [one for one in found if " missing" not in one.message]
    if read.problems or found:
        raise ConfigError([*read.problems, *found])
    return Config(name, data, settings, tuple(overrides), done, reading)

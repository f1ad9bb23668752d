"""A configuration that was checked: read from a file and overrides, its sections, and its identity.

Left out are limits, intervals, what is kept and where, the kind and number of processes, and everything
that only `infer` uses. Values that are the default count as not written.
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
from torchrelay.jobs.config.overrides import Overrides, check_references, overridden
from torchrelay.jobs.config.runner_schema import is_infer
from torchrelay.jobs.config.schema import TOP, Settings, completed, form_at, key_at, user_sections
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
    """The identifying part of a normal, valid configuration; of one runner, else of all that train."""
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
    """SHA-256 of it, in one way of writing."""
    text = json.dumps(identifying, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def _used(normal: Mapping[str, Any], section: str, wanted: Collection[list[str] | None]) -> list[Any]:
    """The items of a list that are named; None among the wanted: all of them."""
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
    """None where it does not count."""
    if not spec.identity or (spec.default is not None and value == spec.form.normal(spec.default)):
        return None
    return _picked(spec.form, value)


DEFAULT = "default"
T = TypeVar("T")


@dataclass(frozen=True)
class Config:
    """What was read of a file and of the overrides; made by `read_config` and `load_config`.

    `source` is the file as it was read, whatever is in it by now. `settings` has the keys of the schema with
    their types. `section` gives what is the user's. Nothing of it changes any more, but it notes which of
    the user's keys a program reads, for `unused`.
    """

    name: str
    source: bytes
    settings: Settings
    overrides: Overrides
    _expanded: Expanded
    _reading: Reading

    @property
    def workspace(self) -> Path:
        """The directory where paths begin; absolute."""
        return self._expanded.workspace

    @overload
    def section(self, path: str) -> Tracked: ...

    @overload
    def section(self, path: str, to: type[T]) -> T: ...

    def section(self, path: str, to: Any = None) -> Any:
        """A section by its dotted path (`hyper_parameters`, `dataset.digits`), as a mapping that notes reads.

        With `to` as an object of that class: dict, a dataclass, or a pydantic model. Raises ConfigError with
        the place of every value that does not fit, ConfigKeyError for a section that is not there.
        """
        where = self._where(path)
        content = {} if where is None else value_at(self._expanded.tree.value, where)
        at = At(self._reading, (path,) if where is None else where)
        if to is None:
            if not isinstance(content, dict):
                origin = self._expanded.tree.origin(at.where)
                raise UsageError(f"{origin}: {path} is a single value, no section")
            return Tracked(content, at.where, self._reading)
        before = len(self._reading.problems)
        found = bound(to, {} if content is None else content, at)
        problems = self._reading.problems[before:]
        del self._reading.problems[before:]
        if problems:
            raise ConfigError(problems)
        return found

    def value(self, path: str, default: Any = None) -> Any:
        """What stands at a dotted path, names in it replaced; it counts as read, of a mapping what is read.

        Where nothing stands it is the default of the schema, and `default` for a key that has none.
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
        """Keys that are taken, because files of PaddleRec have them, and change nothing; each with why."""
        optimizer = self.settings.hyper_parameters.optimizer
        if optimizer is None or optimizer.strategy in (None, "sync"):
            return ()
        where: Where = ("hyper_parameters", "optimizer", "strategy")
        tree = self._reading.tree
        why = (
            f"{optimizer.strategy} changes nothing: there are no parameter servers, gradients are reduced "
            "between the ranks in every step; leave the key out"
        )
        return (ConfigProblem(tree.origin(where), tree.path(where), why),)

    def unused(self, sections: Sequence[Tracked] | None = None) -> tuple[ConfigProblem, ...]:
        """The user's keys that were written and that nobody has read so far, in the order of the text.

        `sections` are those that are looked at, all if None. Keys of the schema are never among them; what
        became of a whole dict counts as read. The nearest name is one that was asked for in vain, else one
        of the schema.
        """
        parts = user_sections(self.settings) if sections is None else sections
        found = [self._unread(where) for part in parts for where in part.unread()]
        return tuple(sorted(found, key=lambda one: one.origin.place))

    def check_unused(self, *, strict: bool, sections: Sequence[Tracked] | None = None) -> tuple[str, ...]:
        """A line for each unused key, to be asked when start-up ends. `strict`: raises ConfigError."""
        found = self.unused(sections)
        if found and strict:
            raise ConfigError(found)
        return tuple(str(one) for one in found)

    def _unread(self, where: Where) -> ConfigProblem:
        tree = self._reading.tree
        asked = [str(one[-1]) for one in self._reading.misses if one[:-1] == where[:-1]]
        near = nearest(str(where[-1]), asked)
        remedy = f"; `{near}` was asked for and is not there" if near else ""
        if near is None and isinstance(form := form_at(where[:-1]), Section):
            near = nearest(str(where[-1]), form.keys)
            remedy = f"; did you mean `{near}`?" if near else ""
        return ConfigProblem(tree.key_origin(where), tree.path(where), f"was never read{remedy}", near)

    @cached_property
    def resolved(self) -> dict[str, Any]:
        """Every value that holds, defaults too. Texts have `{workspace}` in them where they had it before."""
        return dict(completed(TOP, self._normal))

    def resolved_text(self) -> str:
        """`resolved` as YAML: read from anywhere, it is this configuration again, with the same id."""
        return "".join(f"{line}\n" for line in yaml_lines(self.resolved))

    def printed(self) -> list[str]:
        """`resolved` as lines of YAML, each value with where it comes from."""
        return list(yaml_lines(self.resolved, self.provenance))

    def origins(self) -> dict[str, str]:
        """Dotted path of each value of `resolved` to where it comes from."""
        places = leaves(self.resolved, ())
        return {self._expanded.tree.path(where): self.provenance(where) for where in places}

    def provenance(self, where: Where) -> str:
        """`config.yaml:3:5`, `command line:1:1`, or `default`."""
        tree = self._expanded.tree
        if where in tree.origins:
            unset = value_at(tree.value, where) is None and key_at(where) is not None
            return DEFAULT if unset else str(tree.origins[where])
        around = where[:-1]
        if around not in tree.origins or isinstance(value_at(tree.value, around), dict):
            return DEFAULT
        form = form_at(around)  # one value is written there for a list, or for a mapping
        is_other = isinstance(form, Section) and form.short != where[-1]
        return DEFAULT if is_other else str(tree.origins[around])

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What makes a training this one: no limits, no intervals, nothing that only `infer` uses."""
        return identity(self._normal)

    @property
    def id(self) -> str:
        """SHA-256 of `identity`."""
        return digest(self.identity)

    def id_of(self, runner: str) -> str:
        """SHA-256 of the part that one runner uses; raises ConfigKeyError for one that is not there."""
        names = [one.name for one in self.settings.runner]
        if runner not in names:
            raise ConfigKeyError(f"{self.name}: there is no runner `{runner}`; {hint(runner, names)}")
        return digest(identity(self._normal, runner))

    @cached_property
    def _normal(self) -> Mapping[str, Any]:
        return TOP.normal(self._expanded.portable)  # type: ignore[no-any-return]

    def _where(self, path: str) -> Where | None:
        """None for a section of the schema that is not written: it is empty."""
        found = find(self._expanded.tree.value, path)
        if not isinstance(found, Missing):
            return found
        spec = key_at((*found.where, *found.rest))
        if spec is not None and isinstance(spec.form, Section):
            return None
        near = hint(found.rest[0], found.known)
        raise ConfigKeyError(f"{self.name}: there is no section `{path}`; {near}".rstrip("; "))


def load_config(
    path: str | os.PathLike[str],
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    source: Path | None = None,
    *,
    place: RunPlace | None = None,
) -> Config:
    """Read a configuration file; a relative workspace begins at its directory.

    `overrides` are texts `key.path=value`; `environ` is what `${env:NAME}` sees, the process's own if None.
    Files with classes in the workspace are taken from `source` instead, where it is given. `place` says where
    the runs lie if not where the configuration does: `${upstream...}` looks for `lineage/` there first.
    Raises ConfigError with all problems, UsageError where the file cannot be read at all.
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
    """Read a text; `name` stands for it in messages, a relative workspace begins at `folder`.

    Nothing is imported and nothing written. Raises ConfigError with all problems.
    """
    given = Overrides(tuple(overrides))
    read = recovered(data, name)
    if read.tree is None:
        raise ConfigError(read.problems)
    tree, problems = overridden(read.tree, given)
    done, more = expanded(tree, folder, os.environ if environ is None else environ, place)
    reading = Reading(done.tree, done.workspace, source=source)
    for where in done.referred:
        reading.reads.update(leaves(value_at(done.tree.value, where), where))
    settings = TOP.take(done.tree.value, At(reading))
    check_references(reading)
    told = {str(one.origin) for one in read.problems}  # what stands where YAML was wrong already
    found = [one for one in (*problems, *more, *reading.problems) if str(one.origin) not in told]
    if not read.whole:  # what is missing may have stood in the lines that were left out
        found = [one for one in found if " missing" not in one.message]
    if read.problems or found:
        raise ConfigError([*read.problems, *found])
    return Config(name, data, settings, given, done, reading)

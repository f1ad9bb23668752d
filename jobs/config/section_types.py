"""Types of whole sections and of special values: class paths, GPUs, choices of epochs."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from torchrelay.jobs.config.tree import Tracked, hint, nearest
from torchrelay.jobs.config.types import (
    EXPRESSION,
    WRONG,
    At,
    Form,
    Json,
    KeySpec,
    SectionSpec,
    described,
    section_spec,
)
from torchrelay.jobs.config.user_sections import local_path, unreplaced
from torchrelay.jobs.config.yaml_reader import short
from torchrelay.records import dataclass


@dataclass(frozen=True)
class Section(Form):
    """A mapping with the keys of a dataclass. `short` is the key that a lone text stands for, if any."""

    of: type
    short: str | None = None

    @property
    def textual(self) -> bool:  # type: ignore[override]
        """A lone text stays one."""
        return self.short is not None

    @property
    def spec(self) -> SectionSpec:
        """Its keys."""
        return section_spec(self.of)

    @property
    def word(self) -> str:
        """A mapping, or the text that is short for it."""
        return "a mapping" if self.short is None else f"a mapping, or its `{self.short}` alone"

    def take(self, value: Any, at: At) -> Any:
        """An object of the dataclass; complaints cover all its keys. WRONG if it cannot be made."""
        if isinstance(value, str) and self.short is not None:
            return self._made({self.short: self.spec.keys[self.short].form.take(value, at)}, at)
        if not isinstance(value, dict):
            return at.expected(self, value)
        made: dict[str, Any] = {}
        for name, one in value.items():
            if name in self.spec.keys:
                made[name] = self._known(self.spec.keys[name], one, at.inner(name))
            elif self._is_refused(name, one) or (self.spec.free is None and name not in self.spec.refused):
                self._unknown(name, at.inner(name))
        missing = [
            spec.name for spec in self.spec.keys.values() if spec.required and made.get(spec.name) is None
        ]
        if missing and at.where not in at.reading.tree.broken:
            at.wrong(f"{' and '.join(f'`{name}`' for name in missing)} missing")
        return self._made(made, at, value)

    def normal(self, value: Any) -> Any:
        """As a mapping with the keys in the schema's order, those without a value left out, others behind."""
        if isinstance(value, str):
            value = {self.short: value}
        given = {
            name: spec.form.normal(value[name])
            for name, spec in self.spec.keys.items()
            if value.get(name) is not None
        }
        known = {name: one for name, one in given.items() if one is not None}
        own = {**self.spec.keys, **self.spec.refused}
        return {**known, **{name: one for name, one in value.items() if name not in own}}

    def json_schema(self) -> Json:
        """As a reference: the definition is made once."""
        own: Json = {"$ref": f"#/$defs/{self.of.__name__}"}
        return own if self.short is None else {"anyOf": [own, {"type": "string", "minLength": 1}]}

    def _known(self, spec: KeySpec, value: Any, at: At) -> Any:
        if at.where in at.reading.tree.broken:
            return WRONG
        return None if value is None else spec.form.take(value, at)

    def _is_refused(self, name: str, value: Any) -> bool:
        """A key that asks for what is not supported; one with nothing in it asks for nothing."""
        return name in self.spec.refused and value not in (None, "", [])

    def _unknown(self, name: str, at: At) -> None:
        if name in self.spec.refused:
            at.reading.wrong(at.where, f"not supported: {self.spec.refused[name]}", key=True)
            return
        known = list(self.spec.keys)
        at.reading.wrong(at.where, f"unknown key; {hint(name, known)}", nearest(name, known), key=True)

    def _made(self, made: Mapping[str, Any], at: At, given: Mapping[str, Any] | None = None) -> Any:
        """The object, with defaults where nothing stands."""
        fields: dict[str, Any] = {}
        for spec in self.spec.keys.values():
            value = made.get(spec.name)
            if value is None and spec.default is not None:
                value = spec.form.take(spec.default, at.inner(spec.name))
            fields[spec.attribute] = value
        if self.spec.free is not None:
            extra = {name: one for name, one in (given or {}).items() if name not in self.spec.keys}
            fields[self.spec.free] = Tracked(extra, at.where, at.reading)
        return self.of(**fields)


@dataclass(frozen=True)
class Named(Form):
    """A mapping from names that the user chooses to values of one form."""

    item: Form

    @property
    def word(self) -> str:
        """With its values."""
        return f"a mapping of names; each value is {self.item.word}"

    def take(self, value: Any, at: At) -> Any:
        """A dict; each wrong value is complained of."""
        if not isinstance(value, dict):
            return at.expected(self, value)
        return {
            name: WRONG
            if at.inner(name).where in at.reading.tree.broken
            else self.item.take(one, at.inner(name))
            for name, one in value.items()
        }

    def normal(self, value: Any) -> Any:
        """Each value in its one way of writing."""
        return {name: self.item.normal(one) for name, one in value.items()}

    def json_schema(self) -> Json:
        """As JSON Schema."""
        return {"type": "object", "additionalProperties": self.item.json_schema()}


_NAME = r"[^\W\d]\w*"
_MODULE = re.compile(rf"(?P<module>{_NAME}(?:\.{_NAME})*):(?P<name>{_NAME})")
_FILE = re.compile(rf"(?P<file>.*\.py)(?::(?P<name>{_NAME}))?")
_ANCESTOR = "paddlerec."


@dataclass(frozen=True)
class ClassPath:
    """A class by name in a file, or in a module that can be imported: one of `file` and `module` is set.

    `text` is what the user wrote, `{workspace}` and the like replaced.
    """

    text: str
    name: str
    file: Path | None = None
    module: str | None = None

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class ClassAt(Form):
    """A class; of a file without `:Class` the one that is called `default`. The file must be there."""

    default: str
    textual = True

    @property
    def word(self) -> str:
        """Both forms."""
        return f"`file.py` with a class `{self.default}`, `file.py:Class` or `module:Class`"

    def take(self, value: Any, at: At) -> Any:
        """A ClassPath; nothing is imported."""
        if not isinstance(value, str):
            return at.expected(self, value)
        if value.startswith(_ANCESTOR):
            return at.wrong(f"{short(value)} is in PaddleRec's package: copy the file into the workspace")
        if (found := _FILE.fullmatch(value)) is not None:
            return self._file(value, found, at)
        if (found := _MODULE.fullmatch(value)) is not None:
            return ClassPath(value, found["name"], module=found["module"])
        return at.wrong(f"expected {self.word}, not {described(value)}{_remedy(value)}")

    def json_schema(self) -> Json:
        """As JSON Schema."""
        return {"type": "string", "minLength": 1}

    def _file(self, value: str, found: re.Match[str], at: At) -> Any:
        file, source = local_path(found["file"], at.reading.workspace), at.reading.source
        if source is not None and file.is_relative_to(at.reading.workspace):
            file = source / file.relative_to(at.reading.workspace)
        if not os.path.isfile(file):  # noqa: PTH113 - False for a name too long
            remedy = unreplaced(value)
            return at.wrong(f"there is no file {file}{'' if remedy is None else f': {remedy}'}")
        return ClassPath(value, found["name"] or self.default, file=file)


def _remedy(value: str) -> str:
    """For `package.module.Class`, how it is written."""
    module, dot, name = value.rpartition(".")
    written = f"{module}:{name}"
    return f": write {written}" if dot and _MODULE.fullmatch(written) else ""


_NUMBERS = re.compile(r"\s*\d{1,4}\s*(,\s*\d{1,4}\s*)*")


@dataclass(frozen=True)
class GpuNumbers(Form):
    """`"0,1"`, `0` or `[0, 1]`."""

    word = "numbers of GPUs: `0`, `[0, 1]` or `0,1`"
    textual = True

    def take(self, value: Any, at: At) -> Any:
        """The numbers as a tuple; each may stand once."""
        found = _numbers(value)
        if not found:
            return at.expected(self, value)
        if len(set(found)) < len(found):
            return at.wrong("a GPU stands there twice")
        return tuple(found)

    def normal(self, value: Any) -> Any:
        """As a list."""
        return _numbers(value)

    def json_schema(self) -> Json:
        """As JSON Schema."""
        whole: Json = {"type": "integer", "minimum": 0}
        return {
            "anyOf": [
                whole,
                {"type": "array", "items": whole, "minItems": 1},
                {"type": "string", "minLength": 1},
            ]
        }


def _numbers(value: Any) -> list[int]:
    """Empty where the value is none of the forms."""
    if isinstance(value, str):
        return [int(one) for one in value.split(",")] if _NUMBERS.fullmatch(value) else []
    listed = value if isinstance(value, list) else [value]
    return listed if all(type(one) is int and one >= 0 for one in listed) else []


Kind = Literal["latest", "best", "all", "numbers"]
_RANGE = re.compile(r"(0|[1-9][0-9]{0,5})\.\.(0|[1-9][0-9]{0,5})?")
_WORDS: dict[str, Kind] = {"latest": "latest", "last": "latest", "best": "best", "all": "all"}


@dataclass(frozen=True)
class EpochChoice:
    """`kind`, and for `numbers` either the `listed` epochs, in order, or those from `first` to `last`.

    An epoch's number is 0 after init and k after k epochs. `last` belongs to the range; None: it has no end.
    """

    kind: Kind
    listed: tuple[int, ...] = ()
    first: int = 0
    last: int | None = None

    def chosen(self, available: Iterable[int], best: int | None = None) -> list[int]:
        """Of the epochs that are there those which are meant, in order of their numbers.

        `best` is the best one, None where none is known. What was asked for by number and is not there is
        told by `absent`.
        """
        there = sorted(set(available))
        if self.kind in ("all", "latest"):
            return there if self.kind == "all" else there[-1:]
        if self.kind == "best":
            return [one for one in there if one == best]
        if self.listed:
            return [one for one in self.listed if one in set(there)]
        return [one for one in there if self.first <= one and (self.last is None or one <= self.last)]

    def absent(self, available: Iterable[int]) -> list[int]:
        """The epochs that were asked for by number, or within a range that has an end, and are not there."""
        there = set(available)
        if self.kind != "numbers":
            return []
        wanted = self.listed or (() if self.last is None else range(self.first, self.last + 1))
        return [one for one in wanted if one not in there]


@dataclass(frozen=True)
class EpochsChosen(Form):
    """The form of `epoch:`."""

    word = "an epoch, a list of epochs, a range such as `1..5` or `3..`, `latest`, `best` or `all`"

    def take(self, value: Any, at: At) -> Any:
        """An EpochChoice."""
        if type(value) is int and value >= 0:
            return EpochChoice("numbers", (value,))
        if isinstance(value, str) and value in _WORDS:
            return EpochChoice(_WORDS[value])
        if isinstance(value, str) and (found := _RANGE.fullmatch(value)):
            first, last = int(found[1]), int(found[2]) if found[2] else None
            if last is not None and last < first:
                return at.wrong(f"the range {value} is empty: write {last}..{first}")
            return EpochChoice("numbers", first=first, last=last)
        if isinstance(value, list) and value and all(type(one) is int and one >= 0 for one in value):
            return EpochChoice("numbers", tuple(sorted(set(value))))
        return at.expected(self, value)

    def json_schema(self) -> Json:
        """As JSON Schema."""
        whole: Json = {"type": "integer", "minimum": 0}
        ranges: Json = {"type": "string", "pattern": r"^(0|[1-9][0-9]*)\.\.(0|[1-9][0-9]*)?$"}
        return {
            "anyOf": [
                whole,
                {"type": "array", "items": whole, "minItems": 1},
                {"enum": list(_WORDS)},
                ranges,
                EXPRESSION,
            ]
        }

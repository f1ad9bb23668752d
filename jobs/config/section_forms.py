"""Forms that have keys: sections, and mappings whose keys the user chooses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchrelay.jobs.config.forms import WRONG, At, Form, Json
from torchrelay.jobs.config.key import KeySpec, SectionSpec, section_spec
from torchrelay.jobs.config.nearest import hint, nearest
from torchrelay.jobs.config.tracking import Tracked
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

"""The schema for editors: JSON Schema 2020-12, made of the classes that read configurations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torchrelay.jobs.config.forms import Form, Json, ListOf
from torchrelay.jobs.config.key import KeySpec
from torchrelay.jobs.config.schema_lookup import TOP
from torchrelay.jobs.config.section_forms import Named, Section

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def json_schema() -> Json:
    """A schema of configuration files. Files and references between sections it knows not; `check` does."""
    found = {section.of.__name__: section for section in sections(TOP)}
    own = {name: _object(section) for name, section in found.items() if section is not TOP}
    expression = {
        "type": "string",
        "pattern": r"\$\{[^{}]+\}",
        "description": "`${key.path}`, `${upstream.low.key.path}` or `${env:NAME}`",
    }
    return {
        "$schema": DIALECT,
        "title": "Configuration of torchrelay",
        **_object(TOP),
        "$defs": {"expression": expression, **own},
    }


def sections(form: Form) -> Iterator[Section]:
    """A form's section and all below it, from the top, each once."""
    seen: set[type] = set()
    pending = [form]
    while pending:
        one = pending.pop(0)
        if isinstance(one, (ListOf, Named)):
            pending.append(one.item)
        elif isinstance(one, Section) and one.of not in seen:
            seen.add(one.of)
            yield one
            pending.extend(spec.form for spec in one.spec.keys.values())


def _object(section: Section) -> Json:
    keys = section.spec.keys
    required = [name for name, spec in keys.items() if spec.required]
    return {
        "type": "object",
        "description": (section.of.__doc__ or "").partition("\n")[0],
        "properties": {name: _property(spec) for name, spec in keys.items()},
        "additionalProperties": section.spec.free is not None,
        **({"required": required} if required else {}),
    }


def _property(spec: KeySpec) -> Json:
    own = spec.form.json_schema()
    default: dict[str, Any] = {} if spec.default is None else {"default": spec.default}
    if spec.required:
        return {"description": spec.doc, **own, **default}
    return {"description": spec.doc, "anyOf": [own, {"type": "null"}], **default}

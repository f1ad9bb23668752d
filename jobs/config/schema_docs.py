"""What the schema says to editors and people: JSON Schema, the table of keys, the key at a place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torchrelay.jobs.config.resolved import scalar
from torchrelay.jobs.config.schema import Settings
from torchrelay.jobs.config.section_types import Named, Section
from torchrelay.jobs.config.types import Form, Json, KeySpec, ListOf
from torchrelay.jobs.config.yaml_reader import Where

TOP = Section(Settings)
"""The form of a whole configuration."""


def form_at(where: Where) -> Form | None:
    """The form of the value at a place; None where the schema knows nothing, as among the user's own keys."""
    form: Form | None = TOP
    for one in where:
        form = form_below(form, one)
    return form


def form_below(form: Form | None, one: str | int) -> Form | None:
    """The form of what lies below a key or index of a value of `form`."""
    if isinstance(form, Section) and isinstance(one, str):
        spec = form.spec.keys.get(one)
        return None if spec is None else spec.form
    if isinstance(form, ListOf) and isinstance(one, int):
        return form.item
    return form.item if isinstance(form, Named) else None


def key_at(where: Where) -> KeySpec | None:
    """The key of the schema that stands at a place, if it is one."""
    around = form_at(where[:-1]) if where else None
    return around.spec.keys.get(str(where[-1])) if isinstance(around, Section) else None


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


def key_table() -> str:
    """Markdown: a table for each section, its keys with form, default, meaning, part in identity."""
    paths = dict(_paths(TOP, ""))
    return "\n".join(_section(section, paths[section.of]) for section in sections(TOP))


def _paths(form: Form, path: str) -> Iterator[tuple[type, str]]:
    """How people write the place of each section."""
    if isinstance(form, (ListOf, Named)):
        yield from _paths(form.item, f"{path}[]" if isinstance(form, ListOf) else f"{path}.<alias>")
    elif isinstance(form, Section):
        yield form.of, path
        for name, spec in form.spec.keys.items():
            yield from _paths(spec.form, f"{path}.{name}" if path else name)


def _section(section: Section, path: str) -> str:
    rows = [_row(spec) for spec in section.spec.keys.values()]
    if section.spec.free is not None:
        rows.append(f"| … | anything | | {section.spec.free_doc} | yes |")
    rows += [f"| `{name}` | refused | | {_cell(remedy)} | |" for name, remedy in section.spec.refused.items()]
    title = f"### {path}" if path else "### At the top"
    head = "| key | may be | default | meaning | another run? |\n|---|---|---|---|---|"
    return f"{title}\n\n{(section.of.__doc__ or '').strip()}\n\n{head}\n" + "\n".join(rows) + "\n"


def _row(spec: KeySpec) -> str:
    default = "required" if spec.required else _default(spec.default)
    other = "yes" if spec.identity else "no"
    return f"| `{spec.name}` | {_cell(spec.form.word)} | {default} | {_cell(spec.doc)} | {other} |"


def _default(default: Any) -> str:
    return "" if default in (None, [], {}) else f"`{scalar(default)}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")

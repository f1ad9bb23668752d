"""What the schema says: to editors and people, of one place, and of a configuration in its resolved form.

The resolved form has every value that holds, defaults too, as YAML that reads as the same configuration.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torchrelay.jobs.config.schema import Settings
from torchrelay.jobs.config.types import Form, Json, KeySpec, Many, Section, section
from torchrelay.jobs.config.yaml_reader import Where, plain

TOP = section(Settings)
"""The form of a whole configuration."""
DIALECT = "https://json-schema.org/draft/2020-12/schema"
_BARE = re.compile(r"[A-Za-z_/][A-Za-z0-9_./+-]*")
_ELSEWHERE = re.compile(r"(?i)y|n|yes|no|on|off")
"""Words that readers of YAML 1.1 take for truth values."""
_LONG_KEY = 100
"""Characters; longer keys are written with `?`, because of ordinary ones YAML reads no more than 1024."""
Note = Callable[[Where], str]


def form_at(where: Where) -> Form | None:
    """The form of the value at a place; None where the schema knows nothing, as among the user's own keys."""
    form: Form | None = TOP
    for one in where:
        form = None if form is None else form.below(one)
    return form


def key_at(where: Where) -> KeySpec | None:
    """The key of the schema that stands at a place, if it is one."""
    around = form_at(where[:-1]) if where else None
    return around.keys.get(str(where[-1])) if isinstance(around, Section) else None


def json_schema() -> Json:
    """A schema of configuration files. Files and references between sections it knows not; `check` does."""
    top, *others = (_object(one) for one, _ in sections(TOP))
    expression = {
        "type": "string",
        "pattern": r"\$\{[^{}]+\}",
        "description": "`${key.path}`, `${upstream.low.key.path}` or `${env:NAME}`",
    }
    names = [one.of.__name__ for one, _ in sections(TOP)][1:]
    return {
        "$schema": DIALECT,
        "title": "Configuration of torchrelay",
        **top,
        "$defs": {"expression": expression, **dict(zip(names, others, strict=True))},
    }


def sections(form: Form) -> Iterator[tuple[Section, str]]:
    """A form's section and all below it, from the top, each once, with how people write its place."""
    seen: dict[type, None] = {}
    pending = [(form, "")]
    while pending:
        one, path = pending.pop(0)
        if isinstance(one, Many):
            pending.append((one.item, f"{path}[]" if one.kind is list else f"{path}.<alias>"))
        elif isinstance(one, Section) and one.of not in seen:
            seen[one.of] = None
            yield one, path
            prefix = f"{path}." if path else ""
            pending.extend((spec.form, prefix + name) for name, spec in one.keys.items())


def _object(section: Section) -> Json:
    keys = section.keys
    required = [name for name, spec in keys.items() if spec.required]
    return {
        "type": "object",
        "description": (section.of.__doc__ or "").partition("\n")[0],
        "properties": {name: _property(spec) for name, spec in keys.items()},
        "additionalProperties": section.free is not None,
        **({"required": required} if required else {}),
    }


def _property(spec: KeySpec) -> Json:
    own = spec.form.schema if spec.required else {"anyOf": [spec.form.schema, {"type": "null"}]}
    return {"description": spec.doc, **own, **({} if spec.default is None else {"default": spec.default})}


def key_table() -> str:
    """Markdown: a table for each section, its keys with form, default, meaning, part in identity."""
    return "\n".join(_table(one, path) for one, path in sections(TOP))


def _table(section: Section, path: str) -> str:
    rows = [_row(one) for one in section.keys.values()]
    if section.free is not None:
        rows.append(f"| … | anything | | {section.free_doc} | yes |")
    rows += [f"| `{name}` | refused | | {_cell(remedy)} | |" for name, remedy in section.refused.items()]
    title = f"### {path}" if path else "### At the top"
    head = "| key | may be | default | meaning | another run? |\n|---|---|---|---|---|"
    return f"{title}\n\n{(section.of.__doc__ or '').strip()}\n\n{head}\n" + "\n".join(rows) + "\n"


def _row(spec: KeySpec) -> str:
    written = "" if spec.default in (None, [], {}) else f"`{scalar(spec.default)}`"
    default = "required" if spec.required else written
    other = "yes" if spec.identity else "no"
    return f"| `{spec.name}` | {_cell(spec.form.word)} | {default} | {_cell(spec.doc)} | {other} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def completed(form: Form, value: Any) -> Any:
    """A normal value with the defaults of the schema where nothing stands."""
    if not isinstance(form, Section):
        return form.mapped(value, completed)
    known = {}
    for name, spec in form.keys.items():
        if name in value:
            known[name] = completed(spec.form, value[name])
        elif spec.default not in (None, [], {}):
            known[name] = spec.default
    return known | {name: one for name, one in value.items() if name not in known}


def yaml_lines(value: Mapping[str, Any], note: Note | None = None) -> Iterator[str]:
    """Block YAML; `note` says what stands behind a value as a comment."""
    for line, where in _of_mapping(value, (), ""):
        comment = note(where) if note is not None and where is not None else ""
        yield f"{line}  # {comment}" if comment else line


_Lines = Iterator[tuple[str, Where | None]]


def _of_mapping(value: Mapping[str, Any], where: Where, indent: str) -> _Lines:
    for name, one in value.items():
        key = scalar(name)
        if len(key) > _LONG_KEY:
            yield f"{indent}? {key}", None
            yield from _after(f"{indent}:", one, (*where, name), indent)
        else:
            yield from _after(f"{indent}{key}:", one, (*where, name), indent)


def _of_list(value: list[Any], where: Where, indent: str) -> _Lines:
    for at, one in enumerate(value):
        if isinstance(one, dict) and one:
            begin = "- "
            for line, place in _of_mapping(one, (*where, at), indent + "  "):
                yield indent + begin + line[len(indent) + 2 :], place
                begin = "  "
        else:
            yield from _after(f"{indent}-", one, (*where, at), indent)


def _after(head: str, value: Any, where: Where, indent: str) -> _Lines:
    if isinstance(value, dict) and value:
        yield head, None
        yield from _of_mapping(value, where, indent + "  ")
    elif isinstance(value, list) and value:
        yield head, None
        yield from _of_list(value, where, indent + "  ")
    else:
        yield f"{head} {scalar(value)}", where


def scalar(value: Any) -> str:
    """A value without parts as YAML on one line, read as the same by YAML 1.1 and 1.2."""
    if isinstance(value, (dict, list)):
        return "{}" if isinstance(value, dict) else "[]"
    if isinstance(value, str):
        return value if _is_bare(value) else _quoted(value)
    if isinstance(value, float):
        return _number(value)
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _is_bare(text: str) -> bool:
    return bool(_BARE.fullmatch(text)) and plain(text) == text and not _ELSEWHERE.fullmatch(text)


def _number(value: float) -> str:
    """As Python writes it, but always with a point: YAML 1.1 takes `1e-05` for a text."""
    text = repr(value)
    mantissa, exponent, power = text.partition("e")
    return f"{mantissa if '.' in mantissa else f'{mantissa}.0'}{exponent}{power}"


def _quoted(text: str) -> str:
    quoted = json.dumps(text, ensure_ascii=False)
    return "".join(one if one.isprintable() else _escaped(ord(one)) for one in quoted)


def _escaped(code: int) -> str:
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"

"""The resolved form: every value that holds, defaults too, as YAML that reads as the same configuration."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torchrelay.jobs.config.section_types import Named, Section
from torchrelay.jobs.config.types import Form, ListOf
from torchrelay.jobs.config.yaml_reader import Where, plain

_BARE = re.compile(r"[A-Za-z_/][A-Za-z0-9_./+-]*")
_ELSEWHERE = re.compile(r"(?i)y|n|yes|no|on|off")
"""Words that readers of YAML 1.1 take for truth values."""
_LONG_KEY = 100
"""Characters; longer keys are written with `?`, because of ordinary ones YAML reads no more than 1024."""
Note = Callable[[Where], str]


def completed(form: Form | None, value: Any) -> Any:
    """A normal value with the defaults of the schema where nothing stands."""
    if isinstance(form, Section):
        known = {}
        for name, spec in form.spec.keys.items():
            if name in value:
                known[name] = completed(spec.form, value[name])
            elif spec.default is not None and spec.default not in ([], {}):
                known[name] = spec.default
        return {**known, **{name: one for name, one in value.items() if name not in known}}
    if isinstance(form, ListOf):
        return [completed(form.item, one) for one in value]
    if isinstance(form, Named):
        return {name: completed(form.item, one) for name, one in value.items()}
    return value


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

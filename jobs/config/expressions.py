"""Texts with names in them: `{workspace}`, `${key.path}`, `${env:NAME}`, `${env:NAME,default}`.

`$$` before a brace stands for `$`, `{{workspace}}` for the characters `{workspace}`; all other braces stay.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import Enum

from torchrelay.records import dataclass

_TOKEN = re.compile(r"\$\$(?=\{)|\$\{(?P<inside>[^{}]*)\}|\$\{|\{\{workspace\}\}|\{workspace\}")
_ENV = re.compile(r"env:(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?:,(?P<default>.*))?", re.DOTALL)


class Mark(Enum):
    """The place of the workspace's path in a text."""

    WORKSPACE = "{workspace}"


@dataclass(frozen=True)
class Reference:
    """`${key.path}`; `written` is the whole token."""

    path: str
    written: str


@dataclass(frozen=True)
class Variable:
    """`${env:NAME,default}`."""

    name: str
    default: str | None
    written: str


@dataclass(frozen=True)
class Unreadable:
    """Something that begins like an expression and is none; `message` says why."""

    message: str
    written: str


Part = str | Mark | Reference | Variable | Unreadable


def parts_of(text: str) -> list[Part]:
    """A text in parts, literal ones between expressions; empty ones are left out."""
    return [part for part in _parts(text) if part != ""]


def _parts(text: str) -> Iterator[Part]:
    at = 0
    for found in _TOKEN.finditer(text):
        yield text[at : found.start()]
        at = found.end()
        sign = found[0]
        if sign == "$$":
            yield "$"
        elif sign == Mark.WORKSPACE.value:
            yield Mark.WORKSPACE
        elif sign == "{{workspace}}":
            yield Mark.WORKSPACE.value
        elif sign == "${":
            yield Unreadable(
                "`${` is not closed, or has a brace inside; `$${` stands for the characters", sign
            )
        else:
            yield _expression(found["inside"], sign)
    yield text[at:]


def _expression(inside: str, token: str) -> Part:
    if found := _ENV.fullmatch(inside):
        return Variable(found["name"], found["default"], token)
    if not inside.strip() or ":" in inside:
        return Unreadable("expected `${key.path}`, `${env:NAME}` or `${env:NAME,default}`", token)
    return Reference(inside.strip(), token)


def written(parts: list[str | Mark]) -> str:
    """The text from which `parts_of` makes these parts again, neighbouring literals joined."""
    joined: list[str | Mark] = []
    for part in parts:
        if joined and isinstance(part, str) and isinstance(last := joined[-1], str):
            joined[-1] = last + part
        else:
            joined.append(part)
    return "".join(_escaped(joined, at) for at in range(len(joined)))


def _escaped(parts: list[str | Mark], at: int) -> str:
    part = parts[at]
    before = parts[at - 1] if at else ""
    after = parts[at + 1] if at + 1 < len(parts) else ""
    if isinstance(part, Mark):
        inside = (
            isinstance(before, str)
            and before.endswith("{")
            and isinstance(after, str)
            and after.startswith("}")
        )
        return "${workspace}" if inside else Mark.WORKSPACE.value  # not `{{workspace}}`, which is a literal
    text = part.replace(Mark.WORKSPACE.value, "{{workspace}}")
    followed = text + ("{" if isinstance(after, Mark) else "")
    return re.sub(r"\$(?=\{)", "$$", followed)[: -1 if isinstance(after, Mark) else None]

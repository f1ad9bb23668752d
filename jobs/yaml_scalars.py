"""What a word of a configuration without quotes is: null, a truth value, a number, or a string.

YAML 1.2's core schema, minus numbers that other readers take for other numbers (`010`, `0x1F`, `1_000`) or
that no comparison survives (`.nan`, `.inf`, `1e999`). So `on`, `no`, `1:30` and `2026-01-02` are strings, and
`1e-3` is a number; PyYAML's own schema, that of YAML 1.1, says otherwise for each of them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from torchrelay.records import dataclass

LIMIT_DIGITS = 300

_WORDS: Mapping[str, bool | None] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NO_NUMBER = re.compile(
    r"[-+]?(0[0-9_]+|0[xo][0-9a-fA-F_]+|[0-9][0-9_]*_[0-9_]*|\.(inf|Inf|INF)|\.(nan|NaN|NAN))"
)


@dataclass(frozen=True)
class NotOne:
    """A word that does not mean one thing; `message` says why and what to write instead."""

    message: str


def plain(text: str) -> bool | int | float | str | NotOne | None:
    """The value of a word."""
    if text in _WORDS:
        return _WORDS[text]
    if _NO_NUMBER.fullmatch(text):
        return NotOne(
            f"{short(text)} is another number, or none, elsewhere: write a plain decimal number, "
            "or quote it if it is a word"
        )
    if not _FLOAT.fullmatch(text):
        return text
    if len(text) > LIMIT_DIGITS:
        return NotOne(f"a number of {len(text)} characters")
    if _INTEGER.fullmatch(text):
        return int(text)
    value = float(text)
    return value if math.isfinite(value) else NotOne(f"{short(text)} is beyond what a float can hold")


def short(value: object) -> str:
    """A value as messages show it: on one line and not long."""
    text = repr(value) if isinstance(value, str) else str(value).partition("\n")[0]
    return text if len(text) <= 60 else f"{text[:57]}..."

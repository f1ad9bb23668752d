"""GPUs by number, in the ways in which they are written."""

from __future__ import annotations

import re
from typing import Any

from torchrelay.jobs.config.forms import At, Form, Json
from torchrelay.records import dataclass

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

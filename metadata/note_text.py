"""The JSON of notes, which anybody may have changed: read so that no value of theirs surprises a reader."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

DEPTH_LIMIT = 100
"""Containers within containers; our own notes have about six."""
_DIGITS = 300


def read_note(data: bytes | str) -> Any:
    """The value of a JSON text. Its numbers are finite, and whole ones have a float beside them.

    Raises ValueError for anything else, for what JSON does not have (NaN), and for what is nested deeper
    than 100 levels. Text may hold anything, halves of surrogate pairs included: paths have them.
    """
    try:
        value = _DECODER.decode(data if isinstance(data, str) else data.decode())
    except RecursionError:
        raise ValueError(f"nested deeper than {DEPTH_LIMIT} levels") from None
    _check_depth(value)
    return value


def _float(text: str) -> float:
    value = float(text)
    if math.isfinite(value):
        return value
    raise ValueError(f"{text:.40} is larger than any number here")


def _int(text: str) -> int:
    if len(text) > _DIGITS:
        raise ValueError(f"{text:.40}... is larger than any number here")
    return int(text)


def _constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is no JSON")


_DECODER = json.JSONDecoder(parse_float=_float, parse_int=_int, parse_constant=_constant)


def _check_depth(value: Any) -> None:
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(DEPTH_LIMIT):
        containers = (one.values() if isinstance(one, dict) else one for one in level)
        level = [inner for one in containers for inner in one if isinstance(inner, (dict, list))]
        if not level:
            return
    raise ValueError(f"nested deeper than {DEPTH_LIMIT} levels")

"""How the value of a leaf changed, for people: of a dict only the entries that did."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchrelay.checkpoint.format.value_decoding import decode
from torchrelay.errors import RelayError

_ENTRIES, _SHOWN, _DIGITS = 3, 40, 8
_LIBRARIES = ("numpy", "ndarray")  # and those with a dot, torch.dtype


def value_change(before: Any, after: Any) -> str:
    """`last_epoch 1 -> 3`, or `0.1 -> 0.2`, of two values in their typed JSON."""
    a, b = _decoded(before), _decoded(after)
    if not isinstance(a, Mapping) or not isinstance(b, Mapping):
        return f"{_short(a)} -> {_short(b)}"
    changed = [key for key in dict.fromkeys([*a, *b]) if repr(a.get(key, _GONE)) != repr(b.get(key, _GONE))]
    told = [f"{key} {_short(a.get(key, _GONE))} -> {_short(b.get(key, _GONE))}" for key in changed[:_ENTRIES]]
    more = [f"{len(changed) - _ENTRIES} more"] if changed[_ENTRIES:] else []
    return ", ".join([*told, *more]) or "the order of entries"


class _Gone:
    """Stands for an entry that is not there."""

    def __repr__(self) -> str:
        return "none"


_GONE = _Gone()


def _decoded(value: Any) -> Any:
    """The value itself, unless it takes a library to have it."""
    try:
        return decode(value) if _plain(value) else value
    except RelayError:  # it refers to a tensor, say
        return value


def _plain(json: Any) -> bool:
    if isinstance(json, list):
        return all(map(_plain, json))
    if not isinstance(json, dict):
        return True
    if "$" not in json:
        return all(map(_plain, json.values()))
    kind = json["$"]
    return isinstance(kind, str) and kind.isidentifier() and kind not in _LIBRARIES and _plain(json.get("v"))


def _short(value: Any) -> str:
    text = repr(value)
    if isinstance(value, float) and len(text) > _DIGITS:
        text = f"{value:.6g}"
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."

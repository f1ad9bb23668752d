"""What differs between two configurations of a run, in a line for people. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

RESOLVED = "resolved.yaml"
"""The text of a run's configuration that has every value, defaults too."""
_NAMED = 4
_SHOWN = 40


def setting_changes(before: bytes, now: bytes) -> str:
    """The keys that differ with both values, `a.b 1 -> 2`; a few are named, the rest is counted."""
    from torchrelay.jobs.config.yaml_reader import read_findings  # yaml is for runs of configurations alone

    old, new = dict(_leaves(read_findings(before).value)), dict(_leaves(read_findings(now).value))
    names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    named = [f"{name} {_shown(old.get(name))} -> {_shown(new.get(name))}" for name in names[:_NAMED]]
    more = len(names) - _NAMED
    return ", ".join(named + ([f"{more} more"] if more > 0 else [])) or "other files"


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted paths and values; items of lists by their `name`, as overrides call them."""
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        named = [one.get("name") if isinstance(one, dict) else None for one in value]
        items = [(name or at, one) for at, (name, one) in enumerate(zip(named, value, strict=True))]
    else:
        yield path, value
        return
    for name, one in items:
        yield from _leaves(one, f"{path}.{name}" if path else str(name))


def _shown(value: Any) -> str:
    return "unset" if value is None else f"{value}"[:_SHOWN]

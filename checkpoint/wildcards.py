"""What a pattern means: a name with all below it, or any text that `*`, `?` and `[...]` stand for."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase

_WILD = re.compile(r"[*?\[]")


def is_pattern(text: str) -> bool:
    """Whether a text stands for any names that look like it."""
    return _WILD.search(text) is not None


def matches(name: str, pattern: str) -> bool:
    """Whether a pattern means a leaf."""
    if is_pattern(pattern):
        return fnmatchcase(name, pattern)
    return name == pattern or name.startswith(f"{pattern}.")


def matches_any(name: str, patterns: Iterable[str]) -> bool:
    """Whether one of the patterns means a leaf."""
    return any(matches(name, pattern) for pattern in patterns)

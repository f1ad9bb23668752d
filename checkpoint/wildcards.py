"""What a pattern means: a name with all below it, or any text that `*`, `?` and `[...]` stand for."""

from __future__ import annotations

import re
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

"""The name that somebody probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_SHOWN = 12


def nearest(given: str, names: Iterable[str]) -> str | None:
    """The one of `names` that is most like `given`, None where none is like it; letters' case aside."""
    by_lower = {name.lower(): name for name in sorted(names, reverse=True)}
    found = difflib.get_close_matches(given.lower(), list(by_lower), n=1, cutoff=0.6)
    return by_lower[found[0]] if found else None


def hint(given: str, names: Iterable[str]) -> str:
    """`did you mean ...?`, else the names there are; empty where there are none."""
    known = sorted(names)
    if (best := nearest(given, known)) is not None:
        return f"did you mean `{best}`?"
    if not known:
        return ""
    more = f" and {len(known) - _SHOWN} more" if len(known) > _SHOWN else ""
    return f"there is {', '.join(f'`{name}`' for name in known[:_SHOWN])}{more}"

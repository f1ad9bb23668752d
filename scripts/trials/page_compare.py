"""Whether a program printed what a page shows: the same words and counts, in their order.

What differs from one run to the next is not compared: numbers with a decimal point, with a unit of time or
size or in a clock time, hexadecimal names of eight characters and more, white space. `...` stands for
anything, alone on its line for any lines; lines that the page omits before and after are ignored.
"""

from __future__ import annotations

import re

_LOOSE = (
    (r"\d{4}-\d\d-\d\d", "D"),
    (r"\d+:\d\d(?::\d\d)?", "T"),
    (r"\b(?=[0-9a-f]*\d)[0-9a-f]{8,}\b", "H"),
    (r"\b\d[\d,]*\.\d+(?:e[+-]?\d+)?%?", "N"),
    (r"\b\d[\d,]*(?= ?(?:s|ms|min|h|B|kB|KB|KiB|MB|MiB|GB|GiB|bytes?)\b)", "N"),
    (r"[─━-]{3,}", "---"),
)


def _plain(line: str) -> str:
    for pattern, word in _LOOSE:
        line = re.sub(pattern, word, line)
    return " ".join(line.split())


def _pattern(shown: str) -> re.Pattern[str]:
    parts = [".*" if part == "..." else re.escape(part) for part in re.split(r"(\.\.\.)", _plain(shown))]
    return re.compile("".join(parts).replace(r"\ .*", ".*").replace(r".*\ ", ".*"))


def missing(shown: str, printed: str) -> str | None:
    """The first line of a page that was not printed behind the one before it; None if all were."""
    lines = [_plain(line) for line in printed.splitlines()]
    at, skipping = -1, True
    for line in shown.splitlines():
        if not line.strip():
            continue
        if line.strip() == "...":
            skipping = True
            continue
        pattern = _pattern(line)
        until = len(lines) if skipping else min(at + 2, len(lines))
        found = next((n for n in range(at + 1, until) if pattern.fullmatch(lines[n])), None)
        if found is None:
            return line
        at, skipping = found, not lines[found + 1 : found + 2] or not lines[found + 1]
    return None

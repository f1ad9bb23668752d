"""What differs between two states of source: names, and lines where it is text."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping

from torchrelay.records import dataclass

_SHOWN = 8
_LARGEST_TEXT = 4 << 20


@dataclass(frozen=True)
class Changes:
    """Names, sorted."""

    added: tuple[str, ...]
    changed: tuple[str, ...]
    removed: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.added or self.changed or self.removed)

    def __str__(self) -> str:
        words = [*self.changed, *(f"+{one}" for one in self.added), *(f"-{one}" for one in self.removed)]
        more = f" and {len(words) - _SHOWN} more" if len(words) > _SHOWN else ""
        return ", ".join(words[:_SHOWN]) + more


NO_CHANGES = Changes((), (), ())


@dataclass(frozen=True)
class FileDiff:
    """One file of a difference; no `lines` where it is no text."""

    name: str
    lines: tuple[str, ...] | None

    @property
    def counts(self) -> tuple[int, int]:
        """Lines that came, lines that went."""
        body = (self.lines or ())[2:]
        return sum(one.startswith("+") for one in body), sum(one.startswith("-") for one in body)


def changes(old: Mapping[str, str], new: Mapping[str, str]) -> Changes:
    """Compare names and digests, as `snapshot.of_manifest` gives them."""
    both = old.keys() & new.keys()
    return Changes(
        tuple(sorted(new.keys() - old.keys())),
        tuple(sorted(name for name in both if old[name] != new[name])),
        tuple(sorted(old.keys() - new.keys())),
    )


def file_diffs(
    found: Changes, old: Callable[[str], bytes], new: Callable[[str], bytes]
) -> Iterator[FileDiff]:
    """The unified differences of the files that differ, in the order of their names."""
    for name in sorted((*found.added, *found.changed, *found.removed)):
        before = b"" if name in found.added else old(name)
        after = b"" if name in found.removed else new(name)
        sides = (
            ("/dev/null" if name in found.added else f"a/{name}"),
            ("/dev/null" if name in found.removed else f"b/{name}"),
        )
        yield FileDiff(name, _lines(before, after, *sides))


def _lines(before: bytes, after: bytes, from_name: str, to_name: str) -> tuple[str, ...] | None:
    texts = [_text(before), _text(after)]
    if texts[0] is None or texts[1] is None:
        return None
    lines = difflib.unified_diff(texts[0], texts[1], from_name, to_name, lineterm="")
    shown: list[str] = []
    for line in lines:
        shown.append(line.removesuffix("\n"))
        if not line.endswith("\n") and line[:1] in "+- " and not line.startswith(("+++ ", "--- ")):
            shown.append("\\ No newline at end of file")
    return tuple(shown)


def _text(data: bytes) -> list[str] | None:
    if len(data) > _LARGEST_TEXT or b"\0" in data:
        return None
    try:
        return _split(data.decode())
    except UnicodeDecodeError:
        return None


def _split(text: str) -> list[str]:
    """Lines with their ends; other characters that Python takes for ends of lines stay within."""
    lines = text.split("\n")
    ended = [f"{line}\n" for line in lines[:-1]]
    return [*ended, lines[-1]] if lines[-1] else ended

"""The code blocks of the pages: what each of them is, and how it is tried.

| block | is |
|---|---|
| `python` | run, in one namespace per page |
| any with `title="name"` | written into that file; YAML, JSON and TOML are read, too |
| `console` | lines that begin with `$ ` are run by one shell per page, what stands below them is compared |
| `text` right behind one of these | what it printed, compared |
| `yaml`, `json`, `toml` | read |

`<!-- not run: REASON -->` before a block excuses it. `<!-- fresh: REASON -->` leaves it to runs in a fresh
environment (`scripts/tutorial --fresh`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RUN = frozenset({"python", "console"})
READ = frozenset({"yaml", "json", "toml"})
_FENCE = re.compile(r"^(?P<indent> *)(?P<fence>```+)(?P<info>[^\n`]*)\n", re.MULTILINE)
_MARK = re.compile(r"<!-- (not run|fresh): ([^>]+?) -->\s*\Z")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page. `line` is that of its text, from 1; `excuse`, `fresh`: reasons, or empty."""

    page: str
    line: int
    language: str
    title: str
    text: str
    excuse: str = ""
    fresh: str = ""
    follows: bool = False
    """Whether nothing but an empty line is between this block and the one before."""

    @property
    def place(self) -> str:
        """Where it stands, as editors understand it."""
        return f"{self.page}:{self.line}"

    @property
    def is_output(self) -> bool:
        """Whether this is what the block before it printed."""
        return self.language == "text" and self.follows and not self.excuse

    @property
    def is_tried(self) -> bool:
        """Whether the general way can do something with it."""
        return bool(self.title) or self.language in RUN | READ or self.is_output


def blocks_of(page: Path) -> list[Block]:
    """All fenced blocks of a page, in order. Raises ValueError for a fence that does not end."""
    text = page.read_text()
    name = str(page.relative_to(ROOT)) if page.is_relative_to(ROOT) else page.name
    found: list[Block] = []
    end = 0
    while (start := _FENCE.search(text, end)) is not None:
        line = text.count("\n", 0, start.end()) + 1
        stop = re.compile(rf"^ *{start['fence']} *$", re.MULTILINE).search(text, start.end())
        if stop is None:
            raise ValueError(f"{name}:{line}: the block does not end")
        before = text[end : start.start()]
        mark = _MARK.search(before)
        kind, reason = (mark[1], mark[2]) if mark is not None else ("", "")
        language, _, rest = start["info"].strip().partition(" ")
        title = re.search(r'title="([^"]+)"', rest)
        content = text[start.end() : stop.start()]
        content = re.sub(rf"^{start['indent']}", "", content, flags=re.MULTILINE)
        found.append(
            Block(
                name, line, language, title[1] if title else "", content,
                excuse=reason if kind == "not run" else "", fresh=reason if kind == "fresh" else "",
                follows=bool(found) and not before.strip(),
            )
        )  # fmt: skip
        end = stop.end()
    return found


def pages() -> list[Path]:
    """The README and every page of the site."""
    return [ROOT / "README.md", ROOT / "benchmarks/README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def own_test(page: Path) -> Path | None:
    """The test of its own that runs the blocks of this page: it is called after it, and names it."""
    if page == ROOT / "README.md":
        return ROOT / "tests/test_readme.py"
    named = (ROOT / "tests").rglob(f"test_{page.stem.replace('-', '_')}_page.py")
    path = str(page.relative_to(ROOT))
    return next((test for test in sorted(named) if path in test.read_text()), None)

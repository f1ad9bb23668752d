"""What a page for people from an ancestor says: its headings, cells, bullets and sentences."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

GUIDES = Path(__file__).resolve().parents[2] / "docs/guides"
PROGRAM, WORDS, PURPOSE = "A program, there and here", "Words", "What is different, on purpose"
AFTER_WORD = re.compile(r": (?=(?:[^`]*`[^`]*`)*[^`]*$)")
"""A colon that is not in code."""


@dataclass
class Page:
    """A page, taken apart; its code is left out."""

    ancestor: str = ""
    sections: list[str] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    """What stands before their program and ours, as `Here:`."""
    rows: list[list[str]] = field(default_factory=list)
    """The words of its list, and what they are here."""
    purpose: list[str] = field(default_factory=list)
    """What is different on purpose."""
    sentences: list[str] = field(default_factory=list)
    """All other text."""
    comments: list[str] = field(default_factory=list)
    """What our programs on it say beside the code; names of files are left out."""

    @property
    def words(self) -> list[str]:
        """The words of the ancestor."""
        return [row[0] for row in self.rows]

    def take(self, block: str) -> None:
        """Add what stands between two empty lines."""
        text = " ".join(block.split())
        section = self.sections[-1] if self.sections else ""
        if text.startswith("# "):
            self.ancestor = text.removeprefix("# From ")
        elif text.startswith("## "):
            self.sections.append(text.removeprefix("## "))
        elif section == WORDS and text.startswith("- "):
            self.rows += [AFTER_WORD.split(one, maxsplit=1) for one in _bullets(block)]
        elif section == PURPOSE:
            self.purpose += _bullets(block)
        elif (section == WORDS and text.endswith("here:")) or (
            section == PROGRAM and text.endswith(":") and text.startswith((self.ancestor, "Here"))
        ):
            self.labels.append(text)
        else:
            self.sentences += re.split(r"(?<=[.:])\s+(?=[A-Z`\[])", text)


def _bullets(block: str) -> list[str]:
    return [" ".join(one.split()) for one in re.split(r"(?:^|\n)- ", block) if one.strip()]


def _comments(text: str) -> list[str]:
    """The comments of all code but the ancestor's own."""
    blocks = re.findall(r"(?<!-->\n)^```(?:python|yaml).*?\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    found = [one for block in blocks for one in re.findall(r"(?:^|  )# (.+)$", block, re.MULTILINE)]
    return [one for one in found if not re.fullmatch(r"\S+\.(?:py|yaml)", one)]


def text_of(name: str) -> str:
    """The page of an ancestor as it is written."""
    return (GUIDES / f"migrate-{name}.md").read_text()


def read_page(name: str) -> Page:
    """The page of an ancestor, taken apart."""
    page = Page(comments=_comments(text_of(name)))
    text = re.sub(r"^```.*?^```$", "", text_of(name), flags=re.MULTILINE | re.DOTALL)
    for block in re.split(r"\n\s*\n", re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)):
        if block.strip():
            page.take(block.strip())
    return page

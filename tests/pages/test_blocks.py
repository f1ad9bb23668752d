"""Every code block of every page is run, read, or excused with a reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from page_blocks import READ, ROOT, Block, blocks_of, own_test, pages
from page_compare import missing
from page_run import commands
from paged import run_page

APART = {"tutorial.md"}
"""Has a test of its own, in a clone."""
COMMON = [
    page for page in pages()
    if own_test(page) is None and page.name not in APART and any(not one.excuse for one in blocks_of(page))
]  # fmt: skip


def fate(block: Block, own: Path | None) -> str:
    """What becomes of a block; empty if nothing does."""
    if block.excuse:
        return "excused"
    if own is not None and block.language not in READ | {"text"}:
        return "run by the page's own test"
    if block.is_tried:
        return "run or read"
    return ""


def test_no_block_is_left_out(tell: Callable[[str], None]) -> None:
    """Each block is one that something runs or reads, or says in a comment right before it why it is not."""
    fates: Counter[str] = Counter()
    forgotten = []
    for page in pages():
        for block in blocks_of(page):
            fates[fate(block, own_test(page))] += 1
            forgotten += [] if fate(block, own_test(page)) else [block.place]
    assert not forgotten, f"say `<!-- not run: REASON -->` before these, or make them run: {forgotten}"
    tell("code blocks of the pages: " + ", ".join(f"{count} {name}" for name, count in fates.most_common()))


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", COMMON, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_page_runs(page: Path, tmp_path: Path) -> None:
    """The blocks of the page do what it says, in their order, and print what it shows."""
    counts = run_page(page, tmp_path / "folder")
    assert sum(counts.values()) == len(blocks_of(page))


def test_what_is_shown_is_compared(tmp_path: Path) -> None:
    """Numbers that differ from run to run are no matter; other words, counts and left-out lines are found."""
    printed = (
        "2026-11-22 07:12:46 I epoch 1/5 done | loss 0.5007\n\nname  bytes\na     1.2 kB\nb     3 kB\nend\n"
    )
    assert missing("2025-01-01 00:00:00 I epoch 1/5 done | loss 9.1\n", printed) is None
    assert missing("name bytes\na 7.5 kB\nb 900 kB\n", printed) is None
    assert missing("... epoch 1/5 ...\n...\nend\n", printed) is None
    assert missing("I epoch 2/5 done\n", printed) == "I epoch 2/5 done"
    assert missing("a 1.2 kB\nend\n", printed) == "end"
    assert missing("b 3 kB\n...\na 1.2 kB", printed) == "a 1.2 kB"
    (tmp_path / "page.md").write_text(
        "<!-- not run: a reason -->\n\n```console\n$ x\n```\n\n```python\n1\n```\n\n```text\n1\n```\n"
        "\nand\n\n```text\n2\n```\n"
    )
    first, code, out, other = blocks_of(tmp_path / "page.md")
    assert first.excuse == "a reason" and (code.is_tried, out.is_output, other.is_tried) == (
        True,
        True,
        False,
    )
    assert commands("$ a \\\n  b\nsaid\n$ c\n") == [("a   b", "said\n"), ("c", "")]

"""The tutorial, followed to the letter in a fresh clone."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from page_blocks import blocks_of
from paged import run_page
from torchrun import REPOSITORY


def git(folder: Path, *words: str, given: str | None = None) -> str:
    """What a git command in a folder printed."""
    return subprocess.run(
        ["git", "-C", str(folder), *words],
        input=given,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout


def clone(to: Path) -> Path:
    """A clone of this repository, with what was changed in files since the last commit."""
    git(REPOSITORY, "clone", "--quiet", "--local", str(REPOSITORY), str(to))
    changed = git(REPOSITORY, "diff", "--binary", "HEAD")
    if changed:
        git(to, "apply", "--whitespace=nowarn", given=changed)
    return to


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.timeout(300)
def test_the_tutorial_works_in_a_fresh_clone(tmp_path: Path) -> None:
    """Typed as it stands, in a clone, the tutorial does and prints what it says; installing is left out."""
    pytest.importorskip("sklearn")
    here = clone(tmp_path / "torchrelay")
    counts = run_page(here / "docs/tutorial.md", here, source=here)
    assert counts == {"excused": 1, "run": len(blocks_of(here / "docs/tutorial.md")) - 1}
    failures = [
        text for text in (here / "runs/digits/events.0.jsonl").read_text().splitlines() if "failure" in text
    ]
    assert failures and all("rank 1 on" in text and "died unexpectedly" in text for text in failures)
    assert (here / "report.html").exists() and (here / "runs/whole/status.json").exists()

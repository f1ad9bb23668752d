"""The documentation as a site: built strictly, every link leads somewhere, every public name is told."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from page_blocks import ROOT

import torchrelay
from torchrelay.jobs.config.schema import key_table


class _Page(HTMLParser):
    """What a page links to, what can be linked to in it, and whether it asks anybody else for something."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.names: set[str] = {""}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.names |= {found.get("id", ""), found.get("name", "")}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        elif tag in ("img", "script", "iframe") and "src" in found:
            self.loaded.append(found["src"])
        elif tag == "link" and found.get("rel") != "canonical":
            self.loaded.append(found.get("href", ""))


@pytest.mark.slow
def test_the_site_is_built_strictly(tmp_path: Path) -> None:
    """Nothing is warned about; links and anchors lead somewhere, nothing is fetched; each key has a row."""
    pytest.importorskip("material", reason="pip install -e '.[docs]'")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(tmp_path / "site")],
        cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, timeout=110,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stdout + done.stderr
    site = tmp_path / "site"
    read = {path: _Page(path.read_text()) for path in site.rglob("*.html")}
    assert site / "tutorial.html" in read and site / "reference/runs.html" in read
    for path, page in read.items():
        if path.name == "404.html":  # its links are those of a server's root
            continue
        for to in [*page.links, *page.loaded]:
            parts = urlsplit(to)
            if parts.scheme in ("http", "https", "mailto") or parts.netloc:
                assert to not in page.loaded, (path, to)
                continue
            there = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            there = there / "index.html" if there.is_dir() else there
            assert there.exists(), (path, to)
            assert there not in read or unquote(parts.fragment) in read[there].names, (path, to)
    assert not any("::: torchrelay" in path.read_text() for path in read)
    keys = re.findall(r"^\| `(\w+)`", key_table(), re.MULTILINE)
    assert len(keys) > 90 and set(keys) <= set(
        re.findall(r"<code>(\w+)</code>", (site / "configuration.html").read_text())
    )


def test_every_public_name_is_in_the_reference() -> None:
    """A name that can be had from torchrelay stands on one page of the reference, and no other does."""
    told = [
        name
        for page in (ROOT / "docs/reference").glob("*.md")
        for name in re.findall(r"^::: torchrelay\.(\w+)$", page.read_text(), re.MULTILINE)
    ]
    assert sorted(told) == sorted(({*torchrelay.__all__} - {"__version__", "RelayError"}) | {"errors"})

"""A hook of MkDocs: the site has the files that its pages link to, and the table of configuration keys.

A page may link to any file of the repository, as it may where it is read there. In the site such a file
is a page of its own below `repository/`, shown as code, or as a page where it is Markdown; links to
folders become words. So every link works from a disk, without a network and without an address of a host.
A link to what is not there stays as it is: the strict build then names it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

ROOT = Path(__file__).resolve().parents[2]
FOLDER = "repository"
PICTURES = (".svg", ".png")
LINK = re.compile(r"!?\[(?P<text>(?:[^\[\]]|\[[^\]]*\])*)\]\((?P<to>[^)\s#:]+)(?P<anchor>#[^)\s]*)?\)")
CODE = re.compile(r"^( *)(```+|~~~+).*?^\1\2 *$", re.MULTILINE | re.DOTALL)
LANGUAGES = {".py": "python", ".yaml": "yaml", ".toml": "toml", ".md": "markdown", ".txt": "text"}


def target(source: str, to: str) -> str | None:
    """The path in the repository that a link of a file means; None outside of the repository."""
    path = os.path.normpath(os.path.join(os.path.dirname(source), to))  # noqa: PTH118, PTH120 - a path in a text
    return None if path.startswith(("..", "/")) else path


def page_of(path: str) -> str:
    """Where a file of the repository is shown, relative to docs/."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path.endswith(PICTURES):
        return f"{FOLDER}/{path}"
    return f"{FOLDER}/{path}" if path.endswith(".md") else f"{FOLDER}/{path}.md"


def links_of(markdown: str) -> list[re.Match[str]]:
    """The links of a page that name files, code blocks left out."""
    fences = [one.span() for one in CODE.finditer(markdown)]
    return [one for one in LINK.finditer(markdown) if not any(a <= one.start() < b for a, b in fences)]


def rewritten(markdown: str, source: str) -> str:
    """The page with links to files of the repository turned to their pages in the site."""
    here = os.path.dirname(page_of(source))  # noqa: PTH120 - a path in a text
    for one in reversed(links_of(markdown)):
        path = target(source, one["to"])
        if path is None or not (ROOT / path).exists():
            continue
        if (ROOT / path).is_dir():
            new = one["text"]
        else:
            to = os.path.relpath(page_of(path), here or ".")
            mark = "!" * one[0].startswith("!")
            new = f"{mark}[{one['text']}]({to}{one['anchor'] or ''})"
        markdown = markdown[: one.start()] + new + markdown[one.end() :]
    return markdown


def linked_files(pages: list[str]) -> list[str]:
    """The files outside of docs/ that these pages link to, and those that Markdown among them links to."""
    found: dict[str, None] = {}
    waiting = list(pages)
    while waiting:
        source = waiting.pop()
        for one in links_of((ROOT / source).read_text()):
            path = target(source, one["to"])
            if path is None or path.startswith("docs/") or path in found or not (ROOT / path).is_file():
                continue
            found[path] = None
            waiting += [path] if path.endswith(".md") else []
    return sorted(found)


def shown(path: str) -> str:
    """A file of the repository as a page."""
    text = (ROOT / path).read_text()
    if path.endswith(".md"):
        return text
    fence = "`" * max(3, 1 + max((len(one) for one in re.findall(r"`+", text)), default=0))
    language = LANGUAGES.get(Path(path).suffix, "python" if "python" in text.partition("\n")[0] else "text")
    return f"# {path}\n\n{fence}{language}\n{text.rstrip()}\n{fence}\n"


def as_lists(markdown: str) -> str:
    """Lists as they are read elsewhere: right after a line of text, nested by two spaces.

    Python-Markdown wants an empty line before a list, and four spaces before what is inside of an item.
    """
    lines: list[str] = []
    fenced = in_list = False
    for line in markdown.splitlines():
        item = re.match(r"( *)(?:[-*]|\d+\.) ", line)
        if re.match(r" *(```|~~~)", line):
            fenced = not fenced
        elif not fenced and item is not None:
            if not in_list and lines and lines[-1].strip():
                lines.append("")
            in_list = True
            if len(item[1]) in (2, 3):
                line = "    " + line.lstrip()  # noqa: PLW2901
        elif not fenced and not line.strip():
            in_list = False
        lines.append(line)
    return "\n".join(lines) + "\n"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for every linked file."""
    from mkdocs.structure.files import File

    pages = [f"docs/{file.src_uri}" for file in files.documentation_pages()]
    for path in linked_files(pages):
        if path.endswith(PICTURES):
            files.append(File.generated(config, page_of(path), abs_src_path=str(ROOT / path)))
        else:
            files.append(File.generated(config, page_of(path), content=shown(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn the links of a page; add the table of keys to the one about configurations."""
    uri = page.file.src_uri
    source = uri.removeprefix(f"{FOLDER}/") if uri.startswith(f"{FOLDER}/") else f"docs/{uri}"
    if not (ROOT / source).exists():
        return markdown  # code, which has no links
    if uri == "configuration.md":
        from torchrelay.jobs.config.schema import key_table

        markdown += key_table()
    return as_lists(rewritten(markdown, source))

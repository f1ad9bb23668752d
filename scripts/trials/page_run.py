"""Runs the blocks of one page in their order, in a folder: `python page_run.py PAGE FOLDER [--fresh]`.

Prints what each block did and, as its last line, how many were run, read and excused. Exit code 1 at the
first block that differs from the page: a program that fails, another exit code than `# exit code N` says
(else 0), a line of output that is not printed. Nothing runs longer than `--secs` in all.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from page_blocks import RUN, Block, blocks_of
from page_compare import missing
from page_shell import Shell, ShellError


class PageError(Exception):
    """A block that is not as the page says."""


class PageRun:
    """One page in one folder, with a namespace for its programs and a shell for its commands."""

    def __init__(
        self, folder: Path, shell: Shell, *, secs: float, fresh: bool, tell: Callable[[str], None]
    ) -> None:
        self.folder, self.shell, self.fresh, self.tell = folder, shell, fresh, tell
        self.until = time.monotonic() + secs
        self.names: dict[str, Any] = {"__name__": "__main__"}
        self.printed = ""
        self.counts: Counter[str] = Counter()

    def run(self, blocks: list[Block]) -> None:
        """All blocks. Raises PageError."""
        for block in blocks:
            if block.excuse or (block.fresh and not self.fresh):
                self.counts["excused"] += 1
                continue
            self.tell(f"--- {block.place} {block.language} {block.title}".rstrip())
            self._one(block)
            read = not block.is_output and (block.language not in RUN)
            self.counts["read" if read else "run"] += 1

    def _one(self, block: Block) -> None:
        if block.is_output:
            self._compare(block.place, block.text, self.printed)
        elif block.title:
            self._write(block)
        elif block.language == "python":
            self._python(block)
        elif block.language == "console":
            self._console(block)
        else:
            self._read(block)

    def _write(self, block: Block) -> None:
        path = self.folder / block.title
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block.text)
        if block.language == "python":
            compile(block.text, block.title, "exec")
        self._read(block)

    def _read(self, block: Block) -> None:
        try:
            _READERS.get(block.language, str)(block.text)
        except Exception as error:
            raise PageError(f"{block.place}: cannot be read: {error}") from error

    def _python(self, block: Block) -> None:
        out = io.StringIO()
        before = Path.cwd()
        os.chdir(self.folder)
        try:
            with redirect_stdout(out), redirect_stderr(out):
                exec(compile("\n" * (block.line - 1) + block.text, block.page, "exec"), self.names)
        except SystemExit as end:
            if end.code not in (None, 0):
                raise PageError(f"{block.place}: ended with {end.code}\n{out.getvalue()}") from end
        except Exception as error:
            raise PageError(f"{block.place}:\n{out.getvalue()}\n{traceback.format_exc()}") from error
        finally:
            os.chdir(before)
        self.printed = out.getvalue()
        self.tell(self.printed.rstrip())

    def _console(self, block: Block) -> None:
        self.printed = ""
        for line, shown in commands(block.text):
            code = re.search(r"# exit code (\d+)\s*$", line)
            try:
                got, said = self.shell.run(line, max(1.0, self.until - time.monotonic()))
            except ShellError as error:
                raise PageError(f"{block.place}: {error}") from error
            self.tell(f"$ {line}\n{said.rstrip()}")
            wanted = int(code[1]) if code is not None else 0
            if got != wanted:
                raise PageError(f"{block.place}: `{line}` ended with {got} instead of {wanted}\n{said}")
            self._compare(block.place, shown, said)
            self.printed += said

    def _compare(self, place: str, shown: str, printed: str) -> None:
        line = missing(shown, printed)
        if line is not None:
            raise PageError(f"{place}: the page shows\n    {line}\nbut this was printed:\n{printed}")


def commands(text: str) -> list[tuple[str, str]]:
    """The typed lines of a console block, a backslash continuing one, with what is shown below each."""
    found: list[tuple[str, str]] = []
    for line in text.replace("\\\n", "").splitlines():
        if line.startswith("$ "):
            found.append((line[2:], ""))
        elif found:
            found[-1] = (found[-1][0], f"{found[-1][1]}{line}\n")
        elif line.strip():
            raise PageError(f"a console block begins with output: {line!r}")
    return found


def _yaml(text: str) -> object:
    import yaml

    return yaml.safe_load(text)


def _toml(text: str) -> object:
    import tomllib

    return tomllib.loads(text)


_READERS: dict[str, Callable[[str], object]] = {"yaml": _yaml, "toml": _toml, "json": json.loads}


def main() -> int:
    """Run a page; 0 if all is as it says."""
    parser = argparse.ArgumentParser(prog="scripts/tutorial", usage="%(prog)s [-h] [--fresh]")
    parser.add_argument("page", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--fresh", action="store_true", help="also what is left to fresh environments")
    parser.add_argument("--secs", type=float, default=100.0, help="for the whole page")
    asked = parser.parse_args()
    sys.path.insert(0, str(asked.folder))

    def tell(text: str) -> None:
        print(text, flush=True)

    with Shell(asked.folder, os.environ) as shell:
        page = PageRun(asked.folder, shell, secs=asked.secs, fresh=asked.fresh, tell=tell)
        try:
            page.run(blocks_of(asked.page.resolve()))
        except PageError as error:
            tell(f"\nNOT AS THE PAGE SAYS: {error}")
            return 1
    print(json.dumps(dict(page.counts)))
    return 0


if __name__ == "__main__":
    sys.exit(main())

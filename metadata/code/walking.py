"""The files below a directory where no git tells: by suffix and size, with the rules of `.gitignore`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torchrelay.errors import UsageError
from torchrelay.metadata.code.source_names import is_junk

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

MOST_ENTRIES = 20_000
"""A tree with more is no project but somebody's home."""
_RULES = ".gitignore"
_LARGEST_RULES = 1 << 20


class Walk:
    """One look through a tree; `names` has what is not ignored, of any suffix. Links are not followed."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.names: set[str] = set()
        self._seen = 0

    def run(self) -> Walk:
        """Look; raises UsageError for a tree that is too large."""
        self._enter("", ())
        return self

    def _enter(self, folder: str, above: tuple[tuple[str, GitIgnoreSpec], ...]) -> None:
        try:
            with os.scandir(self.root / folder) as found:
                entries = sorted(found, key=lambda entry: entry.name)
        except OSError:
            return  # whoever may not look there cannot run what lies there
        self._seen += len(entries)
        if self._seen > MOST_ENTRIES:
            raise UsageError(
                f"{self.root} has more than {MOST_ENTRIES} files and is in no git repository: name the "
                "directories of the source (code=[...])"
            )
        names = {entry.name for entry in entries}
        if folder and (is_run(names) or "pyvenv.cfg" in names):
            return
        rules = (*above, (folder, own)) if (own := self._rules(folder, names)) is not None else above
        for entry in entries:
            name = f"{folder}{entry.name}"
            directory = entry.is_dir(follow_symlinks=False)
            if is_junk(entry.name) or _ignored(f"{name}/" if directory else name, rules):
                continue
            if directory:
                self._enter(f"{name}/", rules)
            else:
                self.names.add(name)

    def _rules(self, folder: str, names: set[str]) -> GitIgnoreSpec | None:
        if _RULES not in names:
            return None
        try:
            path = self.root / folder / _RULES
            if path.stat().st_size > _LARGEST_RULES:
                return None
            return patterns(path.read_text(errors="replace").splitlines())
        except OSError:
            return None


def is_run(names: set[str]) -> bool:
    """Whether a directory with these names in it is a run's, or holds checkpoints."""
    if {"run.json", "checkpoints"} <= names:
        return True
    return "log" in names and len(names & {"job.json", "data", "writer.json"}) > 1


def patterns(lines: Sequence[str]) -> GitIgnoreSpec:
    """Patterns in the language of `.gitignore`; raises UsageError for one that is none."""
    from pathspec import GitIgnoreSpec

    try:
        return GitIgnoreSpec.from_lines(lines)
    except ValueError as error:
        raise UsageError(f"a pattern cannot be understood: {error}") from None


def _ignored(name: str, rules: tuple[tuple[str, GitIgnoreSpec], ...]) -> bool:
    """The innermost file of rules that says something counts."""
    for folder, spec in reversed(rules):
        said = spec.check_file(name[len(folder) :]).include
        if said is not None:
            return said
    return False

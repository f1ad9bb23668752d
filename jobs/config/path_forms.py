"""Paths in a configuration: relative ones begin at the workspace, never where somebody stands."""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchrelay.jobs.config.forms import At, Form, Json
from torchrelay.jobs.config.nearest import nearest
from torchrelay.jobs.directories import split_run
from torchrelay.jobs.yaml_scalars import short
from torchrelay.records import dataclass

_WORKSPACE = "workspace"
_VARIABLE = re.compile(r"(?:^|/)\$([A-Za-z_]\w*)(?:/|$)")
_BRACES = re.compile(r"\{([A-Za-z_]\w*)\}")
_WORDS = {"best": "best", "last": "last", "latest": "last"}


@dataclass(frozen=True)
class PathAt(Form):
    """A path or a URL. Becomes a text: a URL as it is, a path absolute. Nothing is looked up."""

    word = "a path or URL"
    textual = True

    def take(self, value: Any, at: At) -> Any:
        """The absolute path, or the URL."""
        if not isinstance(value, str) or not value.strip():
            return at.expected(self, value)
        if any(unicodedata.category(one) in ("Cc", "Cs") for one in value):
            return at.wrong(f"{short(value)} has control characters: choose another path")
        if (remedy := unreplaced(value)) is not None:
            return at.wrong(f"{short(value)}: {remedy}")
        return value if "://" in value else str(local_path(value, at.reading.workspace))

    def json_schema(self) -> Json:
        """As JSON Schema."""
        return {"type": "string", "minLength": 1}


@dataclass(frozen=True)
class WeightsAt(PathAt):
    """Where weights lie: a path or URL, of a run also with its epoch. The empty text means none."""

    word = "a path or URL, of a run also with its epoch: `RUN@7`, `RUN@best` (an empty text: none)"

    def take(self, value: Any, at: At) -> Any:
        """As of a path; None for the empty text."""
        return None if value == "" else super().take(value, at)

    def normal(self, value: Any) -> Any:
        """The empty text is null."""
        return value or None

    def json_schema(self) -> Json:
        """As JSON Schema."""
        return {"type": "string"}


def unreplaced(text: str) -> str | None:
    """What to write in place of a word that looks as if it were replaced, and is not; None without one."""
    if (found := _VARIABLE.search(text)) is not None:
        return f"variables are not replaced like this: write `${{env:{found[1]}}}`"
    words = [word for word in _BRACES.findall(text) if word != _WORKSPACE and nearest(word, [_WORKSPACE])]
    return f"`{{{words[0]}}}` is no name: did you mean `{{{_WORKSPACE}}}`?" if words else None


def split_epoch(text: str, exists: Callable[[str], bool] = os.path.exists) -> tuple[str, int | str | None]:
    """`RUN@7` and `RUN@best` taken apart; None where no epoch stands there, or the whole name exists."""
    run, epoch = split_run(text, exists)
    if epoch is not None and epoch.isdecimal():
        return run, int(epoch)
    return (run, _WORDS[epoch]) if epoch in _WORDS else (text, None)


def split_weights(text: str) -> tuple[str, int | str | None]:
    """What `init_model_path` names, also as `RUN/7`. What exists under the whole name is meant as it is."""
    run, epoch = split_epoch(text)
    folder, _, last = text.rpartition("/")
    if epoch is None and folder and last.isdecimal() and "://" not in text and not os.path.exists(text):  # noqa: PTH110
        return folder, int(last)
    return run, epoch


def local_path(text: str, workspace: Path) -> Path:
    """`~` is the user's home, what is relative begins at the workspace; links are not followed."""
    expanded = os.path.expanduser(text) if text.startswith("~") else text  # noqa: PTH111 - keeps unknown users
    return Path(os.path.normpath(workspace / expanded))

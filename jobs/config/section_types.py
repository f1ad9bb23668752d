"""Types of special values: paths, weights, class paths, GPUs, choices of epochs."""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, Literal

from torchrelay.jobs.config.tree import nearest
from torchrelay.jobs.config.types import A_TEXT, EXPRESSION, MISFIT, At, Json, One, described
from torchrelay.jobs.config.yaml_reader import short
from torchrelay.jobs.runtime import split_run
from torchrelay.records import dataclass

_WORKSPACE = "workspace"
_VARIABLE = re.compile(r"(?:^|/)\$([A-Za-z_]\w*)(?:/|$)")
_BRACES = re.compile(r"\{([A-Za-z_]\w*)\}")
_SAVED = {"best": "best", "last": "last", "latest": "last"}


def _path(value: Any, at: At) -> Any:
    """The absolute path, or the URL."""
    if not isinstance(value, str) or not value.strip():
        return MISFIT
    if any(unicodedata.category(one) in ("Cc", "Cs") for one in value):
        return at.wrong(f"{short(value)} has control characters: choose another path")
    if (remedy := unreplaced(value)) is not None:
        return at.wrong(f"{short(value)}: {remedy}")
    return value if "://" in value else str(local_path(value, at.reading.workspace))


PATH = One("a path or URL", A_TEXT, textual=True, check=_path)
"""A path or a URL. Becomes a text: a URL as it is, a path absolute. Nothing is looked up."""
WEIGHTS = One(
    "a path or URL, of a run also with its epoch: `RUN@7`, `RUN@best` (an empty text: none)",
    {"type": "string"},
    textual=True,
    check=lambda value, at: None if value == "" else _path(value, at),
    written=lambda value: value or None,
)
"""Where weights lie."""


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
    return (run, _SAVED[epoch]) if epoch in _SAVED else (text, None)


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


_NAME = r"[^\W\d]\w*"
_MODULE = re.compile(rf"(?P<module>{_NAME}(?:\.{_NAME})*):(?P<name>{_NAME})")
_FILE = re.compile(rf"(?P<file>.*\.py)(?::(?P<name>{_NAME}))?")
_ANCESTOR = "paddlerec."


@dataclass(frozen=True)
class ClassPath:
    """A class by name in a file, or in a module that can be imported: one of `file` and `module` is set.

    `text` is what the user wrote, `{workspace}` and the like replaced.
    """

    text: str
    name: str
    file: Path | None = None
    module: str | None = None

    def __str__(self) -> str:
        return self.text


def class_at(default: str) -> One:
    """A class; of a file without `:Class` the one that is called `default`. The file must be there."""
    word = f"`file.py` with a class `{default}`, `file.py:Class` or `module:Class`"
    return One(word, A_TEXT, textual=True, check=partial(_class, default, word))


def _class(default: str, word: str, value: Any, at: At) -> Any:
    """A ClassPath; nothing is imported."""
    if not isinstance(value, str):
        return MISFIT
    if value.startswith(_ANCESTOR):
        return at.wrong(f"{short(value)} is in PaddleRec's package: copy the file into the workspace")
    if (found := _FILE.fullmatch(value)) is not None:
        return _class_of_file(value, found["file"], found["name"] or default, at)
    if (found := _MODULE.fullmatch(value)) is not None:
        return ClassPath(value, found["name"], module=found["module"])
    module, dot, name = value.rpartition(".")
    written = f"{module}:{name}"
    remedy = f": write {written}" if dot and _MODULE.fullmatch(written) else ""
    return at.wrong(f"expected {word}, not {described(value)}{remedy}")


def _class_of_file(value: str, path: str, name: str, at: At) -> Any:
    file, source = local_path(path, at.reading.workspace), at.reading.source
    if source is not None and file.is_relative_to(at.reading.workspace):
        file = source / file.relative_to(at.reading.workspace)
    if not os.path.isfile(file):  # noqa: PTH113 - False for a name too long
        remedy = unreplaced(value)
        return at.wrong(f"there is no file {file}{'' if remedy is None else f': {remedy}'}")
    return ClassPath(value, name, file=file)


_NUMBERS = re.compile(r"\s*\d{1,4}\s*(,\s*\d{1,4}\s*)*")
_WHOLE: Json = {"type": "integer", "minimum": 0}
_WHOLES: Json = {"type": "array", "items": _WHOLE, "minItems": 1}


def _numbers(value: Any) -> list[int]:
    """Empty where the value is none of the forms."""
    if isinstance(value, str):
        return [int(one) for one in value.split(",")] if _NUMBERS.fullmatch(value) else []
    listed = value if isinstance(value, list) else [value]
    return listed if all(type(one) is int and one >= 0 for one in listed) else []


def _gpus(value: Any, at: At) -> Any:
    found = _numbers(value)
    if len(set(found)) < len(found):
        return at.wrong("a GPU stands there twice")
    return tuple(found) or MISFIT


GPUS = One(
    "numbers of GPUs: `0`, `[0, 1]` or `0,1`",
    {"anyOf": [_WHOLE, _WHOLES, A_TEXT]},
    textual=True,
    check=_gpus,
    written=_numbers,
)
"""The numbers as a tuple; each may stand once."""


Kind = Literal["latest", "best", "all", "numbers"]
_RANGE = re.compile(r"(0|[1-9][0-9]{0,5})\.\.(0|[1-9][0-9]{0,5})?")
_WORDS: dict[str, Kind] = {"latest": "latest", "last": "latest", "best": "best", "all": "all"}


@dataclass(frozen=True)
class EpochChoice:
    """`kind`, and for `numbers` either the `listed` epochs, in order, or those from `first` to `last`.

    An epoch's number is 0 after init and k after k epochs. `last` belongs to the range; None: it has no end.
    """

    kind: Kind
    listed: tuple[int, ...] = ()
    first: int = 0
    last: int | None = None

    def chosen(self, available: Iterable[int], best: int | None = None) -> list[int]:
        """Of the epochs that are there those which are meant, in order of their numbers.

        `best` is the best one, None where none is known. What was asked for by number and is not there is
        told by `absent`.
        """
        there = sorted(set(available))
        if self.kind in ("all", "latest"):
            return there if self.kind == "all" else there[-1:]
        if self.kind == "best":
            return [one for one in there if one == best]
        if self.listed:
            return [one for one in self.listed if one in set(there)]
        return [one for one in there if self.first <= one and (self.last is None or one <= self.last)]

    def absent(self, available: Iterable[int]) -> list[int]:
        """The epochs that were asked for by number, or within a range that has an end, and are not there."""
        there = set(available)
        if self.kind != "numbers":
            return []
        wanted = self.listed or (() if self.last is None else range(self.first, self.last + 1))
        return [one for one in wanted if one not in there]


def _epochs(value: Any, at: At) -> Any:
    if type(value) is int and value >= 0:
        return EpochChoice("numbers", (value,))
    if isinstance(value, str) and value in _WORDS:
        return EpochChoice(_WORDS[value])
    if isinstance(value, str) and (found := _RANGE.fullmatch(value)):
        first, last = int(found[1]), int(found[2]) if found[2] else None
        if last is not None and last < first:
            return at.wrong(f"the range {value} is empty: write {last}..{first}")
        return EpochChoice("numbers", first=first, last=last)
    if isinstance(value, list) and value and all(type(one) is int and one >= 0 for one in value):
        return EpochChoice("numbers", tuple(sorted(set(value))))
    return MISFIT


_RANGES: Json = {"type": "string", "pattern": r"^(0|[1-9][0-9]*)\.\.(0|[1-9][0-9]*)?$"}
EPOCHS = One(
    "an epoch, a list of epochs, a range such as `1..5` or `3..`, `latest`, `best` or `all`",
    {"anyOf": [_WHOLE, _WHOLES, {"enum": list(_WORDS)}, _RANGES, EXPRESSION]},
    textual=False,
    check=_epochs,
)
"""The form of `epoch:`; becomes an EpochChoice."""

"""Which file a configuration is that was named by its directory, or by the name of a package."""

from __future__ import annotations

import importlib.util
import re
from contextlib import suppress
from pathlib import Path

_FILE = "config.yaml"
_PACKAGE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


def file_within(text: str) -> str:
    """A path as it is; of a directory the `config.yaml` in it. Imports nothing.

    What cannot be looked at is returned as it is too, and so is the empty text, which names nothing.
    """
    with suppress(OSError, ValueError):
        return str(Path(text) / _FILE) if text and Path(text).is_dir() else text
    return text


def config_file(text: str) -> str:
    """A path as it is; of a directory, and of a package that can be found, the `config.yaml` in it.

    A package is looked for below the working directory, then where imports are. What is neither is returned
    as it is too, so that reading it says what is wrong. Of a dotted name the packages around it are imported.
    """
    if (found := file_within(text)) != text:
        return found
    if Path(text).exists() or not _PACKAGE.fullmatch(text):
        return text
    here = Path(*text.split("."), _FILE)  # the directory of a command is not among the places of imports
    if here.is_file():
        return str(here.absolute())
    try:
        spec = importlib.util.find_spec(text)
    except ImportError:
        return text
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    return next((str(Path(one) / _FILE) for one in folders if (Path(one) / _FILE).is_file()), text)

"""Functions by name, as orders carry them: `package.module:name`, or `/a/file.py:name`."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchrelay.errors import UsageError

_known: dict[str, Callable[..., Any]] = {}


def function_of(text: str) -> Callable[..., Any]:
    """The function of a name; kept, so that a file is run once in a process."""
    if text not in _known:
        where, _, name = text.rpartition(":")
        _known[text] = getattr(_module(where), name)
    return _known[text]


def name_of(function: Callable[..., Any]) -> str:
    """The name by which a fresh process finds a function; UsageError for one inside of another."""
    file = inspect.getsourcefile(function)
    name = getattr(function, "__qualname__", "")
    if file is None or not name.isidentifier():
        raise UsageError(f"{function!r:.80} must stand at the top of a file: a fresh process calls it")
    return f"{Path(file).resolve()}:{name}"


def on_path(function: str, root: str) -> object:
    """Call a function with a directory."""
    return function_of(function)(Path(root))


def _module(where: str) -> Any:
    if not where.endswith(".py"):
        return importlib.import_module(where)
    name = f"_chaos_{Path(where).stem}"
    spec = importlib.util.spec_from_file_location(name, where)
    if spec is None or spec.loader is None:
        raise UsageError(f"{where} is no program")
    sys.path.insert(0, str(Path(where).parent))
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

"""From what is typed, `script.py` or `module:Class`, to the program; its verb is then done."""

from __future__ import annotations

import importlib
import os
import runpy
import sys
from pathlib import Path

from torchrelay.errors import UsageError
from torchrelay.runners.experiment.entry import perform
from torchrelay.runners.experiment.program import Program
from torchrelay.runners.experiment.request import Request
from torchrelay.runners.training.exit import hand_over, run_and_leave


def load_and_perform(target: str, request: Request) -> None:
    """Do it and end the process, as the program would by itself; raises UsageError for a bad target."""
    path = Path(target)
    if path.suffix == ".py" or path.is_file():
        _run_script(path, request)
        raise UsageError(f"{target} does not end with torchrelay.main(...): add it, or give module:Class")
    program = _of_module(target)
    run_and_leave(lambda: perform(program, request))


def _run_script(path: Path, request: Request) -> None:
    if not path.is_file():
        raise UsageError(f"there is no script {path}")
    sys.argv = [str(path), request.verb]
    sys.path[0] = str(path.resolve().parent)
    hand_over(request, str(path))
    try:
        runpy.run_path(str(path), run_name="__main__")
    finally:
        hand_over(None)


def _of_module(target: str) -> type[Program]:
    module, colon, name = target.partition(":")
    if module.endswith(".py"):
        raise UsageError(
            f"{target}: a script is given without a class, {module}; a class by package.module:Class"
        )
    if not (colon and name and all(part.isidentifier() for part in module.split("."))):
        raise UsageError(f"{target!r} is no program: give script.py, or package.module:Class")
    sys.path.insert(0, os.getcwd())  # noqa: PTH109 - the text
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError as error:
        if error.name and (module == error.name or module.startswith(f"{error.name}.")):
            raise UsageError(f"there is no module {error.name} for {target}, seen from here") from None
        raise
    if not (isinstance(found, type) and issubclass(found, Program)):
        raise UsageError(f"{module} has no {name} that is a torchrelay.Program")
    return found

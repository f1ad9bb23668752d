"""`torchrelay.main`: the last line of a user's script, and what happens when its verbs are typed.

    torchrelay.main(Digits)

acts only where the script is the program: that is so when the class was made in the module `__main__`,
which no import ever is, however the interpreter was started (by torchrun, a debugger, runpy, a test runner).
No call stack is looked at. A class of another module cannot tell, so that the caller has to:
`torchrelay.main(Digits, __name__)`.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from torchrelay.errors import UsageError
from torchrelay.runners.programs.command_context import status
from torchrelay.runners.programs.eval import evaluate, package
from torchrelay.runners.programs.perform import perform_scene
from torchrelay.runners.programs.program import Program, Scene
from torchrelay.runners.programs.request import VerbRequest, read_request
from torchrelay.runners.programs.run_selection import imported
from torchrelay.runners.programs.test import test
from torchrelay.runners.programs.train import amend, train
from torchrelay.runners.training.exit import hand_over, run_and_leave, taken


def _server(scene: Scene) -> int:
    """Serve a run. The only call of a room above: it is imported when it is asked for."""
    from torchrelay.tools.serving.program_server import serve_program

    return serve_program(scene)


_VERBS: dict[str, Callable[[Scene], int]] = {
    "train": train,
    "test": test,
    "eval": evaluate,
    "server": _server,
    "status": status,
    "amend": lambda scene: amend(scene, scene.fit),
    "package": package,
}


def main(program: type[Program], module: str | None = None, argv: Sequence[str] | None = None) -> None:
    """Do what the command line asks, and end the process; does nothing where the script is imported.

    `module` is the caller's `__name__`; without it the class's module counts. `argv` are the words behind
    the script's name. A user's mistake is one line and the code 2, never a traceback.
    """
    if not (isinstance(program, type) and issubclass(program, Program)):
        raise UsageError(f"main({program!r:.60}): give the class, a subclass of torchrelay.Program")
    if (module or program.__module__) != "__main__":
        _check_told(program, module)
        return
    run_and_leave(lambda: perform(program, taken() or read_request(argv)))


def perform(program: type[Program], request: VerbRequest) -> int:
    """Do it in this process, or in one on archived code; returns the exit code."""
    return perform_scene(
        request, lambda archived, _: Scene(program, request, archived), lambda: _VERBS[request.verb]
    )


def _check_told(program: type[Program], module: str | None) -> None:
    """Refuse to do nothing where nobody said that this is an import: the class's own import is over."""
    spec = getattr(sys.modules.get(program.__module__), "__spec__", None)
    if module is None and spec is not None and not getattr(spec, "_initializing", False):
        raise UsageError(
            f"main({program.__name__}) cannot tell whether this script is imported, because the class is of "
            f"{program.__module__}: write torchrelay.main({program.__name__}, __name__)"
        )


def load_and_perform(target: str, request: VerbRequest) -> None:
    """Do it and end the process, as the program would by itself; raises UsageError for a bad target."""
    path = Path(target)
    if path.suffix == ".py" or path.is_file():
        if not path.is_file():
            raise UsageError(f"there is no script {path}")
        sys.argv = [str(path), request.verb]
        sys.path[0] = str(path.resolve().parent)
        hand_over(request, str(path))
        try:
            runpy.run_path(str(path), run_name="__main__")
        finally:
            hand_over(None)
        raise UsageError(f"{target} does not end with torchrelay.main(...): add it, or give module:Class")
    program = _of_module(target)
    run_and_leave(lambda: perform(program, request))


def _of_module(target: str) -> type[Program]:
    module, colon, name = target.partition(":")
    if module.endswith(".py"):
        raise UsageError(
            f"{target}: a script is given without a class, {module}; a class by package.module:Class"
        )
    if not (colon and name and all(part.isidentifier() for part in module.split("."))):
        raise UsageError(f"{target!r} is no program: give script.py, or package.module:Class")
    found = imported(module, name, target)
    if not (isinstance(found, type) and issubclass(found, Program)):
        raise UsageError(f"{module} has no {name} that is a torchrelay.Program")
    return found

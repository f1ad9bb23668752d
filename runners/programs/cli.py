"""`torchrelay.main`, the last line of a user's script, and the execution of its subcommands.

    torchrelay.main(Digits)

runs only if the script is the program: if the class was defined in the module `__main__`, however the
interpreter was started (torchrun, a debugger, runpy, a test runner). The call stack is not inspected. A class
imported from another module needs the caller's name: `torchrelay.main(Digits, __name__)`.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from torchrelay.errors import UsageError
from torchrelay.runners.programs.command_context import status
from torchrelay.runners.programs.eval import evaluate, package
from torchrelay.runners.programs.perform import perform_command
from torchrelay.runners.programs.program import Program, ProgramCommand
from torchrelay.runners.programs.request import VerbRequest, read_request
from torchrelay.runners.programs.run_selection import imported
from torchrelay.runners.programs.test import test
from torchrelay.runners.programs.train import amend, train
from torchrelay.runners.training.exit import hand_over, run_and_leave, taken


def _server(command: ProgramCommand) -> int:
    """Serve a run. The only call of a higher package, therefore imported lazily."""
    from torchrelay.tools.serving.program_server import serve_program

    return serve_program(command)


_VERBS: dict[str, Callable[[ProgramCommand], int]] = {
    "train": train,
    "test": test,
    "eval": evaluate,
    "server": _server,
    "status": status,
    "amend": lambda command: amend(command, command.fit),
    "package": package,
}


def main(program: type[Program], module: str | None = None, argv: Sequence[str] | None = None) -> None:
    """Run the subcommand of the command line and exit; does nothing if the script is imported.

    A user's mistake is one line and exit code 2, never a traceback.

    Args:
        program: The class of the program.
        module: The caller's `__name__`; default: the module of the class.
        argv: The arguments after the script's name; default: `sys.argv[1:]`.

    Raises:
        UsageError: `program` is not a subclass of `Program`.

    Example:
        torchrelay.main(Digits)
    """
    if not (isinstance(program, type) and issubclass(program, Program)):
        raise UsageError(f"invalid main({program!r:.60}): expected a subclass of torchrelay.Program")
    if (module or program.__module__) != "__main__":
        _check_not_imported(program, module)
        return
    run_and_leave(lambda: perform(program, taken() or read_request(argv)))


def perform(program: type[Program], request: VerbRequest) -> int:
    """Run a subcommand in this process, or in one on archived code; returns the exit code."""
    return perform_command(
        request, lambda archived, _: ProgramCommand(program, request, archived), lambda: _VERBS[request.verb]
    )


def _check_not_imported(program: type[Program], module: str | None) -> None:
    """Raise UsageError if it is unknown whether the script is imported."""
    spec = getattr(sys.modules.get(program.__module__), "__spec__", None)
    if module is None and spec is not None and not getattr(spec, "_initializing", False):
        raise UsageError(
            f"main({program.__name__}) cannot detect an import of this script, because the class is in "
            f"{program.__module__}: write torchrelay.main({program.__name__}, __name__)"
        )


def load_and_perform(target: str, request: VerbRequest) -> None:
    """Run a subcommand of a program and exit; raises UsageError for a bad target."""
    path = Path(target)
    if path.suffix == ".py" or path.is_file():
        if not path.is_file():
            raise UsageError(f"script {path} does not exist")
        sys.argv = [str(path), request.verb]
        sys.path[0] = str(path.resolve().parent)
        hand_over(request, str(path))
        try:
            runpy.run_path(str(path), run_name="__main__")
        finally:
            hand_over(None)
        raise UsageError(f"{target} does not end with torchrelay.main(...): add that line")
    program = _of_module(target)
    run_and_leave(lambda: perform(program, request))


def _of_module(target: str) -> type[Program]:
    """Import the class of `package.module:Class`."""
    module, colon, name = target.partition(":")
    if module.endswith(".py"):
        raise UsageError(
            f"invalid {target}: expected the script {module} without a class, or package.module:Class"
        )
    if not (colon and name and all(part.isidentifier() for part in module.split("."))):
        raise UsageError(f"invalid program {target!r}: expected script.py or package.module:Class")
    found = imported(module, name, target)
    if not (isinstance(found, type) and issubclass(found, Program)):
        raise UsageError(f"{module} has no torchrelay.Program named {name}")
    return found

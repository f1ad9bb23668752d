"""`torchrelay.main`: the last line of a user's script, and what happens when its verbs are typed.

    torchrelay.main(Digits)

acts only where the script is the program: that is so when the class was made in the module `__main__`,
which no import ever is, however the interpreter was started (by torchrun, a debugger, runpy, a test runner).
No call stack is looked at. A class of another module cannot tell, so that the caller has to:
`torchrelay.main(Digits, __name__)`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence

from torchrelay.errors import UsageError
from torchrelay.runners.experiment.amend_verb import amend
from torchrelay.runners.experiment.archived import run_archived
from torchrelay.runners.experiment.archived_process import MARK
from torchrelay.runners.experiment.evaluation_verb import evaluate
from torchrelay.runners.experiment.packaging_verb import package
from torchrelay.runners.experiment.program import Program
from torchrelay.runners.experiment.request import Request, read_request
from torchrelay.runners.experiment.scene import Scene
from torchrelay.runners.experiment.server_verb import server
from torchrelay.runners.experiment.status_verb import status
from torchrelay.runners.experiment.testing_verb import test
from torchrelay.runners.experiment.training_verb import train
from torchrelay.runners.training.exit import run_and_leave, taken

_VERBS: dict[str, Callable[[Scene], int]] = {
    "train": train,
    "test": test,
    "eval": evaluate,
    "server": server,
    "status": status,
    "amend": lambda scene: amend(scene, scene.fit),
    "package": package,
}
_ON_ONE_RANK = ("status", "amend", "package")
_WITH_ARCHIVED_CODE = ("test", "eval", "server", "package")


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


def perform(program: type[Program], request: Request) -> int:
    """Do it in this process, or in one on archived code; returns the exit code."""
    archived = os.environ.pop(MARK, None)
    if request.verb in _ON_ONE_RANK and os.environ.get("RANK", "0") != "0":
        return 0
    scene = Scene(program, request, archived)
    if request.run_id is not None and archived is None and request.verb in _WITH_ARCHIVED_CODE:
        code = run_archived(scene)
        if code is not None:
            return code
    return _VERBS[request.verb](scene)


def _check_told(program: type[Program], module: str | None) -> None:
    """Refuse to do nothing where nobody said that this is an import: the class's own import is over."""
    spec = getattr(sys.modules.get(program.__module__), "__spec__", None)
    if module is None and spec is not None and not getattr(spec, "_initializing", False):
        raise UsageError(
            f"main({program.__name__}) cannot tell whether this script is imported, because the class is of "
            f"{program.__module__}: write torchrelay.main({program.__name__}, __name__)"
        )

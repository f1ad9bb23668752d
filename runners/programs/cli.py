"""`torchrelay.main`, the last line of a user's script, and the execution of subcommands.

    torchrelay.main(Digits)

runs only if the script is the program: if the class was defined in the module `__main__`, however the
interpreter was started (torchrun, a debugger, runpy, a test runner). The call stack is not inspected. A class
imported from another module needs the caller's name: `torchrelay.main(Digits, __name__)`.

For `--run ID` a process of its own runs the archived code on the unpacked archive; this process only waits
and does not import torch. Classes come from the archive; data and results keep their paths.
"""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrelay.errors import UsageError
from torchrelay.metadata.code.archive import open_archive, unpack_source
from torchrelay.metadata.experiments import ProgramRun
from torchrelay.runners.config_runs.processes import signals_to
from torchrelay.runners.programs.command_context import BaseCommand, ConfigCommand
from torchrelay.runners.programs.request import VerbRequest, read_request
from torchrelay.runners.programs.run_selection import captured_code, imported
from torchrelay.runners.training.exit import hand_over, run_and_leave, taken

if TYPE_CHECKING:
    from torchrelay.runners.programs.program import Program

_VERBS = {
    "train": ("train:train", "train:train_configuration"),
    "test": ("evaluate:test", "evaluate:test_configuration"),
    "eval": ("evaluate:evaluate", "evaluate:evaluate_configuration"),
    "status": ("command_context:status", "command_context:status"),
    "amend": ("train:amend", "train:amend"),
    "package": ("evaluate:package", ""),
}
"""The function of each subcommand for a program and for a configuration, imported when it runs."""

MARK = "TORCHRELAY_ARCHIVED"
"""The run that a process on archived code works for; removed from its environment at once."""
SOURCE = "TORCHRELAY_ARCHIVED_SOURCE"
"""The directory of its unpacked archive; removed from its environment, too."""
RESOLVED = "resolved.yaml"
_ON_ONE_RANK = ("status", "amend", "package")


def run_process(run: ProgramRun, verb: str, words: Sequence[str], target: str | None = None) -> int:
    """Run a subcommand with the archived code of a run; returns its exit code.

    `target` is `module:Class`, needed if the program was not a script; empty for a configuration only. Raises
    UsageError for a run whose source was not archived.
    """
    captured = captured_code(run)
    folder, code = captured.get("config"), captured["code"]
    typed, script = "serve" if verb == "server" else verb, code.get("script")
    with tempfile.TemporaryDirectory(prefix="torchrelay-archived-") as scratch:
        source = Path(scratch) / "source"
        with open_archive(run.path / "code" / f"{run.note.code_id}.zip") as archive:
            unpack_source(archive, source)
        if target == "":
            program = ["-m", "torchrelay", typed]
        elif isinstance(script, str):
            program = [str(source / script), verb]
        elif target is None:
            raise UsageError(
                f"the program of {run.id} was not a script: "
                f"run torchrelay {typed} module:Class --run {run.id}"
            )
        else:
            program = ["-m", "torchrelay", typed, target]
        argv = [sys.executable, *program, *words]
        if isinstance(folder, str) and run.note.config_id is not None:
            argv += ["-m", str(run.path / folder / RESOLVED)]
        # The archive's folders come first on Python's path.
        folders = code.get("import_path")
        first = [str(source / one) for one in (folders if isinstance(folders, list) else [""])]
        before = [one for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if one]
        environment = {
            **os.environ,
            MARK: str(run.path),
            SOURCE: str(source),
            "PYTHONPATH": os.pathsep.join([*first, *before]),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        process = subprocess.Popen(argv, env=environment)  # noqa: S603 - the user's own program, as it was
        with signals_to(process, (signal.SIGTERM,)):
            try:
                return process.wait()
            except KeyboardInterrupt:  # Ctrl-C reaches both: give it time to exit
                return process.wait()
            finally:
                if process.poll() is None:
                    process.kill()
                    process.wait()


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
    from torchrelay.runners.programs.program import Program

    if not (isinstance(program, type) and issubclass(program, Program)):
        raise UsageError(f"invalid main({program!r:.60}): expected a subclass of torchrelay.Program")
    if (module or program.__module__) != "__main__":
        spec = getattr(sys.modules.get(program.__module__), "__spec__", None)
        if module is None and spec is not None and not getattr(spec, "_initializing", False):
            raise UsageError(  # it is unknown whether the script is imported
                f"main({program.__name__}) cannot detect an import of this script, because the class is in "
                f"{program.__module__}: write torchrelay.main({program.__name__}, __name__)"
            )
        return
    run_and_leave(lambda: perform(taken() or read_request(argv), program))


def perform(request: VerbRequest, program: type[Program] | None = None) -> int:
    """Run a subcommand of a program, else of the configuration, or archived code; returns the exit code."""
    archived, source = os.environ.pop(MARK, None), os.environ.pop(SOURCE, None)
    if request.verb in _ON_ONE_RANK and os.environ.get("RANK", "0") != "0":
        return 0
    command: Any
    if program is None:
        command = ConfigCommand(request, archived, None if source is None else Path(source))
    else:
        from torchrelay.runners.programs.program import ProgramCommand

        command = ProgramCommand(program, request, archived)
    if request.run_id is not None and archived is None and request.verb in command.with_archived_code:
        code = _run_archived(command)
        if code is not None:
            return code
    if request.verb == "server":  # the only call of a higher package
        from torchrelay.tools.serving.program_server import serve_config, serve_program

        return serve_config(command) if program is None else serve_program(command)
    module, _, name = _VERBS[request.verb][program is None].partition(":")
    return int(getattr(import_module(f"{__package__}.{module}"), name)(command))


def _run_archived(command: BaseCommand) -> int | None:
    """Run the subcommand with archived code; returns its exit code, None if nothing has changed."""
    request, program = command.request, command.program
    run = command.store.find(request.run_id or "")
    option, given = ("-o", request.overrides) if program is None else ("-m", request.config)
    if given:
        raise UsageError(f"--run uses the configuration of the run: remove {option}")
    captured = captured_code(run)
    workspace = (captured["code"].get("roots") or {}).get("")
    if program is None and not (isinstance(captured.get("config"), str) and isinstance(workspace, str)):
        raise UsageError(f"the configuration of {run.id} was not recorded, so it cannot be run")
    if command.identity_of(run).same(command.identity):
        return None
    if program is not None:
        return perform_archived(run, request, request.epoch, f"{program.__module__}:{program.__qualname__}")
    words = [*_options(run.path.parent, request, request.epoch), "-o", f"workspace={workspace!r}"]
    return run_process(run, request.verb, words, "")


def perform_archived(
    run: ProgramRun, request: VerbRequest, epoch: str | None, target: str | None = None
) -> int:
    """Run a subcommand with a run's archived program; UsageError if that needs a `target`."""
    return run_process(run, request.verb, _options(run.path.parent.parent, request, epoch), target)


def _options(runs: Path, request: VerbRequest, epoch: str | None) -> list[str]:
    words = [*request.paths, "--runs", str(runs)]
    words += ["--epoch", epoch] if epoch is not None else []
    words += ["--out", request.out] if request.out is not None else []
    words += request.serve.words() if request.serve is not None else []
    flags = (("--overwrite", request.overwrite), ("--retest", request.retest), ("--json", request.json))
    return words + [option for option, on in flags if on]


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
    module, colon, name = target.partition(":")
    if module.endswith(".py"):
        raise UsageError(
            f"invalid {target}: expected the script {module} without a class, or package.module:Class"
        )
    if "=" in target:
        raise UsageError(f"unexpected argument {target!r}: write -o {target}")
    if not (colon and name and all(part.isidentifier() for part in module.split("."))):
        raise UsageError(f"invalid program {target!r}: expected script.py or package.module:Class")
    from torchrelay.runners.programs.program import Program

    found = imported(module, name, target)
    if not (isinstance(found, type) and issubclass(found, Program)):
        raise UsageError(f"{module} has no torchrelay.Program named {name}")
    run_and_leave(lambda: perform(request, found))

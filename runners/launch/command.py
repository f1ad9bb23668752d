"""What is typed behind `--`, as torchrun takes it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torchrelay.errors import UsageError

_CONFIGS = (".yaml", ".yml")
_RUN = ("-m", "torchrelay", "run", "-m")


def command_of(words: Sequence[str], run: str | None) -> tuple[str, ...]:
    """A script with its arguments, or `-m MODULE ...`.

    `-m config.yaml` (or a directory with a config.yaml) is `torchrelay run` of it, which is told where the
    `run` goes. Raises UsageError where there is no command.
    """
    command = list(words[1:] if words and words[0] == "--" else words)
    if not command or command == ["-m"]:
        raise UsageError("launch what? give a script, or -m with a module or a configuration, behind --")
    if command[0] == "-m":
        return _module(command[1], command[2:], run)
    if command[0].startswith("-"):
        raise UsageError(f"launch has no option {command[0]}: options stand before --, behind it the script")
    return tuple(command)


def check_script(command: Sequence[str]) -> None:
    """Refuse a script, or a configuration, that is not there (UsageError)."""
    if command[0] != "-m" and not Path(command[0]).is_file():
        raise UsageError(f"there is no script {command[0]}: name a Python file, or -m and a module")
    if tuple(command[:4]) == _RUN and not Path(command[4]).exists():
        raise UsageError(
            f"there is no configuration {command[4]}: -m takes a YAML file, or a module of Python"
        )


def _module(name: str, rest: Sequence[str], run: str | None) -> tuple[str, ...]:
    if not (name.endswith(_CONFIGS) or (Path(name) / "config.yaml").is_file()):
        return ("-m", name, *rest)
    there = () if run is None or "--run-dir" in rest else ("--run-dir", run)
    return (*_RUN, name, *rest, *there)

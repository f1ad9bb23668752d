"""The program of a past run, from its archived source and configuration."""

from __future__ import annotations

from pathlib import Path

from torchrelay.errors import UsageError
from torchrelay.metadata.experiments import read_note
from torchrelay.runners.programs.program import Program, made_program
from torchrelay.runners.rebuilding.archives import Archives

_REMEDY = "give the model by --model module:function (model=), a callable that makes it"


def program_of(archives: Archives) -> Program:
    """A new object of the class that the run was made by.

    Raises UsageError where the archive does not have it, and what the archived code raises.
    """
    note = read_note(archives.run)
    name = None if note is None else _module_name(archives, Path(note.origin))
    if note is None or name is None:
        origin = archives.run if note is None else note.origin
        raise UsageError(f"the program {origin} is not in the archive of its run; {_REMEDY}")
    module = archives.code.import_module(name)
    kinds = [
        one
        for one in vars(module).values()
        if isinstance(one, type) and issubclass(one, Program) and one.__module__ == module.__name__
    ]
    named = [one for one in kinds if note.program in (one.name, one.__name__)] or kinds
    if len(named) != 1:
        there = ", ".join(one.__name__ for one in kinds) or "none"
        raise UsageError(f"{note.origin} has not one Program but {there}; {_REMEDY}")
    return made_program(named[0], archives.config)


def _module_name(archives: Archives, origin: Path) -> str | None:
    """How the file that a program came from is imported from its archive."""
    folders = sorted(archives.captured["code"].get("import_path") or [""], key=len, reverse=True)
    for label, root in archives.roots.items():
        if not origin.is_relative_to(root):
            continue
        inside = Path(label) / origin.relative_to(root).with_suffix("")
        for folder in folders:
            if inside.is_relative_to(folder or "."):
                parts = inside.relative_to(folder or ".").parts
                return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    return None

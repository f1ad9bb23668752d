"""The user's classes, from files by their path and from modules; `sys.path` stays as it is.

Each folder becomes a package of an unlikely name for one profile, so that two `model.py` never meet, a file
may say `from .layers import Tower`, and what an earlier profile left in its modules is not seen.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import sys
import traceback
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torchrelay.errors import UsageError
from torchrelay.jobs.config.runner_schema import Runner as RunnerKeys
from torchrelay.jobs.config.schema import Settings
from torchrelay.jobs.config.section_types import ClassPath
from torchrelay.records import dataclass
from torchrelay.runners.lifecycle.order import STEPS
from torchrelay.runners.lifecycle.selection import (
    datasets_of,
    optimizer_path,
    phases_of,
    reader_path,
)

_loads = itertools.count()
_PREFIX = "_torchrelay_"


class ClassLoadError(UsageError):
    """A class of the user cannot be had: the message has its place, its name and the original traceback."""


@dataclass(frozen=True)
class Classes:
    """What a profile needs of the user's: replaced steps by step name, models and readers by class path."""

    steps: Mapping[str, type]
    others: Mapping[str, type]

    def of(self, path: ClassPath) -> type:
        """The class of a model, reader or optimizer."""
        return self.others[_key(path)]


class Loader:
    """Loads classes of one profile; each file is imported once."""

    def __init__(self) -> None:
        self._number = next(_loads)
        self._folders: dict[Path, str] = {}

    def load(self, path: ClassPath, where: str) -> type:
        """The class; raises ClassLoadError that names the key `where` it stands."""
        place = f"{where}: {path.file or path.module} (class {path.name} is expected there)"
        try:
            with _no_bytecode():
                module = self._module(path)
        except (Exception, SystemExit) as error:
            remedy = _remedy(error, path)
            raise ClassLoadError(f"{place} cannot be imported{remedy}:\n{_users_part(error)}") from error
        found = getattr(module, path.name, None)
        if not isinstance(found, type):
            what = "has no such class" if found is None else "is no class there"
            there = [name for name, one in vars(module).items() if _is_own(one, module)]
            raise ClassLoadError(f"{place} {what}; it has {', '.join(there) or 'none'}")
        return found

    def forget(self) -> None:
        """Let the modules go."""
        for package in self._folders.values():
            for name in [one for one in sys.modules if one == package or one.startswith(f"{package}.")]:
                del sys.modules[name]

    def _module(self, path: ClassPath) -> types.ModuleType:
        if path.file is None:
            return importlib.import_module(str(path.module))
        name = f"{self._package(path.file.parent)}.{path.file.stem.replace('.', '_')}"
        if name in sys.modules:
            return sys.modules[name]
        spec = importlib.util.spec_from_file_location(name, path.file)
        if spec is None or spec.loader is None:
            raise ImportError(f"{path.file} is no Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
        return module

    def _package(self, folder: Path) -> str:
        if folder not in self._folders:
            name = f"{_PREFIX}{self._number}_{len(self._folders)}"
            package = types.ModuleType(name)
            package.__path__ = [str(folder)]
            sys.modules[name] = package
            self._folders[folder] = name
        return self._folders[folder]


def load_classes(settings: Settings, runner: RunnerKeys, loader: Loader) -> Classes:
    """Everything of the user's that a profile names; raises ClassLoadError for the first that cannot be."""
    own = f"runner.{runner.name}"
    steps = {}
    for step in STEPS:
        path = getattr(runner, step.key)
        if path is not None:
            steps[step.name] = _checked(loader.load(path, f"{own}.{step.key}"), step.name, step.older, path)
    others = {_key(path): loader.load(path, where) for where, path in _others(settings, runner)}
    return Classes(steps, others)


def _others(settings: Settings, runner: RunnerKeys) -> Iterator[tuple[str, ClassPath]]:
    for phase, _ in phases_of(settings, runner):
        yield f"phase.{phase.name}.model", phase.model
    for dataset in datasets_of(settings, runner):
        if (path := reader_path(dataset)) is not None:
            yield f"dataset.{dataset.name}.data_converter", path
    if not runner.infers and (chosen := optimizer_path(settings)) is not None:
        yield "hyper_parameters.optimizer.class", chosen


def _checked(found: type, method: str, older: str, path: ClassPath) -> type:
    if not any(callable(getattr(found, name, None)) for name in (method, older)):
        raise ClassLoadError(f"{path}: class {found.__name__} has no method {method}(self, context)")
    return found


def _key(path: ClassPath) -> str:
    return f"{path.file or path.module}:{path.name}"


def _remedy(error: BaseException, path: ClassPath) -> str:
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if missing and f"{path.module}.".startswith(f"{missing}."):
        return f" (modules are looked for where Python looks; of a file write {path.module}.py:{path.name})"
    if path.file is not None and missing and (path.file.parent / f"{missing}.py").is_file():
        return f" (for the file beside it write `from . import {missing}` or `from .{missing} import ...`)"
    return ""


def _users_part(error: BaseException) -> str:
    """The traceback without our own frames and those of the import system."""
    own = (__file__, "importlib")
    step = error.__traceback__
    while step is not None and any(
        one in step.tb_frame.f_code.co_filename for one in (own[1], Path(own[0]).name)
    ):
        step = step.tb_next
    return "".join(traceback.format_exception(type(error), error, step)).rstrip()


def _is_own(value: Any, module: types.ModuleType) -> bool:
    return isinstance(value, type) and value.__module__ == module.__name__


@contextmanager
def _no_bytecode() -> Iterator[None]:
    """A start that is refused leaves nothing behind, no `__pycache__` either."""
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        yield
    finally:
        sys.dont_write_bytecode = before

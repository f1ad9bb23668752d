"""Load the user's classes from files and modules, and warn about config keys that no class reads.

Each folder becomes a package with a unique name per profile. So two files `model.py` do not collide, a file
may use `from .layers import Tower`, and modules of an earlier profile are not visible.

Checked sections: the datasets of the profile's phases, the optimizer's arguments if it trains, and
`hyper_parameters`. All profiles share the latter, so its keys are reported only after the last profile with
other classes that may read them.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import sys
import traceback
import types
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import field
from pathlib import Path

from torchrelay.errors import UsageError
from torchrelay.jobs.config.config import Config
from torchrelay.jobs.config.schema import RunnerSection, Settings
from torchrelay.jobs.config.section_types import ClassPath
from torchrelay.jobs.config.tree import ConfigError, ConfigProblem, Tracked
from torchrelay.jobs.session import Peers, decide
from torchrelay.records import dataclass
from torchrelay.runners.config_runs.context import STEPS
from torchrelay.runners.config_runs.processes import apart
from torchrelay.runners.config_runs.selection import datasets_of, optimizer_path, phases_of, reader_path
from torchrelay.runners.config_runs.user_objects import made

_loads = itertools.count()
_PREFIX = "_torchrelay_"


class ClassLoadError(UsageError):
    """A class of the user cannot be loaded; the message has its location, name and traceback."""


@dataclass(frozen=True)
class Classes:
    """The user's classes of a profile: replaced steps by step name, other classes by class path."""

    steps: Mapping[str, type]
    others: Mapping[str, type]

    def of(self, path: ClassPath) -> type:
        """Return the class of a model, reader or optimizer."""
        return self.others[_key(path)]


class Loader:
    """Loads classes of one profile; each file is imported once."""

    def __init__(self) -> None:
        self._number = next(_loads)
        self._folders: dict[Path, str] = {}

    def load(self, path: ClassPath, where: str) -> type:
        """Return the class; raises ClassLoadError naming `where`, the key that refers to it."""
        place = f"{where}: {path.file or path.module} (expected class {path.name})"
        try:
            with _no_bytecode():
                module = self._module(path)
        except (Exception, SystemExit) as error:
            remedy = _remedy(error, path)
            raise ClassLoadError(f"{place} cannot be imported{remedy}:\n{_users_part(error)}") from error
        found = getattr(module, path.name, None)
        if not isinstance(found, type):
            what = "has no such class" if found is None else "has that name, but it is not a class"
            there = [
                name
                for name, one in vars(module).items()
                if isinstance(one, type) and one.__module__ == module.__name__
            ]
            raise ClassLoadError(f"{place} {what}; its classes: {', '.join(there) or 'none'}")
        return found

    def forget(self) -> None:
        """Unload the modules."""
        for package in self._folders.values():
            for name in [one for one in sys.modules if one == package or one.startswith(f"{package}.")]:
                del sys.modules[name]

    def _module(self, path: ClassPath) -> types.ModuleType:
        """Import the module of a class, from its file if it has one."""
        if path.file is None:
            return importlib.import_module(str(path.module))
        name = f"{self._package(path.file.parent)}.{path.file.stem.replace('.', '_')}"
        if name in sys.modules:
            return sys.modules[name]
        spec = importlib.util.spec_from_file_location(name, path.file)
        if spec is None or spec.loader is None:
            raise ImportError(f"{path.file} is not a Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
        return module

    def _package(self, folder: Path) -> str:
        """Return the name of the package that stands for a folder, created on first use."""
        if folder not in self._folders:
            name = f"{_PREFIX}{self._number}_{len(self._folders)}"
            package = types.ModuleType(name)
            package.__path__ = [str(folder)]
            sys.modules[name] = package
            self._folders[folder] = name
        return self._folders[folder]


def load_classes(settings: Settings, runner: RunnerSection, loader: Loader) -> Classes:
    """Load all user classes that a profile refers to; raises ClassLoadError for the first failure."""
    own = f"runner.{runner.name}"
    steps = {}
    for step in STEPS:
        path = getattr(runner, step.key)
        if path is not None:
            steps[step.name] = found = loader.load(path, f"{own}.{step.key}")
            if not any(callable(getattr(found, name, None)) for name in (step.name, step.older)):
                raise ClassLoadError(
                    f"{path}: class {found.__name__} has no method {step.name}(self, context)"
                )
    # Models, readers and the optimizer class, each with the key that refers to it.
    others = [(f"phase.{phase.name}.model", phase.model) for phase, _ in phases_of(settings, runner)]
    for dataset in datasets_of(settings, runner):
        if (path := reader_path(dataset)) is not None:
            others.append((f"dataset.{dataset.name}.data_converter", path))
    if not runner.infers and (chosen := optimizer_path(settings)) is not None:
        others.append(("hyper_parameters.optimizer.class", chosen))
    return Classes(steps, {_key(path): loader.load(path, where) for where, path in others})


def _key(path: ClassPath) -> str:
    return f"{path.file or path.module}:{path.name}"


def _remedy(error: BaseException, path: ClassPath) -> str:
    """Suggest a fix for an import error of a user's module."""
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if missing and f"{path.module}.".startswith(f"{missing}."):
        return f" (it is not on Python's path; for a file write {path.module}.py:{path.name})"
    if path.file is not None and missing and (path.file.parent / f"{missing}.py").is_file():
        return f" (for a file in the same folder write `from . import {missing}`)"
    return ""


def _users_part(error: BaseException) -> str:
    """Format the traceback without frames of torchrelay and of the import system."""
    own = ("importlib", Path(__file__).name)
    step = error.__traceback__
    while step is not None and any(one in step.tb_frame.f_code.co_filename for one in own):
        step = step.tb_next
    return "".join(traceback.format_exception(type(error), error, step)).rstrip()


@contextmanager
def _no_bytecode() -> Iterator[None]:
    """Write no `__pycache__` in the block: a rejected launch must leave no files behind."""
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        yield
    finally:
        sys.dont_write_bytecode = before


@dataclass
class Unread:
    """Report config keys that no user code read, each once; `strict` turns the first into an error."""

    config: Config
    strict: bool = False
    reported: set[str] = field(default_factory=set)
    _started: set[ClassPath] = field(default_factory=set)

    def report(self, runner: RunnerSection, peers: Peers) -> None:
        """Report a profile's keys that rank 0 found unread; if `strict`, raise UsageError."""
        settings = self.config.settings
        self._started.update(_classes(settings, runner))
        sections = list(sections_of(settings, runner, self._started))
        useless = () if runner.infers else self.config.without_effect()
        decide(peers, "unread keys", lambda: self._report(sections, useless))

    def check_before_training(self, profiles: Sequence[tuple[RunnerSection, Classes]]) -> None:
        """If strict, raise ConfigError for unread keys of all profiles before the first one trains.

        Readers and models are built temporarily for this. Profiles with own steps, and classes that need what
        only a step provides, are checked when they have started up.
        """
        if not self.strict:
            return
        settings, made_ones, sections = self.config.settings, set[ClassPath](), dict[int, Tracked]()
        for runner, classes in profiles:
            if any(getattr(runner, step.key) is not None for step in STEPS):
                continue
            with suppress(Exception), apart():  # the profile itself will report it, with more context
                for phase, _ in phases_of(settings, runner):
                    made(classes.of(phase.model), self.config.section("hyper_parameters"))
                for dataset in datasets_of(settings, runner):
                    if (path := reader_path(dataset)) is not None:
                        made(classes.of(path), dataset)
                made_ones.update(_classes(settings, runner))
                sections |= {id(one): one for one in sections_of(settings, runner, made_ones)}
        if (optimizer := settings.hyper_parameters.optimizer) is not None:
            sections.pop(id(optimizer.arguments), None)  # all of it is read where the optimizer is made
        if found := self.config.unused(list(sections.values())):
            raise ConfigError(found, "nothing was trained")

    def report_all(self, peers: Peers) -> None:
        """Do the same for a program, which owns all user sections."""
        decide(peers, "unread keys", lambda: self._report(None))

    def _report(self, sections: Sequence[Tracked] | None, useless: Sequence[ConfigProblem] = ()) -> None:
        """Print keys without effect and unread keys of the sections (None: all), each once."""
        for one in useless:
            if one.path not in self.reported:
                sys.stderr.write(f"torchrelay: {one}\n")
        self.reported.update(one.path for one in useless)
        found = [one for one in self.config.unused(sections) if one.path not in self.reported]
        self.reported.update(one.path for one in found)
        if found and self.strict:
            raise UsageError(str(ConfigError(found, "nothing was trained")))
        if found:
            hints = [f", did you mean {one.nearest}?" if one.nearest else "" for one in found]
            keys = ", ".join(
                f"{one.path} (line {one.origin.place.line}{hint})"
                for one, hint in zip(found, hints, strict=True)
            )
            sys.stderr.write(
                f"torchrelay: {self.config.name}: keys never read: {keys} (an error with --strict-config)\n"
            )


def sections_of(
    settings: Settings, runner: RunnerSection, started: Collection[ClassPath]
) -> Iterator[Tracked]:
    """Yield the user sections that a profile and these classes should have read after start-up."""
    for dataset in datasets_of(settings, runner):
        yield dataset.extra
    optimizer = settings.hyper_parameters.optimizer
    if optimizer is not None and not runner.infers:
        yield optimizer.arguments
    if all(one in started for other in settings.runner for one in _classes(settings, other)):
        yield settings.hyper_parameters.extra


def _classes(settings: Settings, runner: RunnerSection) -> Iterator[ClassPath]:
    yield from (phase.model for phase, _ in phases_of(settings, runner))
    yield from (path for one in datasets_of(settings, runner) if (path := reader_path(one)) is not None)
    yield from (path for step in STEPS if (path := getattr(runner, step.key)) is not None)

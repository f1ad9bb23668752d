"""The user's classes, from files by their path and from modules, and keys that none of them reads.

Each folder becomes a package of an unlikely name for one profile, so that two `model.py` never meet, a file
may say `from .layers import Tower`, and what an earlier profile left in its modules is not seen.

Looked at are the sections that belong to the profile: the datasets of its phases, the arguments of the
optimizer where it trains, and `hyper_parameters`. These are everybody's, so their keys are told only when no
profile of the file is left, to be run later or not at all, that has other classes, which may read them.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import sys
import traceback
import types
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import field
from pathlib import Path

from torchrelay.errors import UsageError
from torchrelay.jobs.config.config import Config
from torchrelay.jobs.config.runner_schema import RunnerSection
from torchrelay.jobs.config.schema import Settings
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
            there = [
                name
                for name, one in vars(module).items()
                if isinstance(one, type) and one.__module__ == module.__name__
            ]
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


def load_classes(settings: Settings, runner: RunnerSection, loader: Loader) -> Classes:
    """Everything of the user's that a profile names; raises ClassLoadError for the first that cannot be."""
    own = f"runner.{runner.name}"
    steps = {}
    for step in STEPS:
        path = getattr(runner, step.key)
        if path is not None:
            steps[step.name] = _checked(loader.load(path, f"{own}.{step.key}"), step.name, step.older, path)
    others = {_key(path): loader.load(path, where) for where, path in _others(settings, runner)}
    return Classes(steps, others)


def _others(settings: Settings, runner: RunnerSection) -> Iterator[tuple[str, ClassPath]]:
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


@contextmanager
def _no_bytecode() -> Iterator[None]:
    """A start that is refused leaves nothing behind, no `__pycache__` either."""
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        yield
    finally:
        sys.dont_write_bytecode = before


@dataclass
class Unread:
    """The keys of one configuration that were told already; `strict` makes the first an error."""

    config: Config
    strict: bool = False
    told: set[str] = field(default_factory=set)
    _started: set[ClassPath] = field(default_factory=set)

    def tell(self, runner: RunnerSection, peers: Peers) -> None:
        """Say what of a profile's sections was not read, as rank 0 finds it; if `strict` raise UsageError."""
        settings = self.config.settings
        self._started.update(_classes(settings, runner))
        sections = list(sections_of(settings, runner, self._started))
        useless = () if runner.infers else self.config.without_effect()
        decide(peers, "unread keys", lambda: self._tell(sections, useless))

    def tell_ahead(self, profiles: Sequence[tuple[RunnerSection, Classes]]) -> None:
        """If strict, raise ConfigError for the dead keys of all profiles before the first one trains.

        Readers and models are made for it, and let go of. A profile with steps of its own may read anything
        in them, and a class may need what only a step gives: of these the start-up tells.
        """
        if not self.strict:
            return
        settings, made_ones, sections = self.config.settings, set[ClassPath](), dict[int, Tracked]()
        for runner, classes in profiles:
            own_steps = any(getattr(runner, step.key) is not None for step in STEPS)
            if own_steps or not _made_here(self.config, runner, classes):
                continue
            made_ones.update(_classes(settings, runner))
            sections |= {id(one): one for one in sections_of(settings, runner, made_ones)}
        optimizer = settings.hyper_parameters.optimizer
        for one in () if optimizer is None else (optimizer.arguments,):
            sections.pop(id(one), None)  # all of it is read where the optimizer is made
        if found := self.config.unused(list(sections.values())):
            raise ConfigError(found, "nothing was trained")

    def tell_all(self, peers: Peers) -> None:
        """The same for a program, to which all of the user's sections belong."""
        decide(peers, "unread keys", lambda: self._tell(None))

    def _tell(self, sections: Sequence[Tracked] | None, useless: Sequence[ConfigProblem] = ()) -> None:
        for one in useless:
            if one.path not in self.told:
                sys.stderr.write(f"torchrelay: {one}\n")
        self.told.update(one.path for one in useless)
        found = [one for one in self.config.unused(sections) if one.path not in self.told]
        self.told.update(one.path for one in found)
        if found and self.strict:
            raise UsageError(str(ConfigError(found, "nothing was trained")))
        if found:
            nearest = [f", did you mean {one.nearest}?" if one.nearest else "" for one in found]
            keys = ", ".join(
                f"{one.path} (line {one.origin.place.line}{near})"
                for one, near in zip(found, nearest, strict=True)
            )
            sys.stderr.write(
                f"torchrelay: {self.config.name}: never read: {keys}; --strict-config makes that an error\n"
            )


def _made_here(config: Config, runner: RunnerSection, classes: Classes) -> bool:
    try:
        with apart():
            for phase, _ in phases_of(config.settings, runner):
                made(classes.of(phase.model), config.section("hyper_parameters"))
            for dataset in datasets_of(config.settings, runner):
                if (path := reader_path(dataset)) is not None:
                    made(classes.of(path), dataset)
    except Exception:  # the profile itself will tell it, with all that it has by then
        return False
    return True


def sections_of(
    settings: Settings, runner: RunnerSection, started: Collection[ClassPath]
) -> Iterator[Tracked]:
    """The user's sections that are to be read when a profile, and these classes, have started up. Pure."""
    for dataset in datasets_of(settings, runner):
        yield dataset.extra
    optimizer = settings.hyper_parameters.optimizer
    if optimizer is not None and not runner.infers:
        yield optimizer.arguments
    if all(one in started for other in settings.runner for one in _classes(settings, other)):
        yield settings.hyper_parameters.extra


def _classes(settings: Settings, runner: RunnerSection) -> Iterator[ClassPath]:
    """The classes of the user that a profile uses."""
    yield from (phase.model for phase, _ in phases_of(settings, runner))
    yield from (path for one in datasets_of(settings, runner) if (path := reader_path(one)) is not None)
    yield from (path for step in STEPS if (path := getattr(runner, step.key)) is not None)

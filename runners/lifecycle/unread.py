"""Keys of the user's own that nobody reads: told once, in one line, when the start-up of a profile is over.

Looked at are the sections that belong to the profile: the datasets of its phases, the arguments of the
optimizer where it trains, and `hyper_parameters`. These are everybody's, so their keys are told only when no
profile of the file is left, to be run later or not at all, that has other classes, which may read them.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import field

from torchrelay.errors import UsageError
from torchrelay.jobs.config.config import Config
from torchrelay.jobs.config.runner_schema import Runner as RunnerKeys
from torchrelay.jobs.config.schema import Settings
from torchrelay.jobs.config.section_types import ClassPath
from torchrelay.jobs.config.tree import ConfigError, ConfigProblem, Tracked
from torchrelay.jobs.session import Peers, decide
from torchrelay.records import dataclass
from torchrelay.runners.lifecycle.apart import apart
from torchrelay.runners.lifecycle.loading import Classes
from torchrelay.runners.lifecycle.order import STEPS
from torchrelay.runners.lifecycle.selection import datasets_of, phases_of, reader_path
from torchrelay.runners.lifecycle.user_objects import made


@dataclass
class Unread:
    """The keys of one configuration that were told already; `strict` makes the first an error."""

    config: Config
    strict: bool = False
    told: set[str] = field(default_factory=set)
    _started: set[ClassPath] = field(default_factory=set)

    def tell(self, runner: RunnerKeys, peers: Peers) -> None:
        """Say what of a profile's sections was not read, as rank 0 finds it; if `strict` raise UsageError."""
        settings = self.config.settings
        self._started.update(_classes(settings, runner))
        sections = list(sections_of(settings, runner, self._started))
        useless = () if runner.infers else self.config.without_effect()
        decide(peers, "unread keys", lambda: self._tell(sections, useless))

    def tell_ahead(self, profiles: Sequence[tuple[RunnerKeys, Classes]]) -> None:
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
            sys.stderr.write(f"torchrelay: {line_of(self.config.name, found)}\n")


def _made_here(config: Config, runner: RunnerKeys, classes: Classes) -> bool:
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


def line_of(name: str, found: Sequence[ConfigProblem]) -> str:
    """All of them in one line; its end says how to make it an error."""
    keys = [f"{one.path} (line {one.origin.place.line}{_nearest(one)})" for one in found]
    return f"{name}: never read: {', '.join(keys)}; --strict-config makes that an error"


def sections_of(settings: Settings, runner: RunnerKeys, started: Collection[ClassPath]) -> Iterator[Tracked]:
    """The user's sections that are to be read when a profile, and these classes, have started up. Pure."""
    for dataset in datasets_of(settings, runner):
        yield dataset.extra
    optimizer = settings.hyper_parameters.optimizer
    if optimizer is not None and not runner.infers:
        yield optimizer.arguments
    if all(one in started for other in settings.runner for one in _classes(settings, other)):
        yield settings.hyper_parameters.extra


def _classes(settings: Settings, runner: RunnerKeys) -> Iterator[ClassPath]:
    """The classes of the user that a profile uses."""
    yield from (phase.model for phase, _ in phases_of(settings, runner))
    yield from (path for one in datasets_of(settings, runner) if (path := reader_path(one)) is not None)
    yield from (path for step in STEPS if (path := getattr(runner, step.key)) is not None)


def _nearest(problem: ConfigProblem) -> str:
    return f", did you mean {problem.nearest}?" if problem.nearest else ""

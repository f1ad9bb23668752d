"""A program and a request: what the verbs of a program begin with."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

from torchrelay.jobs.config.config import Config, load_config
from torchrelay.jobs.config.interpolation import RunPlace
from torchrelay.jobs.config.runner_schema import Runner
from torchrelay.records import dataclass
from torchrelay.runners.experiment.amend_verb import load_what_is_there
from torchrelay.runners.experiment.base_scene import BaseScene
from torchrelay.runners.experiment.origin import Origin, origin_of
from torchrelay.runners.experiment.program import Program, made_program
from torchrelay.runners.experiment.request import Request


@dataclass(frozen=True)
class Scene(BaseScene):
    """A program and a request."""

    program: type[Program]
    request: Request
    archived: str | None = None
    rename = "name = ... in the class"

    @property
    def title(self) -> str:
        """The name of the class."""
        return self.program.__name__

    @cached_property
    def origin(self) -> Origin:
        """Where the program comes from."""
        return origin_of(self.program)

    @cached_property
    def config(self) -> Config | None:
        """The configuration of `-m`; raises ConfigError with all that is wrong."""
        if self.request.config is None:
            return None
        place = RunPlace(run=str(self.store.directory))
        return load_config(self.request.config, self.request.overrides, place=place)

    @cached_property
    def config_id(self) -> str | None:
        """The id of the whole configuration."""
        return self.config.id if self.config is not None else None

    @cached_property
    def profile(self) -> Runner | None:
        """The first profile of the configuration that trains."""
        runners = self.config.settings.runners_of_mode() if self.config is not None else ()
        return next((one for one in runners if not one.infers), None)

    def limits(self, program: Program | None = None) -> dict[str, Any]:
        """The limits of a training: typed, else configured, else those of the program or its class."""
        source = self.program if program is None else program
        said = self.profile.max_epochs if self.profile is not None else None
        wished = said if self.request.max_epochs is None else self.request.max_epochs
        return {
            "max_epochs": source.max_epochs if wished is None else wished,
            "max_steps": source.max_steps,
        }

    def fit(self, run: Path, epoch: str) -> None:
        """Load what of an epoch the program knows into a new object of it; raises what that raises."""
        program = self.made()
        options = program.runner_options()
        given = [options.get(key) or () for key in ("resume_exclude", "exclude")]
        left_out = [(one,) if isinstance(one, str) else one for one in given]
        load_what_is_there(program.job(), run, epoch, *left_out)

    def made(self) -> Program:
        """A new object of the program."""
        return made_program(self.program, self.config)

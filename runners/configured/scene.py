"""What the verbs begin with where a configuration is all there is: its profile that trains, and its runs.

Runs lie where that profile keeps its run with `torchrelay run`, a directory each, `runs/<name>/<runner>/<id>`
or below `save_checkpoint_path`. What a run is *of* is the source in the workspace and the part of the
configuration that the profile uses. The file of the configuration is no source, since its id says what of it
counts; nor are data, nor what is written beside it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from torchrelay.checkpoint.storage.urls import is_url
from torchrelay.errors import UsageError
from torchrelay.jobs.config.config import Config, load_config
from torchrelay.jobs.config.interpolation import RunPlace
from torchrelay.jobs.config.runner_schema import Runner as RunnerKeys
from torchrelay.jobs.session import Peers, Solo
from torchrelay.metadata.experiments import RunStore
from torchrelay.records import dataclass
from torchrelay.runners.config_runs.selection import (
    config_file,
    device_of,
    phases_of,
    run_directory_of,
    source_of,
)
from torchrelay.runners.distributed.environment import read_launch_env
from torchrelay.runners.experiment.base_scene import BaseScene
from torchrelay.runners.experiment.origin import RUNS, Origin
from torchrelay.runners.experiment.request import Request
from torchrelay.runners.remote_runs.names import refuse_remote


@dataclass(frozen=True)
class ConfiguredScene(BaseScene):
    """A configuration and a request; `source` is where its archived source lies, if it runs that."""

    request: Request
    archived: str | None = None
    source: Path | None = None
    rename = "`name` in the configuration"

    @property
    def title(self) -> str:
        """The file of the configuration."""
        return str(self.request.config)

    @cached_property
    def file(self) -> str:
        """The file that `-m` means."""
        return config_file(self.request.config or "")

    @cached_property
    def config(self) -> Config:
        """What is configured; raises ConfigError with all that is wrong."""
        return self.with_overrides(self._typed_limits())

    def with_overrides(self, more: Sequence[str]) -> Config:
        """The same with more overrides."""
        place = RunPlace(runs=self._runs)
        return load_config(self.file, [*self.request.overrides, *more], source=self.source, place=place)

    @cached_property
    def runner(self) -> RunnerKeys:
        """The profile that trains; raises UsageError where not exactly one does."""
        return _the_one(self.file, self.config)

    def inferring(self) -> list[RunnerKeys]:
        """The profiles of the mode that infer."""
        return [one for one in self.config.settings.runners_of_mode() if one.infers]

    @cached_property
    def origin(self) -> Origin:
        """The workspace is the source."""
        place = self._place
        source = source_of(self.config)
        return Origin(place.name, Path(self.file).resolve(), source, None, place.parent)

    @cached_property
    def store(self) -> RunStore:
        """The runs of the profile; raises UsageError where `torchrelay run` keeps one run."""
        said = self._runs
        refuse_remote(said or "", "torchrelay train -m")
        name = self.config.settings.name or self.config.workspace.name
        place = Path(os.path.abspath(said)) / name / self.runner.name if said else self._place  # noqa: PTH100
        if (place / "run.json").exists():
            raise UsageError(
                f"{place} is one run, of `torchrelay run`, and the verbs keep a run for each training: go on "
                f"with `torchrelay run -m {self.file}`, or give other --runs"
            )
        return RunStore(place)

    @cached_property
    def config_id(self) -> str | None:
        """The id of the part that the profile uses."""
        return self.config.id_of(self.runner.name)

    def limits(self) -> dict[str, Any]:
        """What may be raised to go on with a run that is over; of growing data the newest that is there."""
        runner = self.runner
        steps = None if runner.stop is None else runner.stop.max_steps
        found: dict[str, Any] = {"max_epochs": runner.max_epochs, "max_steps": steps}
        if runner.epochs_per_partition is not None:
            found["newest_data"] = self._newest_data()
        return found

    def _newest_data(self) -> str:
        from torchrelay.runners.config_runs.growing_data import partitions_there

        datasets = [one for _, one in phases_of(self.config.settings, self.runner) if one is not None]
        names = [one[0] for two in datasets for one in partitions_there(two.data_path, self.config.workspace)]
        return max(names, default="")

    @property
    def _runs(self) -> str | None:
        """The directory of runs that was typed, or that the environment names."""
        return self.request.runs or os.environ.get(RUNS)

    @property
    def _place(self) -> Path:
        text = run_directory_of(self.config.settings, self.runner)
        if is_url(text):
            raise UsageError(f"runs cannot lie at {text} so far: give a path, or --runs DIR")
        return Path(text)

    def _typed_limits(self) -> list[str]:
        """`--max-epochs` and `--time-limit` as overrides of the profile."""
        asked = {"epochs": self.request.max_epochs, "time_limit": self.request.time_limit}
        if not any(value is not None for value in asked.values()):
            return []
        runner = _the_one(self.file, self.with_overrides(()))
        if runner.stop is not None and runner.stop.max_epochs is not None:
            asked["stop.max_epochs"] = asked.pop("epochs")
        return [f"runner.{runner.name}.{key}={value}" for key, value in asked.items() if value is not None]


@contextmanager
def processes(runner: RunnerKeys) -> Iterator[Peers]:
    """The processes that were started, to agree on something; they stay together for what comes."""
    env = read_launch_env()
    if not env.launched:
        yield Solo()
        return
    from torchrelay.runners.config_runs.processes import let_go, session_on

    session = session_on(device_of(runner, env.local_rank))
    try:
        yield session.peers
    finally:
        let_go(session, world_stays=True)


def _the_one(file: str, config: Config) -> RunnerKeys:
    """The profile of the mode that trains, else of the file."""
    found = config.settings.training()
    if len(found) == 1:
        return found[0]
    names = ", ".join(one.name for one in found) or "none"
    remedy = f"choose it by -o mode=[{found[0].name}]; " if found else ""
    raise UsageError(
        f"{file}: the verbs are for one runner that trains, here there is {names}: {remedy}"
        f"torchrelay run -m {file} runs all of its mode"
    )

"""What a start of a run has archived, unpacked: its source, its configuration; and models made of these.

**Making a model runs the archived code**, with this process's rights: whoever names a run trusts it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property, reduce
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchrelay.errors import UsageError
from torchrelay.jobs.config.config import Config, load_config
from torchrelay.jobs.config.tree import ConfigError
from torchrelay.metadata.code.archive import open_archive, unpack_source
from torchrelay.metadata.code.capture import capture_with_code
from torchrelay.metadata.code.imports import LoadedCode, load_code
from torchrelay.metadata.code.manifest import is_plain
from torchrelay.records import dataclass
from torchrelay.runners.config_runs.class_loading import Loader, load_classes
from torchrelay.runners.config_runs.context import StepContext, place_of_process
from torchrelay.runners.config_runs.steps import Network
from torchrelay.runners.training.plan import Recipe

_RESOLVED = "resolved.yaml"


@dataclass(frozen=True)
class Archives:
    """What a start of a run has archived. `source` is where the source is unpacked; see `archives_of`."""

    run: Path
    captured: Mapping[str, Any]
    source: Path
    config: Config | None
    """As it is read now; its classes are those of the archive, its data where they were."""
    loader: Loader

    def module(self, recipe: Recipe) -> nn.Module:
        """The model as it is constructed; raises UsageError, and what the archived code raises."""
        model = self._phase(recipe) if recipe.kind == "phase" else self._made(recipe)
        if not isinstance(model, nn.Module):
            raise UsageError(f"{recipe.name} made {model!r:.80}, which is no torch module")
        return model

    def changed(self) -> list[str]:
        """What of the configuration is not as it was then."""
        then = self.captured.get("config_id")
        if self.config is None or then is None or self.config.id == then:
            return []
        return [f"configuration: its id was {str(then)[:12]}, it is {self.config.id[:12]} now"]

    @cached_property
    def code(self) -> LoadedCode:
        """The source as modules."""
        return load_code(self.run, int(self.captured["number"]))

    @property
    def roots(self) -> dict[str, str]:
        """Where the folders of the archive lay."""
        found = self.captured["code"].get("roots")
        return dict(found) if isinstance(found, dict) else {}

    def context(self, runner_name: str) -> StepContext:
        """What the steps of a profile begin with; raises UsageError where there is no configuration."""
        if self.config is None:
            raise UsageError(f"{self.run} has no configuration to make a phase of")
        settings = self.config.settings
        runner = settings.runner_named(runner_name)
        return StepContext(
            config=self.config, settings=settings, runner=runner, runner_name=runner.name, is_infer=False,
            run_dir=str(self.run), classes=load_classes(settings, runner, self.loader),
            workspace=self.config.workspace, device=torch.device("cpu"), **place_of_process(),
        )  # fmt: skip

    def _made(self, recipe: Recipe) -> Any:
        from torchrelay.runners.programs.program import made_program

        module: Any = self.code.import_module(recipe.in_archive(self.code.script))
        found = reduce(getattr, recipe.name.split("."), module)
        return found() if recipe.kind == "function" else made_program(found, self.config).make_model()

    def _phase(self, recipe: Recipe) -> Any:
        context = self.context(recipe.module)
        phase = next(one for one in context.settings.phase if one.name == recipe.name)
        own = context.classes.steps.get("build", Network)
        return (own if hasattr(own, "build_model") else Network)(context).build_model(context, phase)


@contextmanager
def archives_of(run: Path, attempt: int | None = None) -> Iterator[Archives]:
    """The archives of a start (the newest that has any), unpacked for the time of the block.

    Raises UsageError, DamagedError, ConfigError. Modules of a configuration are forgotten at the end.
    """
    captured = capture_with_code(run, attempt)
    with tempfile.TemporaryDirectory(prefix="torchrelay-source-") as scratch:
        source, loader = Path(scratch) / "source", Loader()
        with open_archive(run / "code" / f"{captured['code']['id']}.zip") as archive:
            unpack_source(archive, source)
        try:
            yield Archives(run, captured, source, _configuration(run, captured, source), loader)
        finally:
            loader.forget()


def _configuration(run: Path, captured: Mapping[str, Any], source: Path) -> Config | None:
    """None where there was none. Where its workspace is gone, or on another machine, the source will do."""
    folder = captured.get("config")
    path = run / str(folder) / _RESOLVED
    if not is_plain(folder) or not path.is_file():
        return None
    try:
        return load_config(path, source=source)
    except ConfigError:
        return load_config(path, [f"workspace={str(source)!r}"])

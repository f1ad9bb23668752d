"""A model made anew from what a run has archived: its source, and its configuration where it had one."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchrelay.errors import UsageError
from torchrelay.jobs.config.config import Config
from torchrelay.jobs.config.reading import load_config
from torchrelay.metadata.capture import capture_with_code
from torchrelay.metadata.code.archive import open_archive
from torchrelay.metadata.code.extraction import unpack_source
from torchrelay.metadata.code.loading import load_code
from torchrelay.metadata.code.manifest import is_plain
from torchrelay.runners.replay.recipe import Recipe

_RESOLVED = "resolved.yaml"


class Archives:
    """What start `attempt` of a run has archived.

    **Making a model runs the archived code.**
    `config` is the configuration of that start as it is read now, None where it had none; `changed` names
    what of it came out otherwise than it did then.
    """

    def __init__(self, run: Path, attempt: int | None, scratch: Path) -> None:
        self.captured = capture_with_code(run, attempt)
        self._run, self._source = run, scratch / "source"
        self._attempt = int(self.captured["number"])
        with open_archive(run / "code" / f"{self.captured['code']['id']}.zip") as archive:
            unpack_source(archive, self._source)
        self.config = self._configuration()

    def module(self, recipe: Recipe) -> nn.Module:
        """The model as it is constructed; raises UsageError, and what the archived code raises."""
        model = self._phase(recipe) if recipe.kind == "phase" else self._made(recipe)
        if not isinstance(model, nn.Module):
            raise UsageError(f"{recipe.name} made {model!r:.80}, which is no torch module")
        return model

    def changed(self) -> list[str]:
        """What of the configuration is not as it was."""
        then = self.captured.get("config_id")
        if self.config is None or then is None or self.config.id == then:
            return []
        return [f"configuration: its id was {str(then)[:12]}, it is {self.config.id[:12]} now"]

    def _configuration(self) -> Config | None:
        folder = self.captured.get("config")
        if not is_plain(folder):
            return None
        path = self._run / str(folder) / _RESOLVED
        return load_config(path, [f"workspace={self._source}"]) if path.is_file() else None

    def _made(self, recipe: Recipe) -> Any:
        code = load_code(self._run, self._attempt)
        module: Any = code.import_module(recipe.in_archive(code.script))
        found = reduce(getattr, recipe.name.split("."), module)
        if recipe.kind == "function":
            return found()
        program = found.__new__(found)
        program.config = self.config
        program.__init__()
        return program.make_model()

    def _phase(self, recipe: Recipe) -> Any:
        from torchrelay.runners.lifecycle.context import StepContext
        from torchrelay.runners.lifecycle.loading import Loader, load_classes
        from torchrelay.runners.lifecycle.steps import Network

        config = self.config
        if config is None:
            raise UsageError(f"{self._run} has no configuration to make phase {recipe.name} of")
        settings, loader = config.settings, Loader()
        runner = settings.runner_named(recipe.module)
        phase = next(one for one in settings.phase if one.name == recipe.name)
        try:
            classes = load_classes(settings, runner, loader)
            context = StepContext(
                config=config, settings=settings, runner=runner, runner_name=runner.name, is_infer=False,
                classes=classes, workspace=config.workspace, device=torch.device("cpu"),
            )  # fmt: skip
            own = classes.steps.get("build", Network)
            return (own if hasattr(own, "build_model") else Network)(context).build_model(context, phase)
        finally:
            loader.forget()


@contextmanager
def archives_of(run: Path, attempt: int | None) -> Iterator[Archives]:
    """The archives, unpacked for the time of the block; raises UsageError, DamagedError, ConfigError."""
    with tempfile.TemporaryDirectory(prefix="torchrelay-replay-") as scratch:
        yield Archives(run, attempt, Path(scratch))

"""What a run is told of its configuration: texts for its directory, its source, the runs it is built on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torchrelay.checkpoint.storage.urls import is_url
from torchrelay.jobs.config.config import Config
from torchrelay.jobs.config.runner_schema import Runner as RunnerKeys
from torchrelay.jobs.config.schema import Settings
from torchrelay.jobs.config.schema import Upstream as UpstreamKeys
from torchrelay.metadata.code.capture import Given
from torchrelay.metadata.code.selection import Sources
from torchrelay.runners.lifecycle.selection import MODEL, phases_of, weights_place
from torchrelay.runners.training.extras.upstream import InitFrom, Upstream
from torchrelay.runners.training.plan import Recipe

_WRITTEN = (
    "save_checkpoint_path", "save_step_path", "save_inference_path", "runner_result_dump_path",
    "predictions_path", "metrics_path",
)  # fmt: skip
"""Keys of runners that name what is written."""


def source_of(config: Config) -> Sources:
    """What lies in the workspace, without the file of the configuration, data, and what runners write."""
    settings, workspace = config.settings, config.workspace
    paths = [config.name, settings.run_dir]
    paths += [path for one in settings.dataset for path in one.data_path]
    paths += [path for one in settings.runner for key in _WRITTEN if (path := getattr(one, key))]
    paths += [path for one in settings.runner if (path := weights_place(one)[0])]
    inside = [Path(os.path.abspath(path)) for path in paths if not is_url(path)]  # noqa: PTH100
    left_out = [f"/{_literally(one.relative_to(workspace))}" for one in inside if workspace in one.parents]
    return Sources([workspace], exclude=left_out)


def recorded(config: Config) -> Given:
    """The file as it was read, what it came to, and the overrides, for `config/` of the run directory."""
    overrides = "".join(f"- {_quoted(one)}\n" for one in config.overrides.texts) or "[]\n"
    files = {
        "source.yaml": config.source,
        "resolved.yaml": config.resolved_text().encode(),
        "overrides.yaml": overrides.encode(),
    }
    return Given(files, config.id, config.overrides.texts)


def built_on(config: Config) -> dict[str, Any]:
    """What JobRunner is told of `upstream`: lineage and kept tensors of all, weights of those with `into`."""
    known = config.settings.upstream
    if not known:
        return {}
    runs = {alias: Upstream(run_of(config, one.run), one.keep or ()) for alias, one in known.items()}
    starts = [_start(alias, one) for alias, one in known.items() if one.into or one.prefix or one.rename]
    return {"upstream": runs, "init_from": starts}


def replayed(settings: Settings, runner: RunnerKeys) -> dict[str, Any]:
    """What JobRunner is told of `replay`: the model of each phase, made by its class again."""
    if not runner.replay:
        return {}
    names = [phase.name for phase, _ in phases_of(settings, runner)]
    return {"replay": {f"{name}.{MODEL}": Recipe("phase", runner.name, name) for name in names}}


def _start(alias: str, keys: UpstreamKeys) -> InitFrom:
    return InitFrom(alias, keys.into, keys.prefix, dict(keys.rename or {}), strict=keys.strict)


def run_of(config: Config, text: str) -> str:
    """Relative runs begin at the workspace, as all paths of a configuration do."""
    return text if is_url(text) or Path(text).is_absolute() else str(config.workspace / text)


def _literally(path: Path) -> str:
    """As .gitignore takes a name."""
    return "".join(f"\\{one}" if one in "*?[]!# \\" else one for one in path.as_posix())


def _quoted(text: str) -> str:
    """As a YAML text in single quotes."""
    return "'" + text.replace("'", "''") + "'"

"""The verbs on a configuration alone: `torchrelay train|test|eval|serve|status|amend -m config.yaml`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torchrelay.runners.programs.archived_code import perform_scene
from torchrelay.runners.programs.command_context import ConfiguredScene, status
from torchrelay.runners.programs.request import VerbRequest

Verb = Callable[[ConfiguredScene], int]


def perform_configuration(request: VerbRequest) -> int:
    """Do it in this process, or in one on archived code; returns the exit code."""
    return perform_scene(
        request,
        lambda archived, source: ConfiguredScene(request, archived, source),
        lambda: _verb(request.verb),
    )


def _verb(name: str) -> Verb:
    """The function of a verb; those that load tensors are of modules that import torch."""
    if name == "train":
        from torchrelay.runners.programs.train import train_configuration

        return train_configuration
    if name == "test":
        from torchrelay.runners.programs.test import test_configuration

        return test_configuration
    if name == "eval":
        from torchrelay.runners.programs.eval import evaluate_configuration

        return evaluate_configuration
    if name == "server":
        from torchrelay.tools.serving.program_server import serve_config  # the only call of a room above

        return serve_config
    if name == "amend":
        from torchrelay.runners.programs.eval import fit_configuration
        from torchrelay.runners.programs.train import amend

        return lambda scene: amend(scene, partial(fit_configuration, scene))
    return status

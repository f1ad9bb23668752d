"""The verbs on a configuration alone: `torchrelay train|test|eval|server|status|amend -m config.yaml`."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

from torchrelay.runners.programs.archived_code import MARK, run_archived_configuration, source_told
from torchrelay.runners.programs.command_context import ConfiguredScene, status
from torchrelay.runners.programs.request import VerbRequest

Verb = Callable[[ConfiguredScene], int]
_ON_ONE_RANK = ("status", "amend")
_WITH_ARCHIVED_CODE = ("test", "eval")


def perform_configuration(request: VerbRequest) -> int:
    """Do it in this process, or in one on archived code; returns the exit code."""
    archived, source = os.environ.pop(MARK, None), source_told()
    if request.verb in _ON_ONE_RANK and os.environ.get("RANK", "0") != "0":
        return 0
    scene = ConfiguredScene(request, archived, source)
    if request.run_id is not None and archived is None and request.verb in _WITH_ARCHIVED_CODE:
        code = run_archived_configuration(scene)
        if code is not None:
            return code
    return _verb(request.verb)(scene)


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

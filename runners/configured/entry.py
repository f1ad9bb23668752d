"""The verbs on a configuration alone: `torchrelay train|test|eval|server|status|amend -m config.yaml`."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

from torchrelay.runners.configured.archived import run_archived, source_told
from torchrelay.runners.configured.scene import ConfiguredScene
from torchrelay.runners.experiment.archived_process import MARK
from torchrelay.runners.experiment.request import Request
from torchrelay.runners.experiment.status_verb import status

Verb = Callable[[ConfiguredScene], int]
_ON_ONE_RANK = ("status", "amend")
_WITH_ARCHIVED_CODE = ("test", "eval")


def perform(request: Request) -> int:
    """Do it in this process, or in one on archived code; returns the exit code."""
    archived, source = os.environ.pop(MARK, None), source_told()
    if request.verb in _ON_ONE_RANK and os.environ.get("RANK", "0") != "0":
        return 0
    scene = ConfiguredScene(request, archived, source)
    if request.run_id is not None and archived is None and request.verb in _WITH_ARCHIVED_CODE:
        code = run_archived(scene)
        if code is not None:
            return code
    return _verb(request.verb)(scene)


def _verb(name: str) -> Verb:
    """The function of a verb; those that load tensors are of modules that import torch."""
    if name == "train":
        from torchrelay.runners.configured.training import train

        return train
    if name == "test":
        from torchrelay.runners.configured.testing import test

        return test
    if name == "eval":
        from torchrelay.runners.configured.evaluation import evaluate

        return evaluate
    if name == "server":
        from torchrelay.runners.serving.configured import server

        return server
    if name == "amend":
        from torchrelay.runners.configured.evaluation import fit
        from torchrelay.runners.experiment.amend_verb import amend

        return lambda scene: amend(scene, partial(fit, scene))
    return status

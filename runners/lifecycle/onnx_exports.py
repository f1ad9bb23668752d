"""The key `onnx` of a profile: the ONNX files that its run makes of the models while it trains."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torchrelay.runners.lifecycle.context import StepContext
from torchrelay.runners.rebuilding.first_batch import first_batch


def with_onnx(options: Mapping[str, Any], context: StepContext) -> dict[str, Any]:
    """JobRunner's options with an `OnnxExport` for each phase, beside those that are there.

    A file is called `model` where there is one phase, else as the phase; its inputs are those of a batch that
    answers depend on. Raises UsageError where the extra `onnx` is missing.
    """
    keys = context.runner.onnx
    if keys is None:
        return dict(options)
    from torchrelay.runners.training.extras.onnx_export import OnnxExport

    alone = len(context.phases) == 1
    made = [
        OnnxExport(
            phase.model,
            partial(first_batch, context, name),
            keys.every,
            keys.best,
            name="model" if alone else name,
            options={"drop_unused": True},
        )
        for name, phase in context.phases.items()
    ]
    return {**options, "exports": [*options.get("exports", ()), *made]}

"""Stop conditions: asked after every epoch, they end the run.

max_epochs, max_steps, max_time     totals of the whole run, asked anew on resume    stop_limits
epoch_limiter                       the same, counted by a blob                      stop_limits
early_stopping                      a metric gets no better                          early_stopping
condition_of                        functions, tensors, outputs, blobs, readers      stop_forms
StopCondition, StopAnswer, combine  the protocol and the nodes' common answer        stop_condition
"""

from __future__ import annotations

from torchrelay.jobs.early_stopping import EarlyStopping, early_stopping
from torchrelay.jobs.stop_condition import Rule, StopAnswer, StopCondition, StopContext, combine
from torchrelay.jobs.stop_forms import condition_of
from torchrelay.jobs.stop_limits import (
    EpochLimit,
    MaxEpochs,
    MaxSteps,
    MaxTime,
    epoch_limiter,
    max_epochs,
    max_steps,
    max_time,
)

__all__ = [
    "EarlyStopping",
    "EpochLimit",
    "MaxEpochs",
    "MaxSteps",
    "MaxTime",
    "Rule",
    "StopAnswer",
    "StopCondition",
    "StopContext",
    "combine",
    "condition_of",
    "early_stopping",
    "epoch_limiter",
    "max_epochs",
    "max_steps",
    "max_time",
]

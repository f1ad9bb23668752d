"""`torchrelay.OnnxExport`: which ONNX files a run makes while it trains."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from torchrelay.checkpoint.onnx_out.needed import check_packages
from torchrelay.checkpoint.onnx_out.to_onnx import to_onnx
from torchrelay.errors import UsageError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_OPTIONS = frozenset(to_onnx.__kwdefaults__ or {}) - {"overwrite", "metadata"}


@dataclass(frozen=True)
class OnnxExport:
    """Writes `exports/<name>-epoch-<k>.onnx` after every k-th epoch, and `exports/<name>-best.onnx`.

        JobRunner(job, "runs/a", best=("val/acc", "max"),
                  exports=[OnnxExport(model, torch.randn(2, 3, 32, 32), every=10, best=True)])

    `model` is a module, or the name of the blob that is one; `inputs` are those of `to_onnx`, or a callable
    that returns them when they are first needed. `every=10` means epochs 10, 20, ...; `best=True` the epoch
    that the runner's `best` names. `options` go to `to_onnx` (`dynamic`, `rtol`, `opset`, ...).

    Rank 0 writes, from a copy of the model, behind the save of the epoch; the other ranks wait for it at
    their next collective. What cannot be exported is a warning, and the training goes on. A model that is
    sharded over ranks (FSDP2) needs `build`, which returns a plain one: it gets the gathered state, and all
    ranks take part. Raises UsageError for arguments that cannot be, and where the extra `onnx` is missing.
    """

    model: torch.nn.Module | str
    inputs: Any
    every: int | None = None
    best: bool = False
    name: str = "model"
    build: Callable[[], torch.nn.Module] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_packages()
        if not isinstance(self.model, (torch.nn.Module, str)):
            raise UsageError(
                f"OnnxExport({self.model!r:.60}): give a module, or the name of the blob that is one"
            )
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise UsageError(
                f"OnnxExport(name={self.name!r:.80}): letters, digits and . _ - make a file's name"
            )
        if self.every is not None and (type(self.every) is not int or self.every < 1):
            raise UsageError(f"OnnxExport(every={self.every!r}): it counts epochs, a whole number from 1")
        if self.every is None and not self.best:
            raise UsageError("OnnxExport writes nothing: give every=k, best=True, or both")
        if unknown := sorted(set(self.options) - _OPTIONS):
            raise UsageError(
                f"OnnxExport(options=...) has {', '.join(unknown)}; there are {', '.join(sorted(_OPTIONS))}"
            )

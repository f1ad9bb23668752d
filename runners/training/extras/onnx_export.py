"""ONNX exports of a run during training.

exports/<name>-epoch-<k>.onnx    every k-th epoch
exports/<name>-best.onnx         the best epoch so far
exports/<name>.json              the epochs of these files
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from torchrelay.checkpoint.load.checkpoint import open_checkpoint
from torchrelay.checkpoint.storage.work import progress
from torchrelay.errors import RelayError, UsageError
from torchrelay.jobs.random import RandomStreams
from torchrelay.jobs.session import decide
from torchrelay.metadata.code.capture import captures, code_id_of
from torchrelay.metadata.fs import read_json, write_json
from torchrelay.metadata.run_directory import RunDirectory
from torchrelay.models.onnx.exporter.graph import bare_module, own_copy
from torchrelay.models.onnx.exporter.to_onnx import check_packages, to_onnx
from torchrelay.runners.session.base import SessionBase
from torchrelay.runners.session.context import full_state_dict
from torchrelay.runners.session.run_state import RunState
from torchrelay.runners.training.journal import Journal

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_OPTIONS = frozenset(to_onnx.__kwdefaults__ or {}) - {"overwrite", "metadata"}


@dataclass(frozen=True)
class OnnxExport:
    """Write `exports/<name>-epoch-<k>.onnx` after every k-th epoch, and `exports/<name>-best.onnx`.

    Rank 0 exports a copy of the model after the epoch was saved; other ranks wait at their next collective. A
    failed export is a warning. Sharded models (FSDP2) need `build`; then all ranks take part.

    Args:
        model: A module, or the name of the blob that is one.
        inputs: Example inputs as for `to_onnx`, or a callable that returns them when first needed.
        every: Export every so many epochs.
        best: Export the epoch that the runner's `best` selects.
        name: First part of the file names.
        build: Returns an unsharded module, which gets the gathered state.
        options: Options of `to_onnx` (`dynamic`, `rtol`, `opset`, ...).

    Raises:
        UsageError: An argument is invalid, or the package onnx is missing.

    Example:
        export = OnnxExport(model, torch.randn(2, 3, 32, 32), every=10, best=True)
        JobRunner(job, "runs/a", best=("val/acc", "max"), exports=[export])
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
                f"invalid OnnxExport({self.model!r:.60}): expected a module, or the name of its blob"
            )
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise UsageError(
                f"invalid OnnxExport(name={self.name!r:.80}): expected letters, digits and . _ -"
            )
        if self.every is not None and (type(self.every) is not int or self.every < 1):
            raise UsageError(f"invalid OnnxExport(every={self.every!r}): expected a whole number from 1")
        if self.every is None and not self.best:
            raise UsageError("OnnxExport would write nothing: set every=k, best=True, or both")
        if unknown := sorted(set(self.options) - _OPTIONS):
            raise UsageError(
                f"unknown OnnxExport options {', '.join(unknown)}: expected {', '.join(sorted(_OPTIONS))}"
            )


def checked_exports(exports: tuple[Any, ...], best: Any, run: RunDirectory | None) -> tuple[OnnxExport, ...]:
    """Return the exports; raises UsageError for those that such a runner cannot make."""
    for one in exports:
        if not isinstance(one, OnnxExport):
            raise UsageError(f"invalid exports entry {one!r:.80}: expected torchrelay.OnnxExport objects")
        if one.best and best is None:
            raise UsageError("OnnxExport(best=True) needs JobRunner(best=(metric, 'max' or 'min'))")
    if run is None:
        raise UsageError("exports need a run directory: pass JobRunner the path of one")
    if len({one.name for one in exports}) < len(exports):
        raise UsageError("two exports would write the same files: set name= for each")
    return exports


def run_facts(run: Path | None, epoch: str, metrics: Mapping[str, float]) -> dict[str, str]:
    """Return metadata: epoch and metrics; for a run directory also its name, id and code id."""
    numbers = {name: value for name, value in metrics.items() if math.isfinite(value)}
    found = {"torchrelay.epoch": epoch, "torchrelay.metrics": json.dumps(numbers, sort_keys=True)}
    if run is None:
        return found
    with suppress(RelayError):  # unreadable metadata are left out
        identity = RunDirectory(run).known_identity()
        found["torchrelay.run"] = run.name
        found["torchrelay.run_id"] = str(identity.get("uuid", ""))
        codes = [code_id_of(one) for one in captures(run)]
        if codes and (code := codes[-1]) is not None:
            found["torchrelay.code_id"] = code
    return found


FOLDER = "exports"
FORMAT = {"major": 1, "minor": 0, "features": []}


class Exporting:
    """One `OnnxExport` in one train call; all ranks call its methods, rank 0 writes."""

    def __init__(
        self,
        wanted: OnnxExport,
        session: SessionBase,
        state: RunState,
        journal: Journal,
        measure: tuple[str, str] | None,
    ) -> None:
        if journal.run is None:
            raise UsageError("exports need a run directory: pass JobRunner the path of one")
        self._wanted, self._session, self._state, self._journal = wanted, session, state, journal
        self._run, self._folder = journal.run, journal.run.path / FOLDER
        self._measure = measure or ("", "")  # JobRunner refuses best=True without one
        self._best: float | None = None
        self._inputs: Any = None

    # Of the run

    def begin(self) -> None:
        """After the state is loaded or new: find the best epoch, and repair files of abandoned epochs."""
        if not self._wanted.best:
            return
        path = self._folder / f"{self._wanted.name}-best.onnx"

        def find_best() -> dict[str, Any]:  # on rank 0; the epoch, if its file must be exported again
            epoch: int | None = None
            value: float | None = None
            if self._state.epoch:
                with suppress(RelayError, KeyError):  # no epoch has that metric yet
                    # Only epochs of the resumed branch, by the metrics in their checkpoints.
                    opened = open_checkpoint(self._run.where, "best", best=self._measure)
                    epoch, value = opened.epoch, opened.metrics[self._measure[0]]
            there = path.exists() and self._notes().get(path.name, {}).get("epoch") == epoch
            if not there and epoch is None:
                path.unlink(missing_ok=True)  # of an abandoned epoch
            return {"value": value, "epoch": None if there else epoch}

        found = decide(self._session.peers, "best export", find_best)
        self._best = found["value"]
        if found["epoch"] is not None:
            self._export(path.name, {}, epoch=found["epoch"])

    def epoch_done(self, metrics: Mapping[str, float], saved: bool | None) -> None:
        """Export a finished epoch that is saved (None: or about to be)."""
        if saved is False:
            return
        wanted, epoch, (measure, mode), best = self._wanted, self._state.epoch, self._measure, self._best
        value = metrics.get(measure, math.nan) if wanted.best else math.nan
        if not math.isnan(value) and (best is None or (value > best if mode == "max" else value < best)):
            self._best = value
            self._export(f"{wanted.name}-best.onnx", metrics)
        if wanted.every is not None and epoch % wanted.every == 0:
            self._export(f"{wanted.name}-epoch-{epoch}.onnx", metrics)

    # On disk

    def _notes(self) -> dict[str, Any]:
        found = (read_json(self._folder / f"{self._wanted.name}.json") or {}).get("files")
        return found if isinstance(found, dict) else {}

    # One file

    def _export(self, file: str, metrics: Mapping[str, float], epoch: int | None = None) -> None:
        """Write a file from the live model, or from a saved `epoch`; a failure is a warning."""
        first = self._session.peers.rank == 0
        at = self._state.epoch if epoch is None else epoch
        streams = RandomStreams.capture()
        try:
            with progress(f"exporting epoch {at} as ONNX"):
                model = self._gathered() if epoch is None else None
                if first:
                    self._write(file, at, model, metrics)
        except Exception as error:
            if first:
                self._journal.warn(
                    f"epoch {at} was not exported, exports/{file} is "
                    f"{'unchanged' if (self._folder / file).exists() else 'missing'}: {error}"
                )
        finally:  # an export does not change the training
            streams.restore()

    def _write(self, file: str, at: int, model: Any, metrics: Mapping[str, float]) -> None:
        self._folder.mkdir(exist_ok=True)
        if model is None:
            model, metrics = self._saved(at)
        if self._inputs is None:
            given = self._wanted.inputs
            asks = callable(given) and not isinstance(given, torch.Tensor)
            self._inputs = (given() if asks else given,)  # a callable is called once
        facts, path = run_facts(self._run.path, str(at), metrics), self._folder / file
        done = to_onnx(model, self._inputs[0], path, overwrite=True, metadata=facts, **self._wanted.options)
        notes = {**self._notes(), file: {"epoch": at, "difference": done.difference, "bytes": done.bytes}}
        write_json(self._folder / f"{self._wanted.name}.json", {"format": FORMAT, "files": notes})
        self._journal.tell("export", f"epoch {at} exported: {FOLDER}/{file} ({done.bytes} bytes)")

    # The model

    def _module(self) -> torch.nn.Module:
        found = self._wanted.model
        return bare_module(self._session.workspace().get(found) if isinstance(found, str) else found)

    def _gathered(self) -> torch.nn.Module | None:
        """Return the module, or an unsharded copy of it; all ranks call this."""
        module = self._module()
        if self._wanted.build is None:
            return module
        state = full_state_dict(module)
        if self._session.peers.rank != 0:
            return None
        plain = bare_module(self._wanted.build())
        plain.load_state_dict(state)
        return plain

    def _saved(self, epoch: int) -> tuple[torch.nn.Module, Mapping[str, float]]:
        module = self._module()
        copied = own_copy(module) if self._wanted.build is None else bare_module(self._wanted.build())
        opened = open_checkpoint(self._run.where, epoch)
        for name, entry in self._session.workspace().entries().items():
            if isinstance(entry.value, torch.nn.Module) and bare_module(entry.value) is module:
                opened.load({name: copied})
                return copied, opened.metrics
        raise UsageError("the model is not a blob of the job, so no saved epoch has it")

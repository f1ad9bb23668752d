"""Create models, readers and optimizers from the user's classes; read slot files and growing data.

`sparse_slots` names slots of integers, `dense_slots` slots of floats with their sizes, `wide:2` or
`image:[2,3]`. A sample is a dict of tensors by slot; other slots are ignored.

The files of growing data are selected before each epoch. A *partition* is a file in `data_path`, or an entry
of a directory in it: each file there, and each directory with its files. Partitions keep the order in which
they were found; those found together are sorted by name, and new ones are always appended. So an interrupted
epoch continues over the files that it began with, and partition n is the same after a restart.
"""

from __future__ import annotations

import inspect
import math
import os
import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn, optim
from torch.utils.data import TensorDataset

from torchrelay.checkpoint.load.checkpoint import open_checkpoint
from torchrelay.errors import NotAllowedNowError, RelayError, UsageError
from torchrelay.jobs.config.schema import Dataset, Optimizer, RunnerSection
from torchrelay.jobs.config.tree import hint
from torchrelay.jobs.data.loader import EpochLoader
from torchrelay.jobs.session import Peers, decide
from torchrelay.jobs.stop import Rule, StopAnswer
from torchrelay.records import dataclass
from torchrelay.runners.config_runs.context import StepContext
from torchrelay.runners.config_runs.selection import LOADER


class ReaderFailedError(RelayError):
    """The user's reader raised; the message has file, line and traceback."""


def made(kind: type, argument: Any) -> Any:
    """Create an object of a user class, with the argument or without any."""
    try:
        parameters = inspect.signature(kind).parameters.values()
    except (TypeError, ValueError):
        return kind()
    takes = any(
        one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD, one.VAR_POSITIONAL) for one in parameters
    )
    return kind(argument) if takes else kind()


def made_model(kind: type, hyper_parameters: Mapping[str, Any], *, train: bool, what: str) -> nn.Module:
    """Create a model; raises UsageError unless it is a Module with a `loss` method if it trains."""
    model = made(kind, hyper_parameters)
    if not isinstance(model, nn.Module):
        raise UsageError(f"{what}: class {kind.__name__} is not a torch.nn.Module: it makes {model!r:.60}")
    if train and not callable(getattr(model, "loss", None)):
        raise UsageError(
            f"{what}: class {kind.__name__} has no method loss(self, outputs, batch), which training needs"
        )
    return model


def made_dataset(reader: Any, dataset: Dataset) -> Any:
    """Return the samples: the reader if it has `__getitem__`, else what it reads from each file in order.

    A directory in `data_path` stands for its files, sorted by name. Raises UsageError for missing files, no
    samples, and a reader without either interface.
    """
    own = f"dataset.{dataset.name}"
    if isinstance(reader, (torch.Tensor, TensorDataset, tuple, list)):
        return reader  # such readers supply whole batches
    if hasattr(reader, "__getitem__") and hasattr(reader, "__len__"):
        return reader
    if not callable(getattr(reader, "read", None)):
        raise UsageError(
            f"{own}: class {type(reader).__name__} needs a method read(self, path) that yields the samples "
            "of a file, or __len__ and __getitem__"
        )
    samples = list[Any]()
    for path in _files(dataset):
        before = len(samples)
        try:
            samples.extend(reader.read(path))
        except RelayError:
            raise
        except Exception as error:
            line = _line_read(error, path, len(samples) - before)
            place = f"after {len(samples) - before} samples" if line is None else f"line {line}"
            raise _failed(own, f"in {path}, {place}", error) from error
    if not samples:
        files = ", ".join(dataset.data_path) or "no file"
        raise UsageError(f"{own}: the reader found no sample in {files}")
    return samples


def sample_error(dataset: Dataset, index: int, error: Exception) -> Exception:
    """Return an error that names the sample at which a reader failed, with file and line if known."""
    if isinstance(error, RelayError):
        return error
    place = f"at sample {index}"
    with suppress(UsageError):  # missing files are skipped
        for path in _files(dataset):
            if (line := _line_read(error, path, None)) is not None:
                place = f"at sample {index}, in {path}, line {line}"
                break
    return _failed(f"dataset.{dataset.name}", place, error)


def _failed(key: str, place: str, error: Exception) -> ReaderFailedError:
    trace = "".join(traceback.format_exception(type(error), error, _behind_here(error))).rstrip()
    return ReaderFailedError(f"{key}: the reader failed {place}:\n{trace}")


def _line_read(error: Exception, path: str, samples: int | None) -> int | None:
    """Return the line that a reader failed at: the last line of the file that its frames hold.

    A repeated line counts as the first one after `samples` lines, or not at all if `samples` is None.
    """
    held = set[Any]()
    for frame, _ in traceback.walk_tb(_behind_here(error)):
        held.update(one.rstrip("\r\n") for one in frame.f_locals.values() if isinstance(one, str))
    try:
        with open(path, encoding="utf-8") as file:
            found: dict[str, list[int]] = {}
            for at, line in enumerate(file, 1):
                if line.strip() and (text := line.rstrip("\r\n")) in held:
                    found.setdefault(text, []).append(at)
    except (OSError, UnicodeError):
        return None
    if samples is None:
        lines = [places[0] for places in found.values() if len(places) == 1]
    else:
        lines = [first for places in found.values() for first in [at for at in places if at > samples][:1]]
    return max(lines, default=None)


def _behind_here(error: Exception) -> TracebackType | None:
    """Return the traceback that begins in the user's reader."""
    return None if error.__traceback__ is None else error.__traceback__.tb_next


def _files(dataset: Dataset) -> list[str]:
    found: list[str] = []
    for text in dataset.data_path:
        path = Path(text)
        if "://" not in text and not path.exists():
            raise UsageError(f"dataset.{dataset.name}.data_path: {text} does not exist")
        inside = sorted(one for one in path.iterdir() if one.is_file()) if path.is_dir() else []
        found += [str(one) for one in inside if not one.name.startswith(".")] or [text]
    return found


def made_optimizer(model: nn.Module, keys: Optimizer | None, own: type | None) -> optim.Optimizer:
    """Create the configured optimizer; SGD with torch's defaults if there is none.

    `own` is the class if it is not one of torch.optim. Raises UsageError for an unknown class or bad
    arguments.
    """
    arguments: dict[str, Any] = {} if keys is None else keys.arguments.plain()
    if keys is not None and keys.learning_rate is not None:
        arguments["lr"] = keys.learning_rate
    kind = own or _of_module(optim, "SGD" if keys is None else keys.kind, "hyper_parameters.optimizer.class")
    try:
        return kind(model.parameters(), **arguments)  # type: ignore[no-any-return]
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"hyper_parameters.optimizer: {kind.__name__} does not accept {arguments}: {error}"
        ) from error


def made_scheduler(optimizer: optim.Optimizer, keys: Optimizer | None) -> Any:
    """Create the configured schedule, None if there is none. Raises UsageError for what cannot be created."""
    if keys is None or (keys.lr_scheduler is None and keys.decay_steps is None):
        return None
    if keys.lr_scheduler is None:
        rate = 1.0 if keys.decay_rate is None else keys.decay_rate
        return optim.lr_scheduler.StepLR(optimizer, keys.decay_steps or 1, gamma=rate)
    own = "hyper_parameters.optimizer.lr_scheduler"
    kind = _of_module(optim.lr_scheduler, keys.lr_scheduler.kind, f"{own}.class")
    if kind is optim.lr_scheduler.ReduceLROnPlateau:
        raise UsageError(f"{own}.class: ReduceLROnPlateau needs a metric: step it in a task of your own")
    arguments = keys.lr_scheduler.arguments.plain()
    try:
        return kind(optimizer, **arguments)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{own}: {kind.__name__} does not accept {arguments}: {error}") from error


def scheduled_by_epoch(keys: Optimizer | None) -> bool:
    """Return True if the configured schedule counts epochs."""
    return keys is not None and keys.lr_scheduler is not None and keys.lr_scheduler.per == "epoch"


def _of_module(module: Any, name: str, key: str) -> Any:
    """Return a class of a torch module, ignoring the case of its name."""
    known = {one: kind for one, kind in vars(module).items() if isinstance(kind, type)}
    by_case = {one.lower(): one for one in known}
    if name.lower() not in by_case:
        raise UsageError(f"{key}: {module.__name__} has no {name}; {hint(name, known)}")
    return known[by_case[name.lower()]]


def on_device(data: Any, device: torch.device) -> Any:
    """Copy tensors in nested lists, tuples and mappings to the device."""
    if isinstance(data, torch.Tensor):
        return data.to(device, non_blocking=True)
    if isinstance(data, Mapping):
        return {name: on_device(one, device) for name, one in data.items()}
    if isinstance(data, Sequence) and not isinstance(data, (str, bytes)):
        moved = [on_device(one, device) for one in data]
        if isinstance(data, tuple):
            return type(data)(*moved) if hasattr(data, "_fields") else type(data)(moved)
        return moved
    return data


_DENSE = re.compile(r"(?P<name>[^:]+):\[?(?P<sizes>[1-9][0-9]{0,8}(?:,[1-9][0-9]{0,8})*)\]?")
_NONE = "#"
"""PaddleRec's notation for no slots."""
Sample = dict[str, torch.Tensor]


class SlotReader:
    """Read the slots that a dataset names. A missing slot is filled with `padding`, or 0."""

    def __init__(self, dataset: Dataset) -> None:
        self._key = f"dataset.{dataset.name}"
        self._padding = dataset.padding or 0.0
        self._sparse = [one for one in (dataset.sparse_slots or "").split() if one != _NONE]
        self._dense: dict[str, tuple[int, ...]] = {}
        for word in (dataset.dense_slots or "").split():
            if word != _NONE:
                if (said := _DENSE.fullmatch(word)) is None:
                    raise UsageError(
                        f"{self._key}.dense_slots: invalid slot {word!r}: expected `wide:4` or `wide:[2,2]`"
                    )
                self._dense[said["name"]] = tuple(int(one) for one in said["sizes"].split(","))
        if both := sorted(set(self._sparse) & set(self._dense)):
            raise UsageError(
                f"{self._key}: {', '.join(both)} is in both sparse_slots and dense_slots: remove one"
            )

    def read(self, path: str) -> Iterator[Sample]:
        """Yield a sample for each non-blank line. Raises UsageError naming file and line."""
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield self._sample(line.split(), f"{self._key}: {path}, line {number}")

    def collate(self, samples: Sequence[Sample]) -> Sample:
        """Batch the slots; sparse ones are padded with `padding` to the longest."""
        found: Sample = {}
        for name in self._sparse:
            listed = [one[name] for one in samples]
            longest = max(map(len, listed))
            found[name] = torch.full((len(listed), longest), int(self._padding), dtype=torch.int64)
            for row, one in zip(found[name], listed, strict=True):
                row[: len(one)] = one
        return {**found, **{name: torch.stack([one[name] for one in samples]) for name in self._dense}}

    def _sample(self, words: Sequence[str], place: str) -> Sample:
        values: dict[str, list[Any]] = {name: [] for name in (*self._sparse, *self._dense)}
        for word in words:
            name, colon, text = word.rpartition(":")
            if not colon:
                raise UsageError(f"{place}: invalid {word!r:.40}: expected `slot:value`")
            if name in values:
                values[name].append(_number(text, dense=name in self._dense, place=place, word=word))
        sample = {name: torch.tensor(values[name] or [int(self._padding)]) for name in self._sparse}
        for name, shape in self._dense.items():
            listed = values[name] or [self._padding] * math.prod(shape)
            if len(listed) != math.prod(shape):
                raise UsageError(f"{place}: {name} has {len(listed)} values, expected {math.prod(shape)}")
            sample[name] = torch.tensor(listed, dtype=torch.float32).reshape(shape)
        return sample


def _number(text: str, *, dense: bool, place: str, word: str) -> float:
    try:
        return float(text) if dense else int(text)
    except ValueError:
        kind = "a number" if dense else "a whole number"
        raise UsageError(f"{place}: invalid value of {word!r:.40}: expected {kind}") from None


Partition = list[str]
"""A name, then its files: paths relative to the workspace if they are inside it."""


def partitions_there(data_path: Sequence[str], workspace: Path) -> list[Partition]:
    """List the existing partitions; hidden names and missing paths are skipped."""
    found: dict[str, Partition] = {}
    for text in data_path:
        path = Path(text)
        inside = (one for one in path.iterdir() if not one.name.startswith(".")) if path.is_dir() else (path,)
        for one in sorted(inside):
            files = _below(one) if one.is_dir() else [one] if one.is_file() else []
            if files:
                name = _name(one, workspace)
                found.setdefault(name, [name, *(_name(file, workspace) for file in files)])
    return [found[name] for name in sorted(found)]


def with_new(known: Sequence[Partition], there: Sequence[Partition]) -> list[Partition]:
    """Append new partitions to the known ones, keeping the order of the latter."""
    names = {one[0] for one in known}
    return [*known, *(one for one in there if one[0] not in names)]


class GrowingLoader(EpochLoader):
    """An EpochLoader that selects its data by `look` before each epoch.

    `there` lists partitions, `read` makes a dataset of files. With `per_partition` each partition gets that
    many epochs; without it an epoch covers all known partitions. `known` is part of the state.
    """

    def __init__(
        self,
        there: Callable[[], list[Partition]],
        read: Callable[[Sequence[str]], Any],
        batch_size: int,
        *,
        per_partition: int | None = None,
        **options: Any,
    ) -> None:
        self.known: list[Partition] = []
        self.per_partition = per_partition
        self.there, self._read = there, read
        self._files: list[str] = []
        super().__init__(_NOTHING_YET, batch_size, **options)

    def look(self, peers: Peers) -> None:
        """Select the data of the epoch that begins, on rank 0 for all. UsageError if none is left."""
        if not self.samples_done:
            self.known = decide(peers, "data of the epoch", lambda: with_new(self.known, self.there()))
            self._open()

    def next_epochs(self, known: Sequence[Partition] | None = None) -> int:
        """Return the number of epochs that have data, counted from the beginning of the run."""
        known = self.known if known is None else known
        return len(with_new(known, self.there())) * (self.per_partition or 1)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of an EpochLoader and the partitions known in this epoch."""
        return {**super().state_dict(), "known": [list(one) for one in self.known]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state; the files of an interrupted epoch are opened again."""
        self.known = [list(one) for one in state["known"]]
        if int(state["samples_done"]):
            self._open(int(state["epoch"]))
        super().load_state_dict(state)

    def _batches(self, *args: Any) -> Any:
        """Iterate over batches; raises NotAllowedNowError before the first `look`."""
        if not self._files:
            raise NotAllowedNowError(
                "the data of this epoch is not selected yet: call loader.look(peers) first"
            )
        return super()._batches(*args)

    def _open(self, epoch: int | None = None) -> None:
        epoch, chosen = self.epoch if epoch is None else epoch, self.known
        if self.per_partition is not None:
            at = epoch // self.per_partition
            chosen = self.known[at : at + 1]
        if not chosen:
            raise UsageError(f"no data for epoch {epoch + 1}: only {len(self.known)} partitions are known")
        files = [file for partition in chosen for file in partition[1:]]
        if files != self._files:
            self._take(self._read(files))
            self._files = files


@dataclass(frozen=True)
class PartitionsOver:
    """Stop when a loader has no partition left; `at_start` counts epochs with data at the launch."""

    name: str
    loader: GrowingLoader
    at_start: int
    rule: Rule = "rank0"
    limit: bool = True

    def ask(self, ctx: Any) -> StopAnswer:
        """Compare with the finished epochs; before the loader is loaded, use the agreed number."""
        loaded = getattr(ctx, "workspace", None) is not None
        there = max(self.at_start, self.loader.next_epochs()) if loaded else self.at_start
        if ctx.epoch < there:
            return StopAnswer(False)
        return StopAnswer(True, f"no partition of the data is left after {there} epochs")


_NOTHING_YET = [None]
"""Placeholder dataset until the first `look`; it is never read."""


def _below(path: Path) -> list[Path]:
    found = (one for one in path.rglob("*") if one.is_file())
    return sorted(
        one for one in found if not any(part.startswith(".") for part in one.relative_to(path).parts)
    )


def _name(path: Path, workspace: Path) -> str:
    """Return the path relative to the workspace if it is inside, else absolute."""
    text = os.path.abspath(path)  # noqa: PTH100 - without following links
    return os.path.relpath(text, workspace) if text.startswith(f"{workspace}{os.sep}") else text


def growing_loader(
    kind: type, dataset: Dataset, workspace: Path, runner: RunnerSection, options: Mapping[str, Any]
) -> GrowingLoader:
    """Create a loader whose reader of class `kind` is created again for the files of each epoch."""

    def there() -> list[list[str]]:
        return partitions_there(dataset.data_path, workspace)

    def read(files: Sequence[str]) -> Any:
        of_epoch = replace(dataset, data_path=tuple(str(workspace / one) for one in files))
        return made_dataset(made(kind, of_epoch), of_epoch)

    per = runner.epochs_per_partition
    return GrowingLoader(there, read, dataset.batch_size, per_partition=per, **options)


def ends_of_data(context: StepContext) -> Iterator[PartitionsOver]:
    """Yield the stop conditions of phases that train partition by partition; identical on all ranks."""

    def count(blob: str, loader: GrowingLoader) -> int:  # with partitions that the run's newest epoch knew
        known: list[Partition] = []
        with suppress(RelayError):
            found = open_checkpoint(context.run_dir).value(blob)
            known = [list(one) for one in found.get("known", ())] if isinstance(found, dict) else []
        return loader.next_epochs(known)

    for phase in context.phases.values():
        loader = phase.loader
        if isinstance(loader, GrowingLoader) and loader.per_partition is not None:
            work = partial(count, f"{phase.name}.{LOADER}", loader)
            there = decide(context.session.peers, "partitions", work)
            yield PartitionsOver(f"{phase.name}.data", loader, there)

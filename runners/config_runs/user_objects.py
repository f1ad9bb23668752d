"""Models, readers and optimizers made of the user's classes, and the reader of PaddleRec's lines of slots.

`sparse_slots` names slots of whole numbers, `dense_slots` slots of numbers with their sizes, `wide:2` or
`image:[2,3]`. A sample is a dict of tensors by slot; words of other slots are passed over.
"""

from __future__ import annotations

import inspect
import math
import re
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn, optim
from torch.utils.data import TensorDataset

from torchrelay.errors import RelayError, UsageError
from torchrelay.jobs.config.schema import Dataset, Optimizer
from torchrelay.jobs.config.tree import hint


class ReaderFailedError(RelayError):
    """A reader of the user raised: the message has the file, the line and the original traceback."""


def made(kind: type, argument: Any) -> Any:
    """An object of a class of the user, which takes the argument or nothing."""
    try:
        parameters = inspect.signature(kind).parameters.values()
    except (TypeError, ValueError):
        return kind()
    takes = any(
        one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD, one.VAR_POSITIONAL) for one in parameters
    )
    return kind(argument) if takes else kind()


def made_model(kind: type, hyper_parameters: Mapping[str, Any], *, train: bool, what: str) -> nn.Module:
    """A model; raises UsageError where it is no Module, or has no `loss` to be trained by."""
    model = made(kind, hyper_parameters)
    if not isinstance(model, nn.Module):
        raise UsageError(f"{what}: class {kind.__name__} makes {model!r:.60}, which is no torch.nn.Module")
    if train and not callable(getattr(model, "loss", None)):
        raise UsageError(
            f"{what}: class {kind.__name__} has no method loss(self, outputs, batch) to train it by"
        )
    return model


def made_dataset(reader: Any, dataset: Dataset) -> Any:
    """The samples: the reader itself where it has `__getitem__`, else what it reads of each file, in order.

    A directory among `data_path` stands for the files in it, by name. Raises UsageError for files that are
    not there, for no samples, and for a reader with neither.
    """
    own = f"dataset.{dataset.name}"
    if isinstance(reader, (torch.Tensor, TensorDataset, tuple, list)):
        return reader  # whole batches are taken of these
    if hasattr(reader, "__getitem__") and hasattr(reader, "__len__"):
        return reader
    if not callable(getattr(reader, "read", None)):
        raise UsageError(
            f"{own}: class {type(reader).__name__} has neither read(self, path), for the samples of a "
            "file, nor __len__ and __getitem__"
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
            place = f"behind {len(samples) - before} samples" if line is None else f"line {line}"
            raise _failed(own, f"in {path}, {place}", error) from error
    if not samples:
        files = ", ".join(dataset.data_path) or "no file"
        raise UsageError(f"{own}: the reader found no sample in {files}: give files that have some")
    return samples


def sample_error(dataset: Dataset, index: int, error: Exception) -> Exception:
    """What names the sample that a reader failed at, and file and line where its frames hold them."""
    if isinstance(error, RelayError):
        return error
    place = f"at sample {index}"
    with suppress(UsageError):  # of files that are not there it reads none
        for path in _files(dataset):
            if (line := _line_read(error, path, None)) is not None:
                place = f"at sample {index}, in {path}, line {line}"
                break
    return _failed(f"dataset.{dataset.name}", place, error)


def _failed(key: str, place: str, error: Exception) -> ReaderFailedError:
    told = "".join(traceback.format_exception(type(error), error, _behind_here(error))).rstrip()
    return ReaderFailedError(f"{key}: the reader failed {place}:\n{told}")


def _line_read(error: Exception, path: str, samples: int | None) -> int | None:
    """Where in its file a reader was when it failed: the last of the lines that its frames hold.

    A line that stands there several times is taken for the first one behind the samples that came before, and
    for none where nobody knows how many these are.
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
    """The frames of the user's reader."""
    return None if error.__traceback__ is None else error.__traceback__.tb_next


def _files(dataset: Dataset) -> list[str]:
    found: list[str] = []
    for text in dataset.data_path:
        path = Path(text)
        if "://" not in text and not path.exists():
            raise UsageError(f"dataset.{dataset.name}.data_path: {text} is not there")
        inside = sorted(one for one in path.iterdir() if one.is_file()) if path.is_dir() else []
        found += [str(one) for one in inside if not one.name.startswith(".")] or [text]
    return found


def made_optimizer(model: nn.Module, keys: Optimizer | None, own: type | None) -> optim.Optimizer:
    """The optimizer of the configuration, SGD with torch's defaults where it has none.

    `own` is the class where it is none of torch.optim's. Raises UsageError for an unknown class, and for
    arguments that it does not take.
    """
    arguments: dict[str, Any] = {} if keys is None else keys.arguments.plain()
    if keys is not None and keys.learning_rate is not None:
        arguments["lr"] = keys.learning_rate
    kind = own or _of_module(optim, "SGD" if keys is None else keys.kind, "hyper_parameters.optimizer.class")
    try:
        return kind(model.parameters(), **arguments)  # type: ignore[no-any-return]
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"hyper_parameters.optimizer: {kind.__name__} refuses {arguments}: {error}"
        ) from error


def made_scheduler(optimizer: optim.Optimizer, keys: Optimizer | None) -> Any:
    """The schedule of the configuration, None where it has none.

    Raises UsageError for an unknown class, for one that waits for a metric, and for arguments that it does
    not take.
    """
    if keys is None or (keys.lr_scheduler is None and keys.decay_steps is None):
        return None
    if keys.lr_scheduler is None:
        rate = 1.0 if keys.decay_rate is None else keys.decay_rate
        return optim.lr_scheduler.StepLR(optimizer, keys.decay_steps or 1, gamma=rate)
    own = "hyper_parameters.optimizer.lr_scheduler"
    kind = _of_module(optim.lr_scheduler, keys.lr_scheduler.kind, f"{own}.class")
    if kind is optim.lr_scheduler.ReduceLROnPlateau:
        raise UsageError(f"{own}.class: ReduceLROnPlateau waits for a metric: step it in a task of yours")
    arguments = keys.lr_scheduler.arguments.plain()
    try:
        return kind(optimizer, **arguments)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{own}: {kind.__name__} refuses {arguments}: {error}") from error


def scheduled_by_epoch(keys: Optimizer | None) -> bool:
    """Whether the schedule of the configuration counts epochs."""
    return keys is not None and keys.lr_scheduler is not None and keys.lr_scheduler.per == "epoch"


def _of_module(module: Any, name: str, key: str) -> Any:
    """A class of a module of torch, whatever the case of its name."""
    known = {one: kind for one, kind in vars(module).items() if isinstance(kind, type)}
    by_case = {one.lower(): one for one in known}
    if name.lower() not in by_case:
        raise UsageError(f"{key}: {module.__name__} has no {name}; {hint(name, known)}")
    return known[by_case[name.lower()]]


def on_device(data: Any, device: torch.device) -> Any:
    """The same tensors in the same lists, tuples and mappings, there."""
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
"""What PaddleRec's files write for no slots."""
Sample = dict[str, torch.Tensor]


class SlotReader:
    """Reads the slots that a dataset names. A slot that is not in a line is filled with `padding`, or 0."""

    def __init__(self, dataset: Dataset) -> None:
        self._key = f"dataset.{dataset.name}"
        self._padding = dataset.padding or 0.0
        self._sparse = [one for one in (dataset.sparse_slots or "").split() if one != _NONE]
        self._dense = dict(self._sized(one) for one in (dataset.dense_slots or "").split() if one != _NONE)
        if both := sorted(set(self._sparse) & set(self._dense)):
            raise UsageError(f"{self._key}: {', '.join(both)} is in sparse_slots and dense_slots: keep one")

    def read(self, path: str) -> Iterator[Sample]:
        """A sample for each line that is not blank. Raises UsageError naming file and line."""
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield self._sample(line.split(), f"{self._key}: {path}, line {number}")

    def collate(self, samples: Sequence[Sample]) -> Sample:
        """Slots of a batch; sparse ones as long as the longest of them, `padding` behind the others."""
        found: Sample = {}
        for name in self._sparse:
            listed = [one[name] for one in samples]
            longest = max(map(len, listed))
            found[name] = torch.full((len(listed), longest), int(self._padding), dtype=torch.int64)
            for row, one in zip(found[name], listed, strict=True):
                row[: len(one)] = one
        return {**found, **{name: torch.stack([one[name] for one in samples]) for name in self._dense}}

    def _sized(self, word: str) -> tuple[str, tuple[int, ...]]:
        said = _DENSE.fullmatch(word)
        if said is None:
            raise UsageError(
                f"{self._key}.dense_slots: {word!r} is no slot with its size: write `wide:4` or `wide:[2,2]`"
            )
        return said["name"], tuple(int(one) for one in said["sizes"].split(","))

    def _sample(self, words: Sequence[str], place: str) -> Sample:
        values: dict[str, list[Any]] = {name: [] for name in (*self._sparse, *self._dense)}
        for word in words:
            name, colon, text = word.rpartition(":")
            if not colon:
                raise UsageError(f"{place}: {word!r:.40} is no `slot:value`")
            if name in values:
                values[name].append(_number(text, dense=name in self._dense, place=place, word=word))
        sample = {name: torch.tensor(values[name] or [int(self._padding)]) for name in self._sparse}
        for name, shape in self._dense.items():
            listed = values[name] or [self._padding] * math.prod(shape)
            if len(listed) != math.prod(shape):
                raise UsageError(f"{place}: {name} has {len(listed)} values, not {math.prod(shape)}")
            sample[name] = torch.tensor(listed, dtype=torch.float32).reshape(shape)
        return sample


def _number(text: str, *, dense: bool, place: str, word: str) -> float:
    try:
        return float(text) if dense else int(text)
    except ValueError:
        kind = "a number" if dense else "a whole number"
        raise UsageError(f"{place}: the value of {word!r:.40} is not {kind}") from None

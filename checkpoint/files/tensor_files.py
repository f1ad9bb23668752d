"""Read and write files of torch.save, of safetensors, and directories of Hugging Face.

Reads use torch's restricted unpickler (`weights_only=True`), which makes only tensors and plain containers,
and calls nothing that a file names. `tests/test_rules.py` allows these calls only in this file. Checkpoints
are never stored this way.

Of tied names the first is stored; the others are in the file's metadata, as by safetensors' `save_model`.
"""

from __future__ import annotations

import errno
import io
import json
import math
import mmap
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import field
from pathlib import Path
from typing import Any

import torch

from torchrelay.checkpoint.format import canonical_json
from torchrelay.checkpoint.format.dtypes import (
    BLOCK,
    ElementType,
    by_code,
    by_name,
    logical_name,
    memory_of,
    safetensors_header,
    torch_dtype,
)
from torchrelay.errors import BlobError, DamagedError, FormatError, RelayError, StorageError, UsageError
from torchrelay.jobs.runtime import check_file
from torchrelay.records import dataclass

_ZIP = b"PK\x03\x04"
_PROTOCOL = b"\x80"
"""First bytes of files of torch before 1.6, and of later ones in the same format."""


def read_torch_file(path: Path) -> Any:
    """Read a file of `torch.save`; tensors stay in the mapped file until they are used.

    Raises UsageError for a missing file, FormatError for another format or objects other than tensors,
    numbers, texts and containers, StorageError if it cannot be read.
    """
    check_file(path, "a file of torch.save")
    try:
        mapped = _beginning(path) == _ZIP  # not files of torch before 1.6
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # a hostile file can make the unpickler raise anything
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # EINVAL: torch seeks where nothing is
            raise StorageError(f"cannot read {path}: {error.strerror or error}") from error
        raise FormatError(f"{path} is {_why_not(path, error)}") from error


def write_torch_file(path: Path, content: Mapping[str, Any]) -> None:
    """Write a file that `torch.load(path, weights_only=True)` reads; raises StorageError."""
    try:
        with path.open("xb") as file:
            torch.save(dict(content), file)
    except (OSError, RuntimeError) as error:
        raise StorageError(f"cannot write {path}: {error}") from error


def check_savable(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise BlobError for a tensor whose element type torch cannot write or read."""
    known: set[torch.dtype] = set()
    for name, tensor in tensors.items():
        if tensor.dtype in known:
            continue
        try:
            torch.load(saved_bytes(torch.empty(0, dtype=tensor.dtype)), weights_only=True)
        except Exception as error:  # the type decides whether it is KeyError, RuntimeError or UnpicklingError
            raise BlobError(f"{name}: torch cannot save tensors of {tensor.dtype}: leave it out") from error
        known.add(tensor.dtype)


def saved_bytes(value: Any) -> io.BytesIO:
    """A value in the form of `torch.save`, as DCP's load planner needs it."""
    memory = io.BytesIO()
    torch.save(value, memory)
    memory.seek(0)
    return memory


def _why_not(path: Path, error: Exception) -> str:
    """Why a file was refused, without torch's advice to run its code."""
    if not _beginning(path).startswith((_ZIP, _PROTOCOL)):
        return "not a file of torch.save: give its format (--from)"
    text = str(error)
    refused = re.search(r"Unsupported [^.]*: ?(?:GLOBAL )?[\w.]+", text)
    if refused is not None:
        reason = f"{refused[0]}; save tensors, numbers, texts and containers of these (a state_dict)"
    else:
        own = re.search(r"WeightsUnpickler error:\s*([^\n]*)", text)  # surrounded by torch's advice
        first = " ".join((own[1] if own else text.partition("\n")[0]).split())
        reason = f"{type(error).__name__} {first}".rstrip()[:200]
    if type(error).__name__ != "UnpicklingError":
        return f"not a file of torch.save, or a damaged one: {reason}"
    return f"not a file of torch.save that can be read without running its code: {reason}"


def _beginning(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(4)


_ALIGNMENT = 64
Shapes = Mapping[str, tuple[ElementType, tuple[int, ...]]]


def mapped_tensors(directory: Path, shapes: Shapes) -> dict[str, torch.Tensor]:
    """Tensors in an unnamed file in `directory`, deleted with the last; raises StorageError if full."""
    places: dict[str, int] = {}
    end = 0
    for name, (element, shape) in shapes.items():
        places[name] = end
        end += -(-element.nbytes(shape) // _ALIGNMENT) * _ALIGNMENT
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            if end:
                os.posix_fallocate(file.fileno(), 0, end)
            memory = mmap.mmap(file.fileno(), end) if end else None
    except OSError as error:
        raise StorageError(
            f"cannot reserve {end} bytes in {directory}: {error.strerror or error}; free some space"
        ) from error
    return {name: tensor_in(memory, places[name], *shapes[name]) for name in shapes}


def tensor_in(
    memory: mmap.mmap | None, offset: int, element: ElementType, shape: tuple[int, ...]
) -> torch.Tensor:
    """A tensor in a mapping, which stays alive as long as the tensor."""
    nbytes = element.nbytes(shape)
    if memory is None or nbytes == 0:
        return torch.empty(shape, dtype=torch_dtype(element))
    raw = torch.frombuffer(memory, dtype=torch.uint8, count=nbytes, offset=offset)
    if offset % element.itemsize:
        raw = raw.clone()  # other writers need not align
    return raw.view(torch_dtype(element)).reshape(shape)


PIECE = 8 * BLOCK
"""Bytes that are in memory at a time; a multiple of every element's size."""


@dataclass(frozen=True)
class ExportedTensor:
    """A stored tensor to be exported. `fill` reads bytes [start, stop) in stored form."""

    stored: ElementType
    shape: tuple[int, ...]
    fill: Callable[[int, int, memoryview], None]
    cast: torch.dtype | None = None

    @property
    def element(self) -> ElementType:
        """The exported type."""
        return self.stored if self.cast is None else by_name(logical_name(self.cast))

    @property
    def nbytes(self) -> int:
        """The exported size in bytes."""
        return self.element.nbytes(self.shape)

    def pieces(self) -> Iterator[memoryview]:
        """The exported bytes in order; each piece is valid until the next one is requested."""
        total = math.prod(self.shape) * self.stored.itemsize
        scratch = torch.empty(min(PIECE, total), dtype=torch.uint8)
        for start in range(0, total, PIECE):
            piece = scratch[: min(PIECE, total - start)]
            self.fill(start, start + len(piece), memory_of(piece))
            if self.cast is None:
                yield memory_of(piece)
            else:
                yield memory_of(piece.view(torch_dtype(self.stored)).to(self.cast))


@dataclass(frozen=True)
class ExportContent:
    """What is exported, by new name; `ties` are further names, `nodes` those whose own value is taken."""

    tensors: Mapping[str, ExportedTensor]
    values: Mapping[str, Any]
    ties: Mapping[str, str]
    left_out: tuple[str, ...] = ()
    nodes: Mapping[str, str] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


@dataclass(frozen=True)
class Incoming:
    """An imported tree of CPU tensors, values and containers; `ties` are further names at the top level."""

    tree: Mapping[str, Any]
    ties: Mapping[str, str] = field(default_factory=dict)


HEADER_LIMIT = 100_000_000


def write_safetensors(path: Path, tensors: Mapping[str, ExportedTensor], ties: Mapping[str, str]) -> None:
    """Write a new file; raises BlobError for element types that safetensors cannot express."""
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element.itemsize, item[0]))
    for name, tensor in ordered:
        if tensor.element.raw or name == "__metadata__":
            raise BlobError(
                f"{name}: safetensors cannot hold {tensor.element.name} tensors; export to torch instead"
            )
    entries = ((name, one.element.code, one.shape, one.nbytes) for name, one in ordered)
    header = safetensors_header(entries, {"format": "pt", **ties}, _ALIGNMENT)
    with path.open("xb") as file:
        file.write(header)
        for _, tensor in ordered:
            file.writelines(tensor.pieces())


def read_safetensors(path: Path) -> Incoming:
    """Open a file; tensors stay in the mapping until they are used.

    Raises UsageError for a missing file, FormatError for another format, DamagedError for a header that does
    not fit the file, StorageError if it cannot be read.
    """
    check_file(path, "a safetensors file")
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(HEADER_LIMIT, size - 8):
                raise FormatError("its header does not fit the file, which may be cut short")
            header = canonical_json.loads(file.read(length), what="its header", limit_bytes=HEADER_LIMIT)
            memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (FormatError, DamagedError) as error:
        raise type(error)(f"{path} is not a readable safetensors file: {error}") from error
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise FormatError(f"{path} is not a safetensors file: {error}") from error
    if not isinstance(header, dict):
        raise FormatError(f"{path} is not a safetensors file: its header is not an object")
    said = header.pop("__metadata__", {})
    tree = {name: _tensor(path, memory, 8 + length, name, entry) for name, entry in header.items()}
    ties = said.items() if isinstance(said, dict) else ()
    return Incoming(tree, {name: kept for name, kept in ties if kept in tree and name not in tree})


def _tensor(path: Path, memory: mmap.mmap, data: int, name: str, entry: Any) -> Any:
    try:
        start, stop = entry["data_offsets"]
        shape, element = tuple(entry["shape"]), by_code(entry["dtype"])
        numbers = (start, stop, *shape)
        sound = all(type(n) is int and n >= 0 for n in numbers) and stop - start == element.nbytes(shape)
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedError(f"{path}: the header has invalid data about {name!r}") from error
    if not sound or data + stop > len(memory):
        raise DamagedError(f"{path}: some bytes of {name!r} are missing")
    return tensor_in(memory, data + start, element, shape)


INDEX = "model.safetensors.index.json"
ONE = "model.safetensors"
_INDEX_LIMIT = 256 << 20


def write_huggingface(directory: Path, content: ExportContent, shard_bytes: int) -> None:
    """Write files of at most `shard_bytes` of data (or one tensor), and an index for several."""
    shards: list[list[str]] = [[]]
    used = 0
    for name, tensor in content.tensors.items():
        if shards[-1] and used + tensor.nbytes > shard_bytes:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += tensor.nbytes
    if len(shards) == 1:
        write_safetensors(directory / ONE, content.tensors, content.ties)
        return
    names = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        ties = {name: kept for name, kept in content.ties.items() if kept in shard}
        write_safetensors(directory / file, {name: content.tensors[name] for name in shard}, ties)
        names.update(dict.fromkeys(shard, file))
    index = {"metadata": {"total_size": content.nbytes}, "weight_map": names}
    (directory / INDEX).write_text(json.dumps(index, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def read_huggingface(directory: Path) -> Incoming:
    """All tensors of a directory, by its index or of its only file.

    Raises UsageError if it has neither, DamagedError if index and files disagree, and as `read_safetensors`
    does.
    """
    if not (directory / INDEX).is_file():
        if not (directory / ONE).is_file():
            raise UsageError(f"{directory} has neither {INDEX} nor {ONE}: give a directory with one of them")
        return read_safetensors(directory / ONE)
    path = directory / INDEX
    try:
        if path.stat().st_size > _INDEX_LIMIT:
            raise FormatError(f"{path} is too large for an index")
        found: Any = canonical_json.loads(path.read_bytes(), what="it", limit_bytes=_INDEX_LIMIT)[
            "weight_map"
        ]
    except RelayError as error:
        raise FormatError(f"{path} is not an index: {error}") from error
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror or error}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(f"{path} is not an index: it has no weight_map") from error
    sound = isinstance(found, dict) and all(
        isinstance(file, str) and file not in ("", ".", "..") and not set(file) & set("/\\\0")
        for file in found.values()
    )
    if not sound:
        raise FormatError(f"{path}: the weight_map names files outside of its directory")
    weight_map = dict(found)
    files = {file: read_safetensors(directory / file) for file in sorted(set(weight_map.values()))}
    tree = {}
    for name, file in weight_map.items():
        where = files[file]
        stored = where.ties.get(name, name)
        if stored not in where.tree:
            raise DamagedError(f"{directory / file} does not hold {name!r}, which the index puts there")
        tree[name] = where.tree[stored]
    ties = {name: kept for one in files.values() for name, kept in one.ties.items() if kept in tree}
    return Incoming(tree, {name: kept for name, kept in ties.items() if name not in tree})

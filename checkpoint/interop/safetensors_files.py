"""Plain safetensors files, written in pieces and read by mapping.

Of names that are tied the first is stored; the others are noted in the file's metadata, name to stored
name, as safetensors' own `save_model` does.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchrelay.checkpoint.format import canonical_json
from torchrelay.checkpoint.format.dtypes import by_code
from torchrelay.checkpoint.interop.content import Incoming, Outgoing
from torchrelay.checkpoint.interop.scratch import tensor_in
from torchrelay.errors import BlobError, DamagedError, FormatError, StorageError
from torchrelay.jobs.runtime import check_file

HEADER_LIMIT = 100_000_000
_FORMAT = {"format": "pt"}


def write_safetensors(path: Path, tensors: Mapping[str, Outgoing], ties: Mapping[str, str]) -> None:
    """Write a new file; raises BlobError for element types that safetensors cannot express."""
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element.itemsize, item[0]))
    header: dict[str, Any] = {"__metadata__": {**_FORMAT, **ties}}
    end = 0
    for name, tensor in ordered:
        if tensor.element.raw or name == "__metadata__":
            raise BlobError(
                f"{name}: safetensors cannot hold {tensor.element.name} tensors of this name; leave it out, "
                "or export to torch"
            )
        header[name] = {
            "dtype": tensor.element.code,
            "shape": list(tensor.shape),
            "data_offsets": [end, end + tensor.nbytes],
        }
        end += tensor.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * ((56 - len(text)) % 64)
    with path.open("xb", buffering=0) as file:
        _write(file, memoryview(len(text).to_bytes(8, "little") + text))
        for _, tensor in ordered:
            for piece in tensor.pieces():
                _write(file, piece)


def _write(file: Any, data: memoryview) -> None:
    while len(data):
        data = data[file.write(data) :]


def read_safetensors(path: Path) -> Incoming:
    """Open a file; tensors stay in the mapping until they are used.

    Raises UsageError where there is no file, FormatError for what is no safetensors file, DamagedError
    for a header that does not fit the file, StorageError when it cannot be read.
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
        raise type(error)(f"{path} is no safetensors file that can be read: {error}") from error
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise FormatError(f"{path} is no safetensors file: {error}") from error
    if not isinstance(header, dict):
        raise FormatError(f"{path} is no safetensors file: its header is no object")
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
        raise DamagedError(f"{path}: the header says of {name!r} what cannot be") from error
    if not sound or data + stop > len(memory):
        raise DamagedError(f"{path}: the bytes of {name!r} are not all there")
    return tensor_in(memory, data + start, element, shape)

"""Directories as Hugging Face writes them: safetensors files by size, and an index of names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torchrelay.checkpoint.format import canonical_json
from torchrelay.checkpoint.interop.content import Content, Incoming
from torchrelay.checkpoint.interop.safetensors_files import read_safetensors, write_safetensors
from torchrelay.errors import DamagedError, FormatError, RelayError, StorageError, UsageError

INDEX = "model.safetensors.index.json"
ONE = "model.safetensors"
_INDEX_LIMIT = 256 << 20


def write_huggingface(directory: Path, content: Content, shard_bytes: int) -> None:
    """Write files of at most `shard_bytes` of data (or one tensor), and the index if there are several."""
    shards = _shards(content, shard_bytes)
    if len(shards) == 1:
        write_safetensors(directory / ONE, content.tensors, content.ties)
        return
    names = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        ties = {name: kept for name, kept in content.ties.items() if kept in shard}
        write_safetensors(directory / file, {name: content.tensors[name] for name in shard}, ties)
        names.update(dict.fromkeys(shard, file))
    total = sum(tensor.nbytes for tensor in content.tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": names}
    (directory / INDEX).write_text(json.dumps(index, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _shards(content: Content, shard_bytes: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    used = 0
    for name, tensor in content.tensors.items():
        if shards[-1] and used + tensor.nbytes > shard_bytes:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += tensor.nbytes
    return shards


def read_huggingface(directory: Path) -> Incoming:
    """All tensors of a directory, by its index or of its only file.

    Raises UsageError where there is neither, DamagedError where index and files disagree, and what
    `read_safetensors` raises.
    """
    if not (directory / INDEX).is_file():
        if not (directory / ONE).is_file():
            raise UsageError(f"{directory} has neither {INDEX} nor {ONE}: give a directory with one of them")
        return read_safetensors(directory / ONE)
    weight_map = _weight_map(directory / INDEX)
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


def _weight_map(path: Path) -> dict[str, str]:
    try:
        if path.stat().st_size > _INDEX_LIMIT:
            raise FormatError(f"{path} is too large for an index")
        found: Any = canonical_json.loads(path.read_bytes(), what="it", limit_bytes=_INDEX_LIMIT)[
            "weight_map"
        ]
    except RelayError as error:
        raise FormatError(f"{path} is no index: {error}") from error
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror or error}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(f"{path} is no index: it has no weight_map") from error
    sound = isinstance(found, dict) and all(
        isinstance(file, str) and file not in ("", ".", "..") and not set(file) & set("/\\\0")
        for file in found.values()
    )
    if not sound:
        raise FormatError(f"{path}: the weight_map names files outside of its directory")
    return dict(found)

"""Tensors on their way into a safetensors member, and out of one with every byte verified."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from torchrelay.checkpoint.archive import entries as form
from torchrelay.checkpoint.archive.entries import OTHER, Entry
from torchrelay.checkpoint.archive.zip_writing import ALIGNMENT, Chunk, ZipWriter
from torchrelay.checkpoint.format import dtypes
from torchrelay.checkpoint.format.canonical_json import Fields, Json
from torchrelay.checkpoint.format.dtypes import BLOCK, SIZE, block_digests
from torchrelay.checkpoint.format.shard.read_plan import PLAIN, each
from torchrelay.checkpoint.storage.base import Memory
from torchrelay.errors import DamagedError
from torchrelay.metadata.zip_reader import ZipMembers
from torchrelay.records import dataclass

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Outgoing:
    """A tensor to be stored; nothing is copied before it is written."""

    tensor: torch.Tensor
    role: str = OTHER
    trainable: bool = False


def write_tensors(writer: ZipWriter, member: str, tensors: Mapping[str, Outgoing]) -> Json:
    """Write a member; what the manifest says of its tensors. Raises BlobError for what cannot be stored."""
    entries = {name: _entry(name, one) for name, one in tensors.items()}
    header = Chunk(memoryview(form.header_bytes(entries, ALIGNMENT)))
    order = form.ordered(entries)
    chunks = [Chunk(dtypes.stored_bytes(tensors[name].tensor, name), True) for name in order]
    writer.add(member, [header, *chunks])
    digests = {name: chunk.digests for name, chunk in zip(order, chunks, strict=True)}
    return {name: replace(entry, digests=digests[name]).to_json() for name, entry in entries.items()}


def _entry(name: str, one: Outgoing) -> Entry:
    element = dtypes.logical_dtype(one.tensor.dtype, name)
    dtypes.check_dense(one.tensor, name)
    return Entry(element, tuple(one.tensor.shape), one.role, one.trainable)


class StoredTensors:
    """The tensors of one member, known by the manifest and read when they are asked for."""

    def __init__(self, archive: ZipMembers, member: str, said: Fields) -> None:
        self._archive, self._member = archive, member
        what = f"{said.what}"
        self.entries: dict[str, Entry] = {
            name: form.entry_from_json(Fields(one, f"{what} ({name})"))
            if isinstance(one, dict)
            else _odd(what)
            for name, one in said.values.items()
        }
        self._places = self._find_places()

    def _find_places(self) -> dict[str, int]:
        what = f"{self._archive.what}: {self._member}"
        found = self._archive.members.get(self._member)
        if found is None:
            raise DamagedError(f"{self._archive.what}: has no member {self._member!r}")
        length = bytearray(8)
        self._archive.read_into(self._member, 0, memoryview(length))
        nbytes = int.from_bytes(length, "little")
        if nbytes > min(form.HEADER_LIMIT, found.nbytes - 8):
            raise DamagedError(f"{what}: its header does not fit the member")
        header = bytearray(nbytes)
        self._archive.read_into(self._member, 8, memoryview(header))
        return form.places(bytes(header), 8 + nbytes, found.nbytes, self.entries, what)

    def read(self, name: str) -> torch.Tensor:
        """A new tensor on the CPU, every byte verified. Raises DamagedError naming member and tensor."""
        import torch

        entry = self.entries[name]
        tensor = torch.empty(entry.shape, dtype=dtypes.torch_dtype(entry.element))
        self.read_all([name], [dtypes.memory_of(tensor)])
        return tensor

    def read_all(self, names: Sequence[str], memories: Sequence[Memory]) -> None:
        """Fill memory of exactly the tensors' sizes, every byte verified once it is there; see `read`."""
        self._verify(names, lambda number, at, nbytes: memoryview(memories[number])[at : at + nbytes])

    def check(self, names: Sequence[str]) -> None:
        """Read tensors and keep nothing of them: whether every byte is what was saved; see `read`."""
        mine = threading.local()

        def scratch(number: int, at: int, nbytes: int) -> memoryview:
            if not hasattr(mine, "memory"):
                mine.memory = memoryview(bytearray(BLOCK))
            memory: memoryview = mine.memory
            return memory[:nbytes]

        self._verify(names, scratch)

    def read_range(self, name: str, start: int, memory: memoryview) -> None:
        """Fill memory with a tensor's bytes from `start` on; every block is verified, see `read`."""
        nbytes, stop = self.entries[name].nbytes, start + len(memory)
        block = memoryview(bytearray(BLOCK))
        for at in range(start // BLOCK * BLOCK, stop, BLOCK):
            end = min(at + BLOCK, nbytes)
            if start <= at and end <= stop:
                self._verified(name, at, memory[at - start : end - start])
                continue
            self._verified(name, at, block[: end - at])
            first, last = max(start, at), min(stop, end)
            memory[first - start : last - start] = block[first - at : last - at]

    def _verify(self, names: Sequence[str], place: Callable[[int, int, int], memoryview]) -> None:
        """Read block by block, so that each is hashed while it lies in the processor's cache.

        The digests prove the bytes, so the zip's CRC of the member is left alone.
        """
        blocks = [
            (number, at, min(BLOCK, nbytes - at))
            for number, name in enumerate(names)
            for nbytes in [self.entries[name].nbytes]
            for at in range(0, nbytes, BLOCK)
        ]
        each(
            lambda block: self._verified(names[block[0]], block[1], place(*block)), blocks,
            sum(nbytes for _, _, nbytes in blocks), PLAIN.threads,
        )  # fmt: skip

    def _verified(self, name: str, at: int, memory: memoryview) -> None:
        self._archive.read_into(self._member, self._places[name] + at, memory)
        index = at // BLOCK * SIZE
        if block_digests(memory) != self.entries[name].digests[index : index + SIZE]:
            raise DamagedError(
                f"{self._archive.what}: {name!r} in {self._member} is damaged: its bytes are not those saved"
            )


def _odd(what: str) -> Entry:
    raise DamagedError(f"{what} is damaged: a tensor is not described")

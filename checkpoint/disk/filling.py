"""Getting the data of a part into its file: hashed on the way, by whatever path the file takes fastest."""

from __future__ import annotations

from collections.abc import Iterator

from torchrelay.checkpoint.disk import bounce
from torchrelay.checkpoint.disk.extents import Digests, Segment, blocks, extents, segments
from torchrelay.checkpoint.disk.seconds import Seconds
from torchrelay.checkpoint.disk.shard import HeaderFrame, Part
from torchrelay.checkpoint.storage.base import WriteHandle
from torchrelay.checkpoint.storage.threads import share


def fill(handle: WriteHandle, part: Part, frame: HeaderFrame, seconds: Seconds, writers: int) -> Digests:
    """Write the data of a part behind its header's place and return what was hashed.

    Where the handle wants aligned memory, `writers` threads take segments in turn, else this one alone and in
    order; all have ended when this returns. Raises BlobError and StorageError; the file is then not whole.
    """
    filling = _Filling(handle, frame.digest_bytes)
    own, writers = Seconds(), writers if handle.alignment else 1
    source = extents(part.entries, filling.digests, own)
    share(filling.write, segments(source, frame.nbytes, bounce.SIZE), writers)
    seconds.add_mean([own, *filling.seconds], writers)
    return filling.digests


class _Filling:
    """One file on its way; what several threads work on."""

    def __init__(self, handle: WriteHandle, digest_bytes: int) -> None:
        self.digests = Digests(digest_bytes)
        self.seconds: list[Seconds] = []
        self._handle = handle

    def _clock(self) -> Seconds:
        seconds = Seconds()
        self.seconds.append(seconds)
        return seconds

    def write(self, todo: Iterator[Segment]) -> None:
        """Copy a segment together in aligned memory, block by block; hash and write that."""
        seconds = self._clock()
        with bounce.pool().buffer() as room:
            for segment in todo:
                at = 0
                for piece in blocks(segment):
                    with seconds.spent("write"):
                        end = at + bounce.copy(room, at, piece.extent.data[piece.start : piece.stop])
                    with seconds.spent("hash"):
                        self.digests.hash(piece, room[at:end])
                    at = end
                with seconds.spent("write"):
                    self._handle.write_at(segment.offset, room[:at])

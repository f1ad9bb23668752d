"""Copies into staging memory: at once, or later by another thread.

On the CPU a late copy is a plain move of bytes that holds no interpreter lock. On CUDA
copies run on a stream of their own, which waits for the compute that was queued before; at the gate,
compute waits for their event.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from torchrelay.checkpoint.asynchronous.arena import Room
from torchrelay.checkpoint.format.dtypes import stored_bytes

_PLAIN = (torch.Tensor, torch.nn.Parameter)


class Copier:
    """Copies the pieces of one save."""

    def __init__(self) -> None:
        self._ready: dict[torch.device, Any] = {}
        self._streams: dict[torch.device, Any] = {}
        self._done: list[tuple[torch.device, Any]] = []
        self._current: int | None = None

    def copy_now(self, target: Room, source: torch.Tensor, name: str) -> None:
        """Copy any tensor that can be stored; raises BlobError for others."""
        if source.is_cpu and source.nbytes == target.nbytes and is_plain(source):
            ctypes.memmove(target.address, source.data_ptr(), target.nbytes)
            return
        if source.nbytes == target.nbytes and is_plain(source):  # from the device right into its place
            target.tensor.copy_(source.detach().reshape(-1).view(torch.uint8))
            return
        view = stored_bytes(source, name)
        if len(view):
            target.tensor.copy_(torch.frombuffer(view, dtype=torch.uint8))

    def begin(self, devices: Collection[torch.device]) -> None:
        """Mark the moment of the boundary in the compute streams, in the thread that computes."""
        for device in devices:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(device))
            self._ready[device] = event
            self._current = torch.cuda.current_device()

    def enter_thread(self) -> None:
        """Let the calling thread compute where the one of `begin` does.

        A new thread begins at device 0, where every rank of a host would take memory for nothing.
        """
        if self._current is not None:
            torch.cuda.set_device(self._current)

    def copy_late(self, target: Room, source: torch.Tensor) -> None:
        """Copy a contiguous tensor; complete after `end`."""
        if source.is_cpu:
            ctypes.memmove(target.address, source.data_ptr(), target.nbytes)
            return
        with self.aside(source):
            target.tensor.copy_(source.detach().reshape(-1).view(torch.uint8), non_blocking=True)

    def aside(self, source: torch.Tensor) -> AbstractContextManager[Any]:
        """Where to look at a source: not behind what the training has queued."""
        return nullcontext() if source.is_cpu else torch.cuda.stream(self._stream(source.device))

    def end(self) -> None:
        """Wait until the late copies are complete, those before one that failed too."""
        for device, stream in self._streams.items():
            event = torch.cuda.Event()
            event.record(stream)
            self._done.append((device, event))
            event.synchronize()

    def let_compute_wait(self) -> None:
        """Let what the calling thread computes next wait for the copies."""
        for device, event in self._done:
            torch.cuda.current_stream(device).wait_event(event)

    def _stream(self, device: torch.device) -> Any:
        if device not in self._streams:
            stream = torch.cuda.Stream(device)
            if device in self._ready:
                stream.wait_event(self._ready[device])
            self._streams[device] = stream
        return self._streams[device]


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the memory of a tensor is its content, in order."""
    if type(tensor) not in _PLAIN or tensor.layout is not torch.strided or tensor.is_meta:
        return False
    return tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)
